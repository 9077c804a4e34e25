"""Start long-lived worker processes, lend them out job by job, and replace those that die or hang.

Knows nothing of Prefect, torch or what a job is. The workers' end of the line is `flows.channel`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dflash_core.configuration import UserError

Message = dict[str, Any]
OnMessage = Callable[[Message], None]

STOP_GRACE_S = 5.0
"""How long a worker may take to end by itself before it is killed."""
START_FAILURES_ALLOWED = 3
"""A slot whose worker fails to start this many times in a row is given up."""
STDERR_LINES_KEPT = 40


class JobError(RuntimeError):
    """A job did not end well, and may be tried again. `worker` is the one that had it."""

    worker: Worker | None = None


class WorkerDied(JobError):
    """The worker's process ended or fell silent."""


class JobFailed(JobError):
    """The worker reported an error and lives on."""


class PoolClosed(RuntimeError):
    """The pool was closed, or has no slot left that can start a worker; the job must not be tried again."""


def ignore(message: Message) -> None:
    """Take a message and do nothing."""


class Worker:
    """One slot (a group of GPUs such as "0" or "0,1", or "cpu") and the process that occupies it, if any."""

    def __init__(
        self, index: int, slot: str, argv: Sequence[str], setup: Message, limits: tuple[float, float]
    ) -> None:
        self.index = index
        self.slot = slot
        self.name = f"worker {index} ({slot if slot == 'cpu' else 'gpu ' + slot})"
        self.starts = 0
        self.failed_starts = 0
        self._argv = list(argv)
        self._setup = setup
        self._start_timeout_s, self._silence_timeout_s = limits
        self._process: subprocess.Popen[str] | None = None
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stderr_tail: deque[str] = deque(maxlen=STDERR_LINES_KEPT)
        self._process_lock = threading.Lock()
        self._retired = False

    @property
    def pid(self) -> int | None:
        """Process id of the living worker, or None."""
        alive = self._process is not None and self._process.poll() is None
        return self._process.pid if alive and self._process else None

    def call(self, job: Message, on_message: OnMessage = ignore) -> Message:
        """Run one job and return its "done" message, starting the process first when there is none.

        Raises UserError or JobFailed as the worker says, WorkerDied when it ends or says nothing for too
        long; in the last case the process is gone when this returns.
        """
        if self.pid is None:
            self._start(on_message)
        self._send(job)
        return self._until("done", self._silence_timeout_s, on_message)

    def _start(self, on_message: OnMessage) -> None:
        began = time.monotonic()
        self._inbox = queue.SimpleQueue()
        self._stderr_tail.clear()
        self.starts += 1
        self.failed_starts += 1
        with self._process_lock:
            if self._retired:
                raise PoolClosed("the worker pool is closed")
            process = self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=slot_environment(self.slot),
                # Ctrl-C goes to the whole terminal group: the parent alone decides how the workers end.
                start_new_session=True,
            )
        for name, read in (("stdout", self._read_stdout), ("stderr", self._read_stderr)):
            threading.Thread(
                target=read, args=(process, self._inbox), name=f"{self.name} {name}", daemon=True
            ).start()
        self._send(self._setup)
        self._until("ready", self._start_timeout_s, on_message)
        self.failed_starts = 0
        seconds = time.monotonic() - began
        on_message(_log(f"{self.name}: process {process.pid} is ready after {seconds:.1f} s"))

    @staticmethod
    def _read_stdout(process: subprocess.Popen[str], inbox: queue.SimpleQueue[Message]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            inbox.put(message if isinstance(message, dict) else {"kind": "stderr", "text": line.rstrip()})
        inbox.put({"kind": "exit"})

    def _read_stderr(self, process: subprocess.Popen[str], inbox: queue.SimpleQueue[Message]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            if text := line.rstrip():
                self._stderr_tail.append(text)
                inbox.put({"kind": "stderr", "text": text})

    def _send(self, message: Message) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            self.stop()
            raise WorkerDied(f"{self.name} no longer listens{self._last_words()}") from error

    def _until(self, wanted: str, silence_s: float, on_message: OnMessage) -> Message:
        """Return the next message of the wanted kind. Only messages, not stderr, are signs of life."""
        deadline = time.monotonic() + silence_s
        while True:
            try:
                message = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.stop(kill=True)
                raise WorkerDied(
                    f"{self.name} said nothing for {silence_s:g} s and was killed{self._last_words()}"
                ) from None
            kind = message.get("kind")
            if kind == wanted:
                return message
            if kind == "exit":
                raise WorkerDied(self._obituary())
            if kind == "error":
                self._raise(message)
            if kind != "stderr":
                deadline = time.monotonic() + silence_s
            on_message(message)

    def _raise(self, message: Message) -> None:
        if message.get("user"):
            raise UserError(message["text"])
        text = f"{self.name}: {message['type']}: {message['text']}\n{message.get('traceback', '')}"
        if message.get("unusable"):
            self.stop(kill=True)
            raise WorkerDied(text)
        raise JobFailed(text)

    def _obituary(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        self.stop()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} {how}{self._last_words()}"

    def _last_words(self) -> str:
        time.sleep(0.05)  # the two pipes of a dead process are read by two threads
        return "; its last words:\n" + "\n".join(self._stderr_tail) if self._stderr_tail else ""

    def retire(self) -> None:
        """Stop, and never start again."""
        self._retired = True
        self.stop()

    def stop(self, kill: bool = False) -> None:
        """End the process and everything it started. Safe from any thread, and when it is already gone."""
        with self._process_lock:
            process = self._process
            if process is None:
                return
            if not kill:
                with contextlib.suppress(OSError, ValueError):
                    assert process.stdin is not None
                    process.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class WorkerPool:
    """A fixed set of slots whose workers are lent out one job at a time.

    Use as a context manager: leaving it ends every worker within seconds, and whoever waits for one gets
    PoolClosed. `setup` is the first message that each process receives.
    """

    def __init__(
        self,
        slots: Sequence[str],
        argv: Sequence[str],
        setup: Message,
        *,
        start_timeout_s: float = 1800.0,
        silence_timeout_s: float = 600.0,
    ) -> None:
        if not slots:
            raise UserError("no worker slots: name at least one GPU (such as 0) or cpu")
        limits = (start_timeout_s, silence_timeout_s)
        self.workers = [Worker(i, slot, argv, setup, limits) for i, slot in enumerate(slots)]
        self._free = list(self.workers)
        self._usable = len(self.workers)
        self._closed = False
        self._changed = threading.Condition()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers, busy or not."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        stoppers = [threading.Thread(target=worker.retire) for worker in self.workers]
        for thread in stoppers:
            thread.start()
        for thread in stoppers:
            thread.join()

    @contextlib.contextmanager
    def lease(self, avoid: Worker | None = None) -> Iterator[Worker]:
        """Lend a free worker, another than `avoid` when there is a choice. Blocks while all are busy."""
        worker = self._take(avoid)
        try:
            yield worker
        finally:
            self._give_back(worker)

    def _take(self, avoid: Worker | None) -> Worker:
        with self._changed:
            while not self._free and not self._closed and self._usable:
                self._changed.wait()
            if self._closed:
                raise PoolClosed("the worker pool is closed")
            if not self._usable:
                raise PoolClosed(
                    f"no worker can be started any more: each of the {len(self.workers)} slots failed "
                    f"{START_FAILURES_ALLOWED} times in a row"
                )
            others = [worker for worker in self._free if worker is not avoid]
            worker = others[0] if others else self._free[0]
            self._free.remove(worker)
            return worker

    def _give_back(self, worker: Worker) -> None:
        with self._changed:
            if worker.failed_starts >= START_FAILURES_ALLOWED:
                self._usable -= 1
            else:
                self._free.append(worker)
            self._changed.notify_all()

    def run(
        self, job: Message, on_message: OnMessage = ignore, avoid: Worker | None = None
    ) -> tuple[Message, Worker]:
        """Run one job on a free worker; return its "done" message and the worker. Errors as `Worker.call`."""
        with self.lease(avoid) as worker:
            try:
                return worker.call(job, on_message), worker
            except JobError as error:
                if self._closed:
                    raise PoolClosed("the worker pool was closed during the job") from error
                error.worker = worker
                raise


def slot_environment(slot: str) -> dict[str, str]:
    """Return the environment of a worker: its GPUs, and nothing that would make it draw progress bars."""
    env = dict(os.environ)
    env.update(
        CUDA_VISIBLE_DEVICES="" if slot == "cpu" else slot,
        PYTHONUNBUFFERED="1",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        TQDM_DISABLE="1",
    )
    return env


def python_module(name: str) -> list[str]:
    """Return the command that runs a module with this interpreter."""
    return [sys.executable, "-m", name]


def _log(text: str, level: str = "INFO") -> Message:
    return {"kind": "log", "level": level, "text": text}
