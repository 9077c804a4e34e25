"""Brings what workers and plain functions say into the log of the Prefect run that they belong to."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from prefect import get_run_logger

from flows.launch import Message

OUR_LOGGERS = ("flows", "storage", "dflash_core")


def relay_message(message: Message) -> None:
    """Write a worker's log record, or a line of its stderr, to the log of the current run."""
    if message["kind"] in ("log", "stderr"):
        level = logging.getLevelNamesMapping().get(message.get("level", "INFO"), logging.INFO)
        get_run_logger().log(level, "%s", message["text"])


class _RunHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._logger = get_run_logger()

    def emit(self, record: logging.LogRecord) -> None:
        self._logger.log(record.levelno, "%s", record.getMessage())


@contextlib.contextmanager
def relay_logs() -> Iterator[None]:
    """Send what our own packages log in this block to the log of the current run."""
    handler = _RunHandler()
    loggers = [logging.getLogger(name) for name in OUR_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
