"""Run one module on several ranks under torchrun, follow what they say, and never leave a rank behind.

torchrun starts each rank in a session of its own, so killing torchrun's process group does not reach them.
`python -m flows.ranks` is torchrun with one thing added: it ends, and ends its ranks, when its stdin closes,
which happens when the parent lets go of it for whatever reason, SIGKILL included.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_core.configuration import UserError
from dflash_core.own_modules import own_modules
from flows.devices import held_locks, visible_gpus
from flows.launch import OnMessage, ignore, python_module

TAIL_LINES = 80
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Seconds between SIGTERM and SIGKILL; `wait_for_ranks` makes it count with every torch."""
PIECE_CHARACTERS = (select.PIPE_BUF - 128) // 2
"""Of a message that is told in pieces: quotes and backslashes count twice, names and numbers go with it."""
PARENT_VARIABLE = "DFLASH_TORCHRUN_PID"
"""Process id of the torchrun that a rank belongs to."""
FAILURE_S = 120
"""How long ranks may take to end once one of them has failed, or all are silent: a checkpoint may be on its
way, but the others can also be waiting for the one that failed, for ever."""
START_S = 120.0
"""Silence that is forgiven at least until the first line: a busy machine imports torch slowly."""


class RanksFailed(RuntimeError):
    """A rank ended with an error; the message holds the first one's."""


def run_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    gpus: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    silence_timeout_s: float | None = None,
    shutdown_s: int = 10,
    on_message: OnMessage = ignore,
) -> None:
    """Run `python -m module arguments` on `ranks` processes of this host and return when all have ended well.

    `gpus` names the devices, one a rank; none means CPU. Each rank sees its GPU as device 0, so that what it
    compiles can be used by all. `environment` counts more than what is set here. A rank says things by
    printing JSON objects with a "kind", one a line; all other lines arrive as {"kind": "stderr",
    "text": ...}. Raises UserError when a rank's error message says so, RanksFailed otherwise. Whatever ends
    this call, an exception from outside included, ends the ranks; they have `shutdown_s` after SIGTERM to
    write what they must not lose, and FAILURE_S at most when it is one of them that has failed.
    """
    if gpus and len(gpus) != ranks:
        raise UserError(f"{ranks} ranks need {ranks} GPUs, but {len(gpus)} are named: {', '.join(gpus)}")
    env = {**os.environ, **own_modules(), **rank_environment(gpus, ranks), **(environment or {})}
    env["PYTHONUNBUFFERED"] = "1"
    env[SHUTDOWN_VARIABLE] = str(shutdown_s)
    command = [*python_module("flows.ranks"), "--standalone", f"--nproc-per-node={ranks}"]
    command += [*(["--virtual-local-rank"] if gpus else []), "-m", module, *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        start_new_session=True,
        pass_fds=held_locks(),  # torchrun ends after its ranks, or they with it
    )
    grace = shutdown_s
    failed_s = min(shutdown_s, FAILURE_S)
    try:
        first_error, tail = _follow(process, silence_timeout_s, failed_s, on_message)
        if first_error is not None:
            grace = 0
        code = process.wait() if first_error is None else 1
    except RanksFailed:
        grace = failed_s
        raise
    finally:
        _end(process, grace)
    if code != 0:
        _raise(code, first_error, tail)


