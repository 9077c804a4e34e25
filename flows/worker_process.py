"""One worker slot and the process in it: start, talk, notice death and silence, end everything it started.

Knows nothing of Prefect, torch or what a job is. The worker's end of the line is `flows.channel`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_core.configuration import UserError
from dflash_core.own_modules import own_modules
from flows.devices import held_locks, visible_gpus
from storage.object_store import StoreError

Message = dict[str, Any]
OnMessage = Callable[[Message], None]
_Inbox = tuple[int, "queue.SimpleQueue[Message]"]
"""The number of a job and the messages that came for it."""

STOP_GRACE_S = 5.0
"""How long a worker may take to end by itself before it is killed."""
STORE_PAUSE_S = 30.0
"""How long a slot waits before it starts a worker again that could not reach the store."""
STDERR_LINES_KEPT = 40


class JobError(RuntimeError):
    """A job did not end well, and may be tried again."""

    starting = False
    """Whether it never began, as the worker did not start."""


class WorkerDied(JobError):
    """The worker's process ended, fell silent, or cannot be trusted any more."""

    def __init__(self, text: str, *, blameless: bool = False) -> None:
        super().__init__(text)
        self.blameless = blameless
        """Whether this job may not be the cause: the process had another one too, or was gone before it."""


class JobFailed(JobError):
    """The worker reported an error and lives on."""


class PoolClosed(RuntimeError):
    """The pool was closed, or has no slot left that can start a worker; the job must not be tried again."""


def ignore(message: Message) -> None:
    """Take a message and do nothing."""


