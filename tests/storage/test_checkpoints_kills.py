"""A process killed at any moment of saving checkpoints: the last whole one is found, or the one before."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.checkpoints import Checkpoints
from storage.objects import Store, open_store

ROUNDS = 8
SAVERS = """
import itertools, os, sys
import torch
from storage.checkpoints import Best, Checkpoints, Position
from storage.objects import open_store

def save_for_ever(first):
    checkpoints = Checkpoints(open_store(sys.argv[1]), {}, keep=1)
    checkpoints.latest()  # the connection is made before the clock runs
    print(os.getpid(), flush=True)
    for step in itertools.count(first):
        print(step, flush=True)
        state = {name: torch.full((1 << 18,), float(step)) for name in ("weights", "moments")}
        checkpoints.save(Position(optimizer_step=step, epoch=0, step_in_epoch=step), state, {})
        checkpoints.mark_best(Best(optimizer_step=step, score=float(step)))
        checkpoints.wait()

for line in sys.stdin:  # forked, so that torch is imported once
    child = os.fork()
    if not child:
        save_for_ever(int(line))
    os.waitpid(child, 0)
    print("over", flush=True)
"""


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "file":
        return open_store(tmp_path / "run")
    return open_store(f"{request.getfixturevalue('s3_uri')}/run")


@pytest.fixture
def savers(store: Store) -> Iterator[subprocess.Popen[str]]:
    """Takes the number of a step; a process then saves that one and those after it until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", SAVERS, store.uri],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        yield process
        process.kill()


def last_begun(savers: subprocess.Popen[str], first: int, moment: float) -> int:
    """Kill a process at a moment (0 to 1) of its third save, which may take as long as the second; return the
    step that it was saving.
    """
    assert savers.stdin is not None and savers.stdout is not None
    print(first, file=savers.stdin, flush=True)
    child, begun = int(savers.stdout.readline()), int(savers.stdout.readline())
    for _ in range(2):
        began, begun = time.monotonic(), int(savers.stdout.readline())
    time.sleep(moment * (time.monotonic() - began))
    os.kill(child, signal.SIGKILL)
    while (line := savers.stdout.readline()) != "over\n":
        begun = int(line)
    return begun


def test_killed_while_saving(
    store: Store, savers: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    step, torn = 0, 0
    for moment in random.Random(0).sample([(number + 0.5) / ROUNDS for number in range(ROUNDS)], ROUNDS):
        step = last_begun(savers, step + 1, moment)
        checkpoints = Checkpoints(store, {}, keep=1)
        found = checkpoints.latest()
        assert found is not None
        record, state = found
        here = record.position.optimizer_step
        assert here in (step - 1, step), "the last whole one, or the one before"
        assert {name: set(tensor.tolist()) for name, tensor in state.items()} == {
            "weights": {here},
            "moments": {here},
        }
        if (best := checkpoints.best()) is not None:
            assert best.optimizer_step in (here - 1, here)
            checkpoints.load(checkpoints.record(best.optimizer_step))
        torn += here < step
        step = here
    assert torn, "no process was killed in the middle of anything"
    assert not caplog.records, "nothing was damaged"
