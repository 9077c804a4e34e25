"""A run whose store fails a checkpoint goes on, and loses no other one."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest

from storage.checkpoints import Checkpoints
from storage.dataset import Dataset
from tests.flows.test_train_worker import dataset, make_job, metrics, one_thread, run_here, target
from tests.storage.blocked import LOG, Block, blocked

__all__ = ["blocked", "dataset", "one_thread", "target"]


class Asking(logging.Handler):
    """Asks this process to stop when something goes wrong."""

    def emit(self, record: logging.LogRecord) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def asking() -> Iterator[None]:
    handler = Asking(logging.WARNING)
    LOG.addHandler(handler)
    yield
    LOG.removeHandler(handler)


def test_a_run_goes_on_after_a_failed_write(dataset: Dataset, target: str, blocked: Block) -> None:
    store = blocked(1)
    run_here(make_job(dataset, target, store.folder))
    assert Checkpoints(store.store, {}, keep=9).steps() == [6, 10, 12]


def test_a_run_that_is_stopped_after_a_failed_write_writes_its_last_checkpoint(
    dataset: Dataset, target: str, blocked: Block, asking: None
) -> None:
    store = blocked(1)
    job = make_job(dataset, target, store.folder, validation_fraction=0.0, max_steps=30)
    run_here(job)
    (step,) = Checkpoints(store.store, {}, keep=9).steps()
    assert step == metrics(job)[-1]["step"] < 30
