"""The clock of the steps on the CPU: times, gaps, and what is told two steps later."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dflash_core import step_clock
from dflash_core.distributed import World
from dflash_core.step_clock import StepClock, StepReport
from tests.core.training_rows import ALONE, CPU
from tests.spawned_ranks import results_of_ranks

FINE = torch.tensor(-1)


def take(
    clock: StepClock, step: int, *, wait_s: float = 0.0, work_s: float = 0.0, stop: bool = False
) -> list[StepReport]:
    time.sleep(wait_s)
    clock.begin()
    time.sleep(work_s)
    return clock.end(step, FINE, lambda: stop)


def test_a_step_is_told_of_two_steps_later_and_drain_tells_the_rest() -> None:
    clock = StepClock(ALONE)
    told = [take(clock, step) for step in range(5)]
    assert [[report.optimizer_step for report in reports] for reports in told] == [[], [], [0], [1], [2]]
    assert [report.optimizer_step for report in clock.drain()] == [3, 4]
    assert clock.drain() == []


def test_gaps_are_the_waiting_and_not_the_work() -> None:
    clock = StepClock(ALONE, ahead=3)
    began = time.perf_counter()
    for step, wait_s in enumerate((0.1, 0.02, 0.0)):
        take(clock, step, wait_s=wait_s, work_s=0.05)
    whole_ms = 1000 * (time.perf_counter() - began)
    reports = clock.drain()
    assert reports[0].gap_ms == 0.0, "there was no step before it"
    assert reports[1].gap_ms >= 20.0
    assert all(report.step_ms >= 50.0 for report in reports)
    assert sum(report.step_ms + report.gap_ms for report in reports) <= whole_ms - 100.0


def test_what_is_forgotten_is_no_gap_but_waiting_after_it_is() -> None:
    clock = StepClock(ALONE)
    take(clock, 0)
    clock.drain()
    time.sleep(0.2)
    clock.forget()
    take(clock, 1, wait_s=0.05)
    (after,) = clock.drain()
    assert 50.0 <= after.gap_ms < 200.0


def test_waiting_for_a_row_within_a_step_is_no_work() -> None:
    clock = StepClock(ALONE)

    def late() -> Iterator[int]:
        for row in range(3):
            time.sleep(0.05)
            yield row

    began = time.perf_counter()
    rows = late()
    first = next(rows)
    clock.begin()
    taken = [first]
    for row in clock.rows(rows):
        time.sleep(0.02)
        taken.append(row)
    clock.end(0, FINE, lambda: False)
    whole_ms = 1000 * (time.perf_counter() - began)
    (report,) = clock.drain()
    assert taken == [0, 1, 2]
    assert report.gap_ms >= 100.0 and report.step_ms >= 40.0
    assert report.step_ms + report.gap_ms <= whole_ms - 50.0, "the first row came before the step"


def test_a_step_that_was_not_finite_is_named_by_all_later_ones() -> None:
    clock = StepClock(ALONE, ahead=0)
    halted = []
    for step, at in enumerate((-1, 1, 1)):
        clock.begin()
        (report,) = clock.end(step, torch.tensor(at), lambda: False)
        assert not report.stop
        halted.append(report.halted_at)
    assert halted == [-1, 1, 1]


def _rank(rank: int, size: int, port: int, results: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    clock = StepClock(World(rank=rank, size=size, device=CPU))
    reports = [take(clock, step, stop=rank == 1 and step >= 1) for step in range(4)]
    told = [report for told in reports for report in told] + clock.drain()
    results.put([(report.optimizer_step, report.stop) for report in told])
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_learn_of_a_request_to_stop_at_the_same_step() -> None:
    for told in results_of_ranks(_rank, 2):
        assert told == [(0, False), (1, True), (2, True), (3, True)]


def test_alone_a_request_to_stop_comes_back() -> None:
    clock = StepClock(ALONE, ahead=1)
    assert take(clock, 0, stop=True) == []
    (report,) = take(clock, 1)
    assert report.stop
    (last,) = clock.drain()
    assert not last.stop


def _unequal_rank(rank: int, size: int, port: int, results: Any) -> None:
    """The last rank's steps take long; all are asked to look at the same ones at once."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    step_clock.LONG_STEP_MS = 60.0
    clock = StepClock(World(rank=rank, size=size, device=CPU))
    told = []
    for step in range(13):
        slow = step == 0 or (rank == 1 and step < 8)
        reports = take(clock, step, work_s=0.1 if slow else 0.0, stop=rank == 1 and step == 7)
        told.append([(report.optimizer_step, report.stop) for report in reports])
    results.put(told)
    dist.barrier()
    dist.destroy_process_group()


def test_where_steps_take_long_on_any_rank_all_learn_of_a_stop_at_once() -> None:
    first, second = results_of_ranks(_unequal_rank, 2)
    assert first == second
    assert first[:4] == [[], [], [(0, False)], [(1, False)]], "the first step may compile and says nothing"
    assert first[7] == [(7, True)], "the request of this very step"
    assert first[-1] == [(10, False)], "two steps ahead again"


class QueuedDevice(StepClock):
    """Its steps are done by a device that works through a queue, which the host fills and does not watch."""

    free = 0.0
    """When the device has done all that is queued."""

    class Event:
        def __init__(self, at: float) -> None:
            self.at = at

        def synchronize(self) -> None:
            time.sleep(max(0.0, self.at - time.perf_counter()))

        def elapsed_time(self, later: QueuedDevice.Event) -> float:
            return 1000 * (later.at - self.at)

    def _now(self) -> step_clock._Mark:
        now = time.perf_counter()
        return step_clock._Mark(now, self.Event(max(self.free, now)))  # type: ignore[arg-type]

    def queue(self, seconds: float) -> None:
        self.free = max(self.free, time.perf_counter()) + seconds


@pytest.mark.parametrize("after_s", [1.63, 1.68])
def test_a_request_while_a_long_step_is_worked_on_stops_behind_it(
    monkeypatch: pytest.MonkeyPatch, after_s: float
) -> None:
    """The host has queued the whole step at once and waits for the device when it is asked."""
    monkeypatch.setattr(step_clock, "LONG_STEP_MS", 50.0)
    clock, asked_at = QueuedDevice(ALONE), time.perf_counter() + after_s
    ends: list[float] = []
    for step in range(40):
        clock.begin()
        clock.queue(0.2)
        ends.append(clock.free)
        reports = clock.end(step, FINE, lambda: time.perf_counter() >= asked_at)
        if any(report.stop for report in reports):
            break
    assert len(ends) > 7 and ends[-1] - 0.2 <= asked_at + 0.05, "no step began after the request"
