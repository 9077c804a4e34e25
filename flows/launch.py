"""Lends long-lived worker processes out job by job, and replaces those that die or hang."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dflash_core.configuration import UserError
from flows.devices import visible_gpus
from flows.worker_process import (
    JobError,
    JobFailed,
    Message,
    OnMessage,
    PoolClosed,
    Worker,
    WorkerDied,
    ignore,
    log_message,
    python_module,
)
from storage.object_store import StoreError

__all__ = [
    "JobError",
    "JobFailed",
    "Message",
    "OnMessage",
    "PoolClosed",
    "Tries",
    "Worker",
    "WorkerDied",
    "WorkerPool",
    "ignore",
    "python_module",
    "visible_gpus",
]

START_FAILURES_ALLOWED = 3
"""A slot whose worker fails to start this many times in a row is given up. Starts that failed because the
store did not answer are not counted; the slot pauses before the next one."""
JOB_FAILURES_ALLOWED = 5
"""A worker that fails this many jobs in a row, while others do as many, is started anew. When that does not
help its slot is given up."""
TRIES_OF_ALL = 3
"""How often a job that the whole run waits for is tried at least."""


@dataclass
class Tries:
    """How the tries of one job ended so far, which says where the next is made. `WorkerPool.run` keeps it."""

    failed_on: set[Worker] = field(default_factory=set)
    alone: bool = False
    """Whether a worker that had started was lost with it: from then on it shares none."""

    def note(self, error: Exception, worker: Worker) -> None:
        """Keep that this worker failed the job so; a loss beside others counts once the job is alone."""
        if isinstance(error, WorkerDied) and not error.starting:
            was_alone, self.alone = self.alone, True
            if error.blameless and not was_alone:
                return
        self.failed_on.add(worker)


@dataclass(eq=False)
class _Request:
    """A job that waits for a worker, another than those to avoid where one is usable."""

    avoid: set[Worker]
    places: int
    """How many of the worker's jobs it counts as."""
    passed: int = 0
    """How many that came later got a worker before it."""


@dataclass
class _Failures:
    """The last jobs of a worker, which all failed."""

    done_before: int
    """How many jobs the pool had done when they began."""
    count: int = 0
    renewed: bool = False
    """Whether the worker was started anew for failures that came before."""


