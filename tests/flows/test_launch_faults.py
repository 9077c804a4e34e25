"""Sick workers and deadly shards among healthy ones: nobody else pays for them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash_core.configuration import UserError
from flows.extract_steps import JOBS_PER_WORKER, ShardRunner
from flows.launch import (
    TRIES_OF_ALL,
    JobError,
    JobFailed,
    WorkerDied,
    WorkerPool,
    python_module,
)

ATTEMPTS = 3
DEAF = """
import json, os, sys, time
setup = json.loads(sys.stdin.readline())
os.close(0)
print(json.dumps({"kind": "ready", "id": setup["id"]}), flush=True)
time.sleep(60)
"""
Run = Callable[..., "_Run"]


class _Run:
    """Shards captured as the flow does: as many at a time as the workers can hold, some attempts each."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.runner = ShardRunner(pool, redo=False)
        self.heard: list[str] = []
        self.failures: Counter[int] = Counter()
        self.done_by: dict[int, str] = {}

    def hear(self, message: dict[str, Any]) -> None:
        self.heard.append(message.get("text", ""))

    def said(self, words: str) -> int:
        return sum(words in text for text in self.heard)

    def capture(self, shards: Iterable[int]) -> None:
        with ThreadPoolExecutor(self.pool.capacity) as threads:
            list(threads.map(self._try, shards))

    def capture_until(self, happened: Callable[[], Any]) -> int:
        """Capture shards, some at a time, until this happened; return how many."""
        for first in range(0, 400, 20):
            self.capture(range(first, first + 20))
            if happened():
                return first + 20
        raise AssertionError(self.heard)

    def _try(self, shard: int) -> None:
        for _ in range(ATTEMPTS):
            try:
                self.done_by[shard] = self.runner.attempt(shard, self.hear)["worker"]
                return
            except (JobError, UserError):
                self.failures[shard] += 1


@pytest.fixture
def run_with(tmp_path: Path) -> Iterable[Run]:
    """Make a run whose workers fail at the places named."""
    pools = []

    def make(workers: int, faults: dict[str, str], *, seconds: float = 0.05, finish_s: float = 0.0) -> _Run:
        folder = tmp_path / str(len(pools))
        folder.mkdir()
        setup = {"faults": faults, "seconds": seconds, "finish_s": finish_s, "folder": str(folder)}
        pool = WorkerPool(
            ["cpu"] * workers,
            python_module("tests.flows.shard_worker"),
            setup,
            depth=JOBS_PER_WORKER,
            start_timeout_s=60,
            silence_timeout_s=30,
        )
        pools.append(pool)
        return _Run(pool)

    yield make
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("fault", ["user", "error", "unusable"])
def test_a_sick_worker_costs_no_shard_and_is_given_up(run_with: Run, fault: str) -> None:
    run = run_with(2, {"worker 1": fault}, seconds=0.1)
    shards = run.capture_until(lambda: run.said("worker 1 (cpu) is given up: it failed"))
    assert set(run.done_by) == set(range(shards)), "no shard is set aside"
    assert set(run.done_by.values()) == {"worker 0 (cpu)"}
    assert max(run.failures.values()) == 1, "the second try was the other worker's"
    assert run.said("worker 1 (cpu) is started anew: it failed") == 1
    before = run.failures.total()
    run.capture(range(shards, shards + 10))
    assert run.failures.total() == before, "it has no jobs any more"
    assert run.pool.workers[0].starts == 1
    if fault != "unusable":
        assert run.pool.workers[1].starts == 2


def test_a_worker_that_is_well_after_its_restart_is_kept(run_with: Run) -> None:
    run = run_with(2, {"first worker 1": "user"}, seconds=0.1)
    shards = run.capture_until(lambda: "worker 1 (cpu)" in run.done_by.values())
    assert run.said("is started anew") == 1 and not run.said("given up")
    assert set(run.done_by) == set(range(shards))


def test_shards_that_all_workers_fail_say_nothing_against_a_worker(run_with: Run) -> None:
    bad = range(0, 24, 2)
    run = run_with(2, {f"shard {shard}": "error" for shard in bad})
    run.capture(range(24))
    assert run.failures == dict.fromkeys(bad, ATTEMPTS)
    assert set(run.done_by) == set(range(24)) - set(bad)
    assert not run.said("given up") and not run.said("started anew")


def test_a_deadly_shard_fails_alone(run_with: Run) -> None:
    run = run_with(1, {"shard 1": "kill"}, finish_s=1.0)
    run.capture(range(4))
    assert run.failures == {1: ATTEMPTS} and set(run.done_by) == {0, 2, 3}
    assert run.pool.workers[0].starts <= 1 + 1 + ATTEMPTS, "one death beside another shard, then its own"


def test_a_worker_that_does_not_start_costs_no_shard_a_try(run_with: Run) -> None:
    run = run_with(2, {"start of worker 1": "kill"}, finish_s=0.5)
    run.capture(range(8))
    assert set(run.done_by) == set(range(8)) and not run.failures
    assert not any(tries.alone for tries in run.runner._tries.values()), "no shard had begun"
    assert run.said("worker 1 (cpu) is given up: it failed to start") == 1


@pytest.mark.parametrize("place", ["start", "scales"])
def test_what_a_run_begins_with_is_tried_on_another_worker(run_with: Run, place: str) -> None:
    run = run_with(2, {f"{place} of worker 0": "kill"})
    run.runner.prepare(run.hear, 2)
    run.capture(range(6))
    assert set(run.done_by) == set(range(6))


@pytest.mark.parametrize("place", ["start", "scales"])
def test_one_death_does_not_end_a_run_of_one_worker(run_with: Run, place: str) -> None:
    run = run_with(1, {f"{place} of first worker 0": "kill"})
    run.runner.prepare(run.hear, 0)  # none is started ahead
    assert run.pool.workers[0].starts == 2


def test_a_run_ends_when_no_worker_can_begin(run_with: Run) -> None:
    run = run_with(2, {"start of worker 0": "kill", "start of worker 1": "kill"})
    with pytest.raises(WorkerDied, match="SIGKILL"):
        run.runner.prepare(run.hear, 2)
    run = run_with(2, {"scales of worker 0": "error", "scales of worker 1": "error"})
    with pytest.raises(JobFailed, match="something broke"):
        run.runner.prepare(run.hear, 2)
    assert run.said("it is tried again") == TRIES_OF_ALL - 1
    run = run_with(2, {"scales of worker 0": "user"})
    with pytest.raises(UserError, match="mend this"):
        run.runner.prepare(run.hear, 2)


def test_a_run_ends_when_each_worker_is_gone_before_the_job_begins() -> None:
    with (
        ThreadPoolExecutor() as threads,
        WorkerPool(["cpu", "cpu"], [sys.executable, "-c", DEAF], {}, depth=JOBS_PER_WORKER) as pool,
    ):
        first = threads.submit(pool.run_first, {"task": "scales"})
        assert isinstance(first.exception(10), WorkerDied)
