"""Brings what workers and plain functions say into the Prefect run that they belong to, in plain words."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

from prefect import get_run_logger
from prefect.client.schemas.objects import State
from prefect.exceptions import MissingContextError
from prefect.runtime import task_run
from prefect.states import Failed

from dflash_core.configuration import UserError
from flows import console
from flows.launch import JobError, Message, PoolClosed
from flows.ranks import RanksFailed

Result = TypeVar("Result")
OUR_LOGGERS = ("flows", "storage", "dflash_core")
TOLD = (UserError, JobError, PoolClosed, RanksFailed)
"""Errors whose words say everything: what the user can mend, or what a worker says of itself with its own
traceback. How the flow came to hear of it helps nobody."""


def relay_message(message: Message) -> None:
    """Write a worker's log record, or a line of its stderr, to the log of the current run."""
    if message["kind"] == "progress" and message.get("of"):
        console.tell(task_run.name or "", message.get("done", message.get("tokens", 0)) / message["of"])
    if message["kind"] in ("log", "stderr"):
        level = logging.getLevelNamesMapping().get(message.get("level", "INFO"), logging.INFO)
        get_run_logger().log(level, "%s", message["text"])


class _RunHandler(logging.Handler):
    """Asks at each record which run it belongs to: tasks run in threads of their own."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(MissingContextError):
            get_run_logger().log(record.levelno, "%s", record.getMessage())


def tell_error(error: Exception) -> None:
    """Write the error that ends a whole run to its log: the one place where the log says it."""
    get_run_logger().error("%s", error, extra={"ends_the_run": True})


def is_news(record: logging.LogRecord) -> bool:
    """Say whether a record of Prefect's about a run is more than a repetition of an error.

    What a task raised or returned is told by its flow (`tell_error`, "shard N is set aside"), and that a run
    failed is its state. Errors that are not in `TOLD` keep their traceback.
    """
    if record.exc_info and isinstance(record.exc_info[1], TOLD):
        return False
    return not record.getMessage().startswith(("Task run failed with state", "Finished in state Failed("))


def keep_last_words_for_the_command() -> None:
    """Leave the error that ends a run off the terminal: the command prints it as its last line."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: not hasattr(record, "ends_the_run"))


@contextlib.contextmanager
def relay_logs() -> Iterator[None]:
    """Send what our own packages log in this block to the log of the run that it happens in."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(is_news)  # for good: Prefect has its say after the block too
    handler = _RunHandler(logging.INFO)
    loggers = [logging.getLogger(name) for name in OUR_LOGGERS]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # the run's logger writes to the console as well
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


def without_traceback(step: Callable[[], Result]) -> Result:
    """Run a step of a task; an error of `TOLD` fails the task in plain words.

    Prefect writes a traceback for an exception that a task raises, not for a failed state that it returns.
    `value` gives the flow the exception back.
    """
    try:
        return step()
    except TOLD as error:
        return cast(Result, Failed(message=str(error), data=error))


def value(result: Result) -> Result:
    """Return what a task returned, or raise the error of the failed state that it returned."""
    if isinstance(result, State):
        result.result()  # raises it
    return result
