"""A run that leaves the fast path is named within ten steps; those of warming up are not its measure."""

from __future__ import annotations

import pytest

from dflash_core.configuration import UserError
from dflash_core.fast_path import WARM_STEPS, WINDOW, FastPath, require_fused_attention


def fed(path: FastPath, times: list[float]) -> FastPath:
    for step_ms in times:
        path.observe(step_ms)
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


def test_unfused_attention_stops_the_run() -> None:
    require_fused_attention(5, 10, layers=5)
    for calls in ((4, 10), (5, 4), (0, 0)):
        with pytest.raises(UserError, match="slow path"):
            require_fused_attention(*calls, layers=5)