def rank_environment(gpus: Sequence[str], ranks: int) -> dict[str, str]:
    """Return the variables that say what the ranks compute on: their GPUs, or their share of the CPU."""
    if gpus:
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible_gpus(",".join(gpus)))}
    share = str(max(1, (os.cpu_count() or 1) // ranks))
    return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", share)}


def _follow(
    process: subprocess.Popen[str], silence_timeout_s: float | None, failed_s: float, on_message: OnMessage
) -> tuple[dict[str, Any] | None, list[str]]:
    """Pass messages on until the output closes, or for `failed_s` after the first error; return that, and the
    last lines.
    """
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=read, name="ranks", daemon=True).start()
    first_error: dict[str, Any] | None = None
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    pieces: defaultdict[int, str] = defaultdict(str)
    patience = None if silence_timeout_s is None else max(silence_timeout_s, START_S)
    given_up = math.inf
    while True:
        left_s = given_up - time.monotonic()
        try:
            line = lines.get(timeout=patience if first_error is None else max(0.0, left_s))
        except queue.Empty:
            if first_error is not None:
                return first_error, list(tail)
            raise RanksFailed(f"no rank said anything for {patience:g} s; they were ended") from None
        patience = silence_timeout_s
        if line is None:
            return first_error, list(tail)
        message = _parse(line)
        if message["kind"] == "piece":
            pieces[message["thread"]] += message["text"]
            if message["left"]:
                continue
            message = _parse(pieces.pop(message["thread"]))
        if message["kind"] == "error" and first_error is None:
            first_error, given_up = message, time.monotonic() + failed_s
            words = f"rank {message['rank']} has failed: {message['type']}: {message['text']}"
            on_message({"kind": "log", "level": "WARNING", "text": words})
        elif message["kind"] == "stderr":
            tail.append(line)
        on_message(message)


def _parse(line: str) -> dict[str, Any]:
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            if isinstance(message, dict) and "kind" in message:
                return message
    return {"kind": "stderr", "text": line}


def _raise(code: int, error: dict[str, Any] | None, tail: list[str]) -> None:
    if error is None:
        raise RanksFailed(f"the ranks ended with exit code {code}; last lines:\n" + "\n".join(tail))
    if error.get("user"):
        raise UserError(error["text"])
    raise RanksFailed(
        f"rank {error['rank']}: {error['type']}: {error['text']}\n{error['traceback']}".rstrip()
    )


def _end(process: subprocess.Popen[str], shutdown_s: int) -> None:
    """End torchrun and its ranks: first by closing its stdin, then by force, descendants included."""
    if process.poll() is not None:
        return
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(shutdown_s + 5)
    except subprocess.TimeoutExpired:
        for pid in [*descendants(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def descendants(root: int) -> list[int]:
    """Return the process ids below `root`, from /proc; empty where there is none."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in parentheses may hold spaces: the parent's id is the second field after it.
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, frontier = [], [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def running(pids: Iterable[int]) -> list[int]:
    """Return those of these processes that have not ended; one that waits for its parent's look has."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X"):
                found.append(pid)
    return found


def say(kind: str, **fields: Any) -> None:
    """Send one message from a rank to the parent. Of any length: it arrives whole."""
    # The ranks share the pipe, which keeps a write together up to PIPE_BUF bytes.
    line = json.dumps({"kind": kind, **fields})
    if len(line) < select.PIPE_BUF:
        _write_line(line)
        return
    starts = range(0, len(line), PIECE_CHARACTERS)
    for left, start in zip(reversed(range(len(starts))), starts, strict=True):
        text = line[start : start + PIECE_CHARACTERS]
        _write_line(
            json.dumps({"kind": "piece", "thread": threading.get_native_id(), "left": left, "text": text})
        )


def _write_line(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the parent was killed: there is a last checkpoint to write
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def serve_rank(main: Callable[[], None]) -> None:
    """Be a rank: run `main`, tell the parent of an error, and die when torchrun does. For the main thread."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    parent = os.environ.pop(PARENT_VARIABLE, None)  # unset where somebody runs torchrun himself
    if parent is not None and int(parent) != os.getppid():
        sys.exit("torchrun ended while this rank started")  # too early for the signal
    try:
        main()
    except Exception as error:  # noqa: BLE001  the parent must hear of every failure, whatever its type
        say(
            "error",
            rank=int(os.environ["RANK"]),
            user=isinstance(error, UserError),
            type=type(error).__name__,
            text=str(error) or type(error).__name__,
            traceback="".join(traceback.format_exception(error)),
        )
        sys.exit(1)


def _end_with(line: int) -> None:
    """Wait for the other end of the line to close, then let torchrun's own handler end the ranks."""
    # Not through a buffered file: at exit, Python would wait for the lock that this thread holds on it.
    while os.read(line, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def wait_for_ranks(seconds: int) -> None:
    """Let torchrun's ranks have so long after SIGTERM before they are killed, in place of its own 30 s.

    torch 2.11 does not know the variable, and later versions forget it where a rank has failed: they all go
    by the default of this method.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    assert PContext.close.__defaults__ is not None
    PContext.close.__defaults__ = (*PContext.close.__defaults__[:-1], seconds)  # "timeout" is the last one


def main() -> None:
    """Be torchrun, tied to the parent's end of stdin."""
    # The ranks must not inherit the line to the parent.
    line = os.dup(0)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123  a device, not a path of ours
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_end_with, args=(line,), name="line to parent", daemon=True).start()
    from torch.distributed.run import main as torchrun

    os.environ[PARENT_VARIABLE] = str(os.getpid())
    if SHUTDOWN_VARIABLE in os.environ:
        wait_for_ranks(int(os.environ[SHUTDOWN_VARIABLE]))
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as failed:
        # A rank that could say why it failed has done so.
        for rank, failure in failed.failures.items():
            if failure.exitcode < 0:
                print(f"rank {rank} was ended by {failure.signal_name()}")
        sys.exit(1)


if __name__ == "__main__":
    main()
