"""A process that imports everything once and forks workers on request, so that a test can kill many of them.

Run as `python -m tests.storage.killable`; it reads one JSON line a worker, answers with the worker's process
id when that begins its work, then, when it is over, with its exit status.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn


def main() -> None:
    import torch

    import storage.writer  # noqa: F401
    import tests.storage.made  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            work(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def work(task: dict[str, Any]) -> NoReturn:
    """What one worker does, in a process of its own."""
    from storage.dataset import create_dataset, open_dataset
    from storage.objects import StoreConfig, open_store
    from tests.storage.made import made_samples, made_spec, write_missing

    code = 1
    try:
        store = open_store(task["store"], StoreConfig(part_bytes=5 << 20))
        store.folders()  # the connection is made before the clock runs
        print(os.getpid(), flush=True)
        if task["do"] == "write":
            write_missing(open_dataset(task["store"]))
        elif task["do"] == "create":
            create_dataset(store, "made", made_spec(), made_samples(400))
        else:
            store.put_file(task["key"], Path(task["file"]))
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)


class Workers:
    """Starts workers one after the other, and kills them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, task: dict[str, Any], kill_after: float | None = None) -> int:
        """Run one worker; returns its exit code, -9 when it was killed in time."""
        child = self._begin(task)
        if kill_after is not None:
            time.sleep(kill_after)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return self._answer()

    def seconds(self, task: dict[str, Any]) -> float:
        """Let one worker finish; returns how long its work takes here and now."""
        self._begin(task)
        began = time.monotonic()
        assert self._answer() == 0
        return time.monotonic() - began

    def _begin(self, task: dict[str, Any]) -> int:
        """Start one worker; returns its process id when it begins its work, after all imports."""
        assert self._process.stdin
        print(json.dumps(task), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> int:
        assert self._process.stdout
        return int(self._process.stdout.readline())

    def kill_often(self, do: str, stores: Iterable[str], longest: float, seed: int, kills: int) -> list[str]:
        """Kill so many workers at random moments of their work, and start them again.

        One that was done before it was killed does not count, and the next works at another store, so that
        there is work left to be killed in, and is killed sooner: the machine may have become faster since
        `longest` was measured. Returns the stores that were worked at, all of them finished.
        """
        moments, coming, killed = random.Random(seed), iter(stores), 0
        used = [next(coming)]
        while killed < kills:
            code = self.run({"do": do, "store": used[-1]}, moments.uniform(0, longest))
            assert code in (0, -signal.SIGKILL)
            if code:
                killed += 1
            else:
                assert len(used) <= 5 * kills, f"only {killed} workers were killed while working"
                used.append(next(coming))
                longest *= 0.8
        assert self.run({"do": do, "store": used[-1]}) == 0
        return used


@contextmanager
def workers(environment: dict[str, str]) -> Iterator[Workers]:
    """Start the forking process with these variables added to ours."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.storage.killable"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            yield Workers(process)
        finally:
            process.kill()


if __name__ == "__main__":
    main()