class _Process:
    """One operating-system process: two threads read what it says and sort it by the job it belongs to."""

    def __init__(self, name: str, argv: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        self.last_sign = time.monotonic()
        """When a message arrived last. Lines on stderr are no signs of life."""
        self.leaving = False
        """No job may be sent to it any more; those that it has may end."""
        self._stderr_tail: deque[str] = deque(maxlen=STDERR_LINES_KEPT)
        self._lock = threading.Condition()
        self._ids = itertools.count()
        self._inboxes: dict[int, queue.SimpleQueue[Message]] = {}
        self._last_jobs: frozenset[int] | None = None
        """The jobs that it had when it was first known to be lost."""
        self._unheard: deque[Message] = deque(maxlen=100)
        self._ended = False
        self._popen = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            # Ctrl-C goes to the whole terminal group: the parent alone decides how the workers end.
            start_new_session=True,
            pass_fds=held_locks(),
        )
        self.pid = self._popen.pid
        for read in (self._read_stdout, self._read_stderr):
            threading.Thread(target=read, name=f"{name} pipe", daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def open_inbox(self) -> _Inbox:
        """Have the messages of a new job collected; those that name none go to the oldest inbox."""
        inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        with self._lock:
            job_id = next(self._ids)
            for message in self._unheard:
                inbox.put(message)
            self._unheard.clear()
            self._inboxes[job_id] = inbox
            if self._ended:
                inbox.put({"kind": "exit"})
        return job_id, inbox

    def close_inbox(self, job_id: int) -> None:
        """Stop collecting for a job; what came after its answer and names no job goes to another."""
        with self._lock:
            inbox = self._inboxes.pop(job_id, None)
            self._lock.notify_all()
            while inbox is not None and not inbox.empty():
                message = inbox.get()
                if message["kind"] != "exit":
                    self._sort(message)

    def _deliver(self, message: Message) -> None:
        with self._lock:
            self._sort(message)

    def _sort(self, message: Message) -> None:
        if "id" in message:
            if message["id"] in self._inboxes:  # else nobody waits for the answer any more
                self._inboxes[message["id"]].put(message)
            return
        inbox = next(iter(self._inboxes.values()), None)
        if inbox is None:
            self._unheard.append(message)
        else:
            inbox.put(message)

    def _read_stdout(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if isinstance(message, dict):
                self.last_sign = time.monotonic()
                self._deliver(message)
            else:
                self._deliver({"kind": "stderr", "text": line.rstrip()})
        with self._lock:
            self._ended = True
            self._note_loss()
            for inbox in self._inboxes.values():
                inbox.put({"kind": "exit"})

    def _read_stderr(self) -> None:
        assert self._popen.stderr is not None
        for line in self._popen.stderr:
            if text := line.rstrip():
                self._stderr_tail.append(text)
                self._deliver({"kind": "stderr", "text": text})

    def _note_loss(self) -> None:
        if self._last_jobs is None:
            self._last_jobs = frozenset(self._inboxes)

    def lost_beside(self, job_id: int) -> bool:
        """Say of a process that is lost, be it just now, whether another job than this may be the cause."""
        with self._lock:
            self._note_loss()
            return self._last_jobs != {job_id}

    def send(self, message: Message) -> None:
        """Write one message to the process; raises BrokenPipeError when it no longer listens."""
        assert self._popen.stdin is not None
        with self._lock:
            self._popen.stdin.write(json.dumps(message) + "\n")
            self._popen.stdin.flush()

    def obituary(self) -> str:
        """Wait for the end of the process and say how it ended, with its last words."""
        code = self._popen.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} {how}{self.last_words()}"

    def last_words(self) -> str:
        time.sleep(0.05)  # the two pipes of a dead process are read by two threads
        return "; its last words:\n" + "\n".join(self._stderr_tail) if self._stderr_tail else ""

    def leave(self) -> None:
        """Wait until the jobs that it has are answered, and end it."""
        with self._lock:
            self._lock.wait_for(lambda: not self._inboxes)
        self.stop(STOP_GRACE_S)

    def stop(self, grace_s: float) -> None:
        """End the process and everything it started. Safe from any thread, and when it is already gone."""
        if grace_s:
            with contextlib.suppress(OSError, ValueError):
                assert self._popen.stdin is not None
                self._popen.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()


class Worker:
    """One slot (a group of GPUs such as "0" or "0,1", or "cpu") and the process that occupies it, if any."""

    def __init__(
        self,
        index: int,
        slot: str,
        argv: Sequence[str],
        setup: Message,
        limits: tuple[float, float],
        environment: Mapping[str, str],
    ) -> None:
        self.slot = slot
        self.name = f"worker {index} ({slot if slot == 'cpu' else 'gpu ' + slot})"
        self.jobs = 0
        """Jobs that it has now; one that is to be alone counts as many as it may have."""
        self.starts = 0
        self.failed_starts = 0
        """Starts in a row that did not succeed, those not counted that failed for the store."""
        self._argv = argv
        self._setup = {**setup, "worker": index}
        self._environment = {**slot_environment(slot), **environment}
        self._start_timeout_s, self._silence_timeout_s = limits
        self._process: _Process | None = None
        self._lock = threading.Lock()
        self._retired = threading.Event()
        self._start_after = 0.0

    @property
    def pid(self) -> int | None:
        """Process id of the living worker, or None."""
        process = self._process
        return process.pid if process is not None and process.alive else None

    @property
    def leaving(self) -> bool:
        """Whether the process only ends the jobs that it has; a further one would wait for them."""
        process = self._process
        return process is not None and process.leaving

    def call(self, job: Message, on_message: OnMessage = ignore) -> Message:
        """Run one job and return its "done" message, starting the process first when there is none.

        Raises UserError (StoreError among them) or JobFailed as the worker says, WorkerDied when it ends,
        says nothing for too long or must not be used any more; then the next job starts another process.
        """
        with self._lock:
            process = self._process
            if process is not None and process.leaving:
                process.leave()
            if process is None or not process.alive:
                process = self._start(on_message)
            inbox = process.open_inbox()  # from here on nobody takes the process for one without jobs
        return self._converse(process, inbox, job, "done", self._silence_timeout_s, on_message)

    def warm(self, on_message: OnMessage = ignore) -> None:
        """Start the process ahead of its first job; a failure is only told: the job will meet it again.

        That a start was cut short because the pool is closed is nothing to tell.
        """
        try:
            with self._lock:
                if self.pid is None:
                    self._start(on_message)
        except (JobError, PoolClosed, UserError) as error:
            if not self._retired.is_set():
                on_message(log_message(f"{self.name} did not start: {error}", "WARNING"))

    def renew(self) -> None:
        """Have the next job start another process, once the jobs of this one are answered."""
        if self._process is not None:
            self._process.leaving = True

    def _start(self, on_message: OnMessage) -> _Process:
        if self._retired.wait(max(0.0, self._start_after - time.monotonic())):
            raise PoolClosed("the worker pool is closed")
        began = time.monotonic()
        self.starts += 1
        process = self._process = _Process(self.name, self._argv, self._environment)
        try:
            inbox = process.open_inbox()
            self._converse(process, inbox, self._setup, "ready", self._start_timeout_s, on_message)
        except Exception as error:
            process.stop(grace_s=0)  # it may be about to end by itself; nobody may take it for alive
            if isinstance(error, StoreError):  # says nothing against this slot
                self._start_after = time.monotonic() + STORE_PAUSE_S
            else:
                self.failed_starts += 1
            if isinstance(error, JobError):
                error.starting = True
            raise
        self.failed_starts = 0
        seconds = time.monotonic() - began
        on_message(log_message(f"{self.name}: process {process.pid} is ready after {seconds:.1f} s"))
        return process

    def _converse(
        self,
        process: _Process,
        inbox: _Inbox,
        message: Message,
        wanted: str,
        silence_s: float,
        on_message: OnMessage,
    ) -> Message:
        """Send a message and return the wanted answer to it, passing on what comes before."""
        job_id, messages = inbox
        process.last_sign = time.monotonic()
        try:
            try:
                process.send({**message, "id": job_id})
            except (BrokenPipeError, ValueError) as error:  # ValueError: the pipe is closed
                process.stop(grace_s=0)
                raise WorkerDied(process.obituary(), blameless=True) from error
            return self._await(process, job_id, messages, wanted, silence_s, on_message)
        finally:
            process.close_inbox(job_id)

    def _await(
        self,
        process: _Process,
        job_id: int,
        messages: queue.SimpleQueue[Message],
        wanted: str,
        silence_s: float,
        on_message: OnMessage,
    ) -> Message:
        while True:
            try:
                message = messages.get(timeout=max(0.0, process.last_sign + silence_s - time.monotonic()))
            except queue.Empty:
                if time.monotonic() < process.last_sign + silence_s:
                    continue  # it spoke of another job meanwhile
                shared = process.lost_beside(job_id)
                process.stop(grace_s=0)
                limit = "; raise workers.start_timeout_s if a start takes longer" if wanted == "ready" else ""
                words = f"{self.name} said nothing for {silence_s:g} s and was killed{limit}"
                raise WorkerDied(words + process.last_words(), blameless=shared) from None
            kind = message.get("kind")
            if kind == wanted:
                return message
            if kind == "exit":
                process.stop(grace_s=0)
                raise WorkerDied(process.obituary(), blameless=process.lost_beside(job_id))
            if kind == "error":
                raise self._error(process, job_id, message)
            on_message(message)

    def _error(self, process: _Process, job_id: int, message: Message) -> Exception:
        if message.get("store"):
            return StoreError(message["text"])
        if message.get("user"):
            return UserError(message["text"])
        text = f"{self.name}: {message['type']}: {message['text']}\n{message.get('traceback', '')}"
        if message.get("unusable"):
            process.leaving = True  # by itself, once it has finished the job before this one
            return WorkerDied(text, blameless=process.lost_beside(job_id))
        return JobFailed(text)

    def retire(self) -> None:
        """End the process, and never start another."""
        self._retired.set()
        # A start may be going on in another thread, which holds the lock until the process is ready: end
        # that process first, then look again for one that was started in between.
        if self._process is not None:
            self._process.stop(STOP_GRACE_S)
        with self._lock:
            if self._process is not None:
                self._process.stop(STOP_GRACE_S)


def slot_environment(slot: str) -> dict[str, str]:
    """Return the environment of a worker: its GPUs, and nothing that would make it draw progress bars."""
    env = {**os.environ, **own_modules()}
    env.update(
        CUDA_VISIBLE_DEVICES=",".join(visible_gpus(slot)),
        PYTHONUNBUFFERED="1",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        TQDM_DISABLE="1",
    )
    return env


def python_module(name: str) -> list[str]:
    """Return the command that runs a module with this interpreter."""
    return [sys.executable, "-m", name]


def log_message(text: str, level: str = "INFO") -> Message:
    """Return what a worker would send to have this in the log of the run."""
    return {"kind": "log", "level": level, "text": text}
