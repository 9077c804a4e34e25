"""A run that leaves the fast path is named within ten steps; those of warming up are not its measure."""

from __future__ import annotations

import pytest

from dflash_core.configuration import UserError
from dflash_core.fast_path import WARM_STEPS, WINDOW, FastPath, require_fused_attention


def fed(path: FastPath, times: list[float], gap_ms: float = 0.0) -> FastPath:
    for step_ms in times:
        path.observe(step_ms, gap_ms)
    return path


def test_compiling_steps_are_not_the_measure() -> None:
    path = fed(FastPath(), [47_000.0, 900.0, 1_500.0])
    assert not path.is_warm and path.check() == {}
    fed(path, [840.0] * WINDOW)
    assert path.is_warm and path.expected_ms == 840.0 and path.check() == {}


def test_slower_steps_are_named_within_ten() -> None:
    path = fed(FastPath(), [47_000.0] + [840.0] * 50)
    slow = 0
    while not path.check():
        fed(path, [1_000.0])
        slow += 1
    assert slow + 2 <= 10  # reports arrive two steps late
    assert path.check() == {"step_time": "a step takes 1000.0 ms where 840.0 ms were expected"}
    assert fed(path, [840.0] * WINDOW).check() == {}


def test_one_slow_step_is_no_sign() -> None:
    assert fed(FastPath(), [840.0] * 20 + [5_000.0]).check() == {}


def test_a_run_that_is_slow_from_the_start_is_known_by_the_benchmark() -> None:
    slow = [2_000.0] * (WARM_STEPS + WINDOW)
    assert fed(FastPath(), slow).check() == {}
    assert fed(FastPath(840.0), slow).check().keys() == {"step_time"}


def test_memory_that_leaves_its_place_by_a_percent_is_named() -> None:
    gib = 2**30
    reserved = 90 * gib
    path = fed(FastPath(reserved_bytes=lambda: reserved), [840.0] * WARM_STEPS)
    assert path.check() == {}
    reserved = 100 * gib  # warming up is not the measure
    fed(path, [840.0] * WINDOW)
    for quiet in (100.0, 100.9, 99.1):
        reserved = int(quiet * gib)
        assert path.check() == {}
    reserved = int(98.9 * gib)
    assert path.check().keys() == {"memory"}
    reserved = int(101.1 * gib)
    assert path.check() == {"memory": "reserved GPU memory went from 100.00 to 101.10 GiB"}
    path.expect_other_memory()
    assert path.check() == {}
    reserved = 100 * gib
    assert path.check().keys() == {"memory"}


def test_a_run_starved_of_data_is_named_within_ten() -> None:
    path = fed(FastPath(), [840.0] * 50, gap_ms=8.0)
    assert path.check() == {}
    starved = 0
    while not path.check():
        fed(path, [840.0], gap_ms=100.0)
        starved += 1
    assert starved + 2 <= 10
    fed(path, [840.0] * WINDOW, gap_ms=100.0)
    assert path.check() == {"data_wait": "the device waits 100.0 ms a step for data, beside 840.0 ms of work"}
    assert fed(path, [840.0] * WINDOW, gap_ms=25.0).check() == {}
    assert fed(path, [840.0] * WINDOW, gap_ms=25.5).check().keys() == {"data_wait"}


def test_what_the_first_steps_wait_is_the_readers_start() -> None:
    path = fed(FastPath(), [840.0] * WARM_STEPS, gap_ms=5_000.0)
    assert fed(path, [840.0] * WINDOW).is_warm and path.check() == {}


def test_unfused_attention_stops_the_run() -> None:
    require_fused_attention(5, 10, layers=5)
    for calls in ((4, 10), (5, 4), (0, 0)):
        with pytest.raises(UserError, match="slow path"):
            require_fused_attention(*calls, layers=5)
    require_fused_attention(40, 40, layers=5, rows=8)
    with pytest.raises(UserError, match="5 layers in 8 rows"):
        require_fused_attention(8, 8, layers=5, rows=8)