class WorkerPool:
    """A fixed set of slots whose workers are lent out job by job.

    Use as a context manager: leaving it ends every worker within seconds, and whoever waits for one gets
    PoolClosed. `setup` is the first message that each process receives, with its number as "worker";
    `environment` are variables that it gets beside ours. `depth` is how many jobs a worker may hold: with 2
    it can begin one while it finishes (uploads) the one before. `listen` hears whatever workers say in all
    jobs.
    """

    def __init__(
        self,
        slots: Sequence[str],
        argv: Sequence[str],
        setup: Message,
        *,
        depth: int = 1,
        start_timeout_s: float = 1800.0,
        silence_timeout_s: float = 600.0,
        environment: Mapping[str, str] | None = None,
        listen: OnMessage = ignore,
    ) -> None:
        if not slots:
            raise UserError("no worker slots: name at least one GPU (such as 0) or cpu")
        limits = (start_timeout_s, silence_timeout_s)
        variables = environment or {}
        self.workers = [Worker(i, slot, argv, setup, limits, variables) for i, slot in enumerate(slots)]
        self._listen = listen
        self.capacity = depth * len(slots)
        """How many jobs can be held at a time."""
        self._depth = depth
        self._usable = list(self.workers)
        self._waiting: list[_Request] = []
        self._done = 0
        self._failures: dict[Worker, _Failures] = {}
        """Those of the workers whose last job failed."""
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

    def warm(self, count: int, on_message: OnMessage = ignore) -> None:
        """Have the first `count` workers start at once, in the background."""
        for worker in self.workers[:count]:
            # Each thread writes to the log of whoever called, as the caller would.
            context = contextvars.copy_context()
            threading.Thread(target=context.run, args=(worker.warm, on_message), daemon=True).start()

    def run(
        self, job: Message, on_message: OnMessage = ignore, tries: Tries | None = None
    ) -> tuple[Message, Worker]:
        """Run one job on the least busy worker that has not failed it yet, where one is usable.

        Blocks while all those are busy. Returns the "done" message and the worker. A job whose worker does
        not start goes to the next one, while there is one. A job whose worker was lost together with another
        job is done again, alone on a worker: only what that meets counts. Raises as `Worker.call`, or
        PoolClosed.
        """
        tries = tries or Tries()
        done_again = False
        while True:
            try:
                return self._try(job, on_message, tries)
            except JobError as error:
                if error.starting:
                    if tries.failed_on.issuperset(self._usable):
                        raise
                    again = "the job goes to another worker"
                elif isinstance(error, WorkerDied) and error.blameless and not done_again:
                    done_again = True
                    again = "this job may not be the cause, and is done again, alone on a worker"
                else:
                    raise
                on_message(log_message(f"{error}\n{again}", "WARNING"))

    def run_first(self, job: Message, on_message: OnMessage = ignore) -> Message:
        """Run a job that the whole run waits for: a worker that fails it does not end the run.

        Raises as `run`, but JobError only when each usable worker has failed it.
        """
        tries = Tries()
        for count in itertools.count(1):
            try:
                return self.run(job, on_message, tries)[0]
            except JobError as error:
                if not self._usable or (count >= TRIES_OF_ALL and tries.failed_on.issuperset(self._usable)):
                    raise
                on_message(log_message(f"{error}\nit is tried again", "WARNING"))
        raise AssertionError

    def _try(self, job: Message, on_message: OnMessage, tries: Tries) -> tuple[Message, Worker]:
        def heard(message: Message) -> None:
            self._listen(message)
            on_message(message)

        request = _Request(tries.failed_on, self._depth if tries.alone else 1)
        with self._lease(request) as worker:
            try:
                result = worker.call(job, heard)
            except StoreError:
                raise  # it says nothing against the worker
            except (JobError, UserError) as error:
                if self._closed and isinstance(error, JobError):
                    raise PoolClosed("the worker pool was closed during the job") from error
                tries.note(error, worker)
                self._note_failure(worker, on_message)
                raise
            self._note_success(worker)
            return result, worker

    def _note_success(self, worker: Worker) -> None:
        with self._changed:
            self._done += 1
            self._failures.pop(worker, None)

    def _note_failure(self, worker: Worker, on_message: OnMessage) -> None:
        """Start a worker anew that fails while others do not, and give up one that nothing helps."""
        with self._changed:
            failures = self._failures.setdefault(worker, _Failures(self._done))
            failures.count += 1
            done_elsewhere = self._done - failures.done_before
            fails_alone = min(failures.count, done_elsewhere) >= JOB_FAILURES_ALLOWED
            why = f"it failed {failures.count} jobs in a row while others did {done_elsewhere}"
            if worker not in self._usable:
                return
            if worker.failed_starts >= START_FAILURES_ALLOWED:
                self._usable.remove(worker)
                text = f"{worker.name} is given up: it failed to start {worker.failed_starts} times in a row"
            elif not fails_alone or self._usable == [worker]:
                return
            elif failures.renewed:
                self._usable.remove(worker)
                text = f"{worker.name} is given up: {why}, also after it was started anew; the others go on"
            else:
                worker.renew()
                self._failures[worker] = _Failures(self._done, renewed=True)
                text = f"{worker.name} is started anew: {why}"
            self._changed.notify_all()
        on_message(log_message(text, "WARNING"))

    @contextlib.contextmanager
    def _lease(self, request: _Request) -> Iterator[Worker]:
        worker = self._take(request)
        try:
            yield worker
        finally:
            with self._changed:
                worker.jobs -= request.places
                self._changed.notify_all()

    def _take(self, request: _Request) -> Worker:
        with self._changed:
            self._waiting.append(request)
            try:
                while (worker := self._place(request)) is None:
                    self._changed.wait()
                worker.jobs += request.places
                for waiting in self._waiting[: self._waiting.index(request)]:
                    waiting.passed += 1
                return worker
            finally:
                self._waiting.remove(request)
                self._changed.notify_all()

    def _place(self, request: _Request) -> Worker | None:
        """Return the least busy worker with room that is not owed to a request which has waited longer.

        Each of those is owed one, so that one that wants a worker alone gets it: the least busy, and another
        each time that as many were let past as the pool holds, as the first may be stuck. Raises PoolClosed.
        """
        if self._closed:
            raise PoolClosed("the worker pool is closed")
        if not self._usable:
            raise PoolClosed(
                f"no worker can be started any more: each of the {len(self.workers)} slots was given up"
            )
        owed: set[Worker] = set()
        for waiting in self._waiting:
            suitable = [worker for worker in self._usable if worker not in waiting.avoid] or self._usable
            left = [worker for worker in suitable if worker not in owed]
            if waiting is request:
                break
            left.sort(key=lambda worker: worker.jobs)
            owed.update(left[: 1 + waiting.passed // self.capacity])
        free = [
            worker
            for worker in left
            if worker.jobs + request.places <= self._depth and not (worker.jobs and worker.leaving)
        ]
        return min(free, key=lambda worker: worker.jobs, default=None)
