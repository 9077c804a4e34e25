"""Says whether a run is on the fast path, and names what is wrong when it is not.

A run that falls back to something slow goes on without an error, so the signs are looked at: kernels of fused
attention in every layer, no recompile, reserved memory that stays flat, a step time that stays where it was
after warm-up, and a device that hardly waits between steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import mean, median
from typing import Any, Literal, get_args

import torch

from dflash_core.configuration import UserError

MEMORY_BAND = 0.01
"""Reserved memory may leave its value after warm-up by this share."""
TIME_BAND = 0.15
"""So may the median step time."""
WAIT_BAND = 0.03
"""The device may wait for data by this share of a step, on average."""
WARM_STEPS = 3
"""Steps after which the run must be on the fast path."""
WINDOW = 5
"""Latest steps that count: with the two that are still under way, a change is seen within ten."""

Sign = Literal["recompile", "memory", "step_time", "data_wait"]
SIGNS: tuple[Sign, ...] = get_args(Sign)


def fused_attention_calls(step: Callable[[], Any]) -> tuple[int, int]:
    """Run one step and count the kernels of fused attention in it: forward, backward. On CUDA alone."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if "flex_attention" in event.name]
    backward = sum("backward" in name for name in names)
    return len(names) - backward, backward


def require_fused_attention(forward: int, backward: int, layers: int, rows: int = 1) -> None:
    """Raise UserError unless every layer's attention was fused in each row, forward and backward."""
    if min(forward, backward) < layers * rows:
        raise UserError(
            f"fused attention ran in {forward} forward and {backward} backward kernels of {layers} layers "
            f"in {rows} rows: the step is on a slow path. Set training.compile to true, and check the log "
            "for graph breaks"
        )


class FastPath:
    """Compares a run with itself after warm-up, or with a benchmark's step time. `observe` each step."""

    def __init__(
        self,
        expected_step_ms: float | None = None,
        reserved_bytes: Callable[[], int] = torch.cuda.memory_reserved,
    ) -> None:
        """`expected_step_ms`: what a benchmark of the same shapes measured; None: the first steps after warm-
        up. `reserved_bytes`: reads the memory that is reserved on the device; 0 where there is none.
        """
        self.expected_ms = expected_step_ms
        self._reserved_bytes = reserved_bytes
        self._unwarmed = WARM_STEPS
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._waits: deque[float] = deque(maxlen=WINDOW)
        self._reserved: int | None = None

    @property
    def is_warm(self) -> bool:
        """Whether enough steps have been seen to say something of their time and memory."""
        return len(self._recent) == WINDOW

    @property
    def step_ms(self) -> float:
        """Median of the latest steps."""
        return median(self._recent)

    def observe(self, step_ms: float, gap_ms: float = 0.0) -> None:
        """Take the time of one finished step, and of waiting before and in it. The first ones compile and do
        not count.
        """
        if self._unwarmed:
            self._unwarmed -= 1
        else:
            self._recent.append(step_ms)
            self._waits.append(gap_ms)
        if self.is_warm and self.expected_ms is None:
            self.expected_ms = self.step_ms

    def expect_other_memory(self) -> None:
        """What is reserved at the next check is what it should be from then on."""
        self._reserved = None

    def check(self) -> dict[Sign, str]:
        """Say in words what is wrong now, by its kind; empty on the fast path and while the run warms up."""
        wrong: dict[Sign, str] = {}
        if not self.is_warm:
            return wrong
        if reserved := self._reserved_bytes():
            self._reserved = self._reserved or reserved
            if abs(reserved / self._reserved - 1.0) > MEMORY_BAND:
                gib = 2**30
                wrong["memory"] = (
                    f"reserved GPU memory went from {self._reserved / gib:.2f} to {reserved / gib:.2f} GiB"
                )
        if self.expected_ms is not None and self.step_ms > self.expected_ms * (1.0 + TIME_BAND):
            wrong["step_time"] = (
                f"a step takes {self.step_ms:.1f} ms where {self.expected_ms:.1f} ms were expected"
            )
        if (wait_ms := mean(self._waits)) > self.step_ms * WAIT_BAND:
            wrong["data_wait"] = (
                f"the device waits {wait_ms:.1f} ms a step for data, beside {self.step_ms:.1f} ms of work"
            )
        return wrong
