"""Lends long-lived worker processes out job by job, and replaces those that die or hang."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator, Mapping, Sequence

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
    python_module,
)

__all__ = [
    "JobError",
    "JobFailed",
    "Message",
    "OnMessage",
    "PoolClosed",
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
        self, job: Message, on_message: OnMessage = ignore, avoid: Worker | None = None
    ) -> tuple[Message, Worker]:
        """Run one job on the least busy worker, another than `avoid` when there is a choice.

        Blocks while all are busy. Returns the "done" message and the worker. Errors as `Worker.call`, with
        their `worker` set, or PoolClosed.
        """

        def heard(message: Message) -> None:
            self._listen(message)
            on_message(message)

        with self._lease(avoid) as worker:
            try:
                return worker.call(job, heard), worker
            except JobError as error:
                if self._closed:
                    raise PoolClosed("the worker pool was closed during the job") from error
                error.worker = worker
                raise

    @contextlib.contextmanager
    def _lease(self, avoid: Worker | None) -> Iterator[Worker]:
        worker = self._take(avoid)
        try:
            yield worker
        finally:
            with self._changed:
                worker.jobs -= 1
                if worker.failed_starts >= START_FAILURES_ALLOWED and worker in self._usable:
                    self._usable.remove(worker)
                self._changed.notify_all()

    def _take(self, avoid: Worker | None) -> Worker:
        with self._changed:
            while True:
                if self._closed:
                    raise PoolClosed("the worker pool is closed")
                if not self._usable:
                    raise PoolClosed(
                        f"no worker can be started any more: each of the {len(self.workers)} slots failed "
                        f"{START_FAILURES_ALLOWED} times in a row"
                    )
                free = [worker for worker in self._usable if worker.jobs < self._depth]
                if free:
                    worker = min(free, key=lambda worker: (worker is avoid, worker.jobs))
                    worker.jobs += 1
                    return worker
                self._changed.wait()
