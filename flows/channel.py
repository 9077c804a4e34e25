"""A worker process's end of the line to its parent: jobs come in on stdin, JSON lines leave on stdout.

No torch, no Prefect. The parent's end is `flows.launch`. Messages are objects with a "kind":
"ready", "progress", "log", "done" or "error". Any of them tells the parent that the worker lives.
"""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from dflash_core.configuration import UserError
from dflash_core.ticking import every
from storage.object_store import StoreError

ORPHANED = 113
"""Exit code of a worker whose parent went away in the middle of a job."""

ALIVE_EVERY_S = 1.0
STORE_GIVES_UP_AFTER_S = 3600.0
"""Far more than a store takes to raise its error for a server that is away (`StoreConfig.patience`)."""

OUR_LOGGERS = ("__main__", "flows", "storage", "dflash_core")
"""Whose words of level INFO are sent; other packages' from WARNING on."""

Job = dict[str, Any]
Result = dict[str, Any]
RunJob = Callable[[Job], Result | Callable[[], Result]]


class Unusable(RuntimeError):
    """Raised by a job after which the process cannot be trusted any more, such as after a CUDA error."""


class Channel:
    """Read jobs and say things. At most one may exist in a process, made before anything is printed."""

    def __init__(self) -> None:
        # Libraries print to stdout. The messages get a private copy of it, and stdout becomes stderr.
        self._out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._busy = threading.Event()
        self._busy.set()  # setting up counts as work: an orphan must not go on loading a model
        threading.Thread(target=self._read, name="jobs", daemon=True).start()

    def _read(self) -> None:
        # Unbuffered: at exit, Python would wait for the lock that this thread holds on a buffered file.
        for line in io.FileIO(0, closefd=False):
            self._jobs.put(json.loads(line))
        self._jobs.put(None)
        if self._busy.is_set():
            os._exit(ORPHANED)

    def say(self, kind: str, **fields: Any) -> None:
        """Send one message; safe from any thread."""
        text = json.dumps({"kind": kind, **fields})
        with self._lock:
            self._out.write(text + "\n")
            self._out.flush()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say "progress" every second of a block that waits for a store.

        A server that stalls makes no worker unhealthy, and the store ends the block by itself. What hangs for
        another reason falls silent after an hour.
        """
        end = time.monotonic() + STORE_GIVES_UP_AFTER_S

        def tell() -> None:
            if time.monotonic() < end:
                self.say("progress", what=what)

        with every(ALIVE_EVERY_S, tell, "waiting"):
            yield

    def jobs(self) -> Iterator[Job]:
        """Yield jobs until the parent closes the line."""
        while True:
            self._busy.clear()
            job = self._jobs.get()
            if job is None:
                return
            self._busy.set()
            yield job


class _ChannelHandler(logging.Handler):
    """Sends log records up the line, so that they appear in the log of the run."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.say("log", level=record.levelname, text=self.format(record))


def serve(start: Callable[[Channel, Job], RunJob]) -> None:
    """Be a worker until the parent closes the line; then the process ends.

    Takes the set-up message, calls `start(channel, setup)` and answers jobs with what it returned: `start`
    loads whatever lives long and returns a function from a job to the fields of its "done" message, or to a
    function that gives them: that one runs on a second thread while the next job begins, and uploads inside
    `Channel.waiting`. An exception inside a job is told to the parent and the worker goes on; after
    `Unusable` it finishes the job before this one and ends. An exception in `start` ends the process.
    """
    channel = Channel()
    handler = _ChannelHandler(channel)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in OUR_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    jobs = channel.jobs()
    setup = next(jobs, None)
    if setup is None:
        return
    try:
        run = start(channel, setup)
    except Exception as error:  # noqa: BLE001  the parent must hear of every failure, whatever its type
        _say_error(channel, setup["id"], error)
        sys.exit(1)
    channel.say("ready", id=setup["id"], pid=os.getpid())
    with ThreadPoolExecutor(1, "finish") as finisher:
        finishing: Future[None] | None = None
        for job in jobs:
            try:
                result = run(job)
            except Exception as error:  # noqa: BLE001  the same: told to the parent, which decides
                _say_error(channel, job["id"], error)
                if isinstance(error, Unusable):
                    if finishing is not None:
                        finishing.result()  # it needs the device no more, or meets the same error
                    os._exit(1)
                continue
            if callable(result):
                if finishing is not None:
                    finishing.result()  # at most one unfinished job beside the one in work
                finishing = finisher.submit(_finish, channel, job["id"], result)
            else:
                channel.say("done", **result, id=job["id"])
    # Everything is committed, and taking a large process apart object by object takes seconds.
    os._exit(0)


def _finish(channel: Channel, job_id: int, finish: Callable[[], Result]) -> None:
    try:
        result = finish()
    except Exception as error:  # noqa: BLE001  the same
        _say_error(channel, job_id, error)
        if isinstance(error, Unusable):
            os._exit(1)
    else:
        channel.say("done", **result, id=job_id)


def _say_error(channel: Channel, job_id: int, error: Exception) -> None:
    channel.say(
        "error",
        id=job_id,
        user=isinstance(error, UserError),
        store=isinstance(error, StoreError),
        unusable=isinstance(error, Unusable),
        type=type(error).__name__,
        text=str(error) or type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
    )
