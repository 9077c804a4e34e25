"""Says whether a run is on the fast path, and names what is wrong when it is not.

A run that falls back to something slow goes on without an error, so the signs are looked at: kernels of fused
attention in every layer, no recompile, reserved memory that stays flat, and a step time that stays where it
was after warm-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from dflash_core.configuration import UserError

MEMORY_BAND = 0.01
"""Reserved memory may leave its value after warm-up by this share."""
TIME_BAND = 0.15
"""So may the median step time."""


def fused_attention_calls(step: Callable[[], Any]) -> tuple[int, int]:
    """Run one step and count the kernels of fused attention in it: forward, backward. On CUDA alone."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if "flex_attention" in event.name]
    backward = sum("backward" in name for name in names)
    return len(names) - backward, backward


def require_fused_attention(forward: int, backward: int, layers: int) -> None:
    """Raise UserError unless every layer's attention was fused, forward and backward."""
    if forward < layers or backward < layers:
        raise UserError(
            f"fused attention ran in {forward} forward and {backward} backward kernels of {layers} layers: "
            "the step is on a slow path. Set training.compile to true, and check the log for graph breaks"
        )


class FastPath:
    """Compares a run with itself after warm-up, or with a benchmark's step time."""

    def __init__(self, expected_step_ms: float | None = None) -> None:
        """`expected_step_ms`: what a benchmark of the same shapes measured; None: the first steps after warm-
        up.
        """
        self._expected_ms = expected_step_ms
        self._reserved: int | None = None

    def check(self, step_ms: Sequence[float], recompiles: Sequence[str]) -> list[str]:
        """Return what is wrong, in words, over the steps since the last call; empty on the fast path."""
        wrong = [f"recompiled: {reason}" for reason in recompiles]
        if torch.cuda.is_available():
            reserved = torch.cuda.memory_reserved()
            self._reserved = self._reserved or reserved
            change = reserved / self._reserved - 1.0
            if abs(change) > MEMORY_BAND:
                gib = 2**30
                wrong.append(
                    f"reserved GPU memory went from {self._reserved / gib:.2f} to {reserved / gib:.2f} GiB"
                )
        if step_ms:
            now = median(step_ms)
            if self._expected_ms is None:
                self._expected_ms = now
            elif now > self._expected_ms * (1.0 + TIME_BAND):
                wrong.append(f"a step takes {now:.1f} ms where {self._expected_ms:.1f} ms were expected")
        return wrong
