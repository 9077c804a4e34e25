"""Keeps the host a few steps ahead of the device, and brings back what earlier steps have to say, without
waiting for it.

After each optimizer step the device copies two numbers into page-locked memory: whether any rank wants to
stop, and the step that was not finite. The host looks at them two steps later, when it has to let the device
catch up anyway. So all ranks learn of a request to stop at the same step, and nothing in a step synchronises.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_core.distributed import World


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one finished step says."""

    optimizer_step: int
    stop: bool
    """Some rank was asked to stop."""
    halted_at: int
    """Step that was not finite, -1 for none."""
    step_ms: float
    """Time on the device (on the CPU: of the host) from the start to the end of the step."""
    gap_ms: float
    """Time on the device between the end of the step before and the start of this one: waiting for data, and
    moving it in.
    """


@dataclass(slots=True)
class _Pending:
    optimizer_step: int
    flags: Tensor
    started: float
    ended: float
    start_event: torch.cuda.Event | None
    end_event: torch.cuda.Event | None


class StepClock:
    """Call `begin` and `end` round each optimizer step; `end` returns the report of the step `ahead` steps
    back.
    """

    def __init__(self, world: World, ahead: int = 2) -> None:
        self._world, self._ahead = world, ahead
        self._cuda = world.device.type == "cuda"
        self._pending: deque[_Pending] = deque()
        self._last: _Pending | None = None
        self._begun: tuple[float, torch.cuda.Event | None] = (0.0, None)

    def begin(self) -> None:
        """The step's work starts now; its data is in place."""
        self._begun = (time.perf_counter(), self._event())

    def end(self, optimizer_step: int, halted_at: Tensor, stop: bool) -> StepReport | None:
        """The step's work is queued. `stop`: this rank was asked to stop."""
        flags = torch.stack([torch.full_like(halted_at, int(stop)), halted_at])
        if self._world.size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        if self._cuda:
            flags = torch.empty(2, dtype=torch.int64, pin_memory=True).copy_(flags, non_blocking=True)
        started, start_event = self._begun
        self._pending.append(
            _Pending(optimizer_step, flags, started, time.perf_counter(), start_event, self._event())
        )
        return self._take() if len(self._pending) > self._ahead else None

    def drain(self) -> list[StepReport]:
        """Wait for all steps and return the reports that are still out."""
        reports = []
        while self._pending:
            reports.append(self._take())
        return reports

    def forget(self) -> None:
        """The next gap is not one of training (validation, a checkpoint lay between)."""
        self._last = None

    def _event(self) -> torch.cuda.Event | None:
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _take(self) -> StepReport:
        done = self._pending.popleft()
        before, self._last = self._last, done
        if done.start_event is not None and done.end_event is not None:
            done.end_event.synchronize()
            step_ms = done.start_event.elapsed_time(done.end_event)
            gap_ms = 0.0
            if before is not None and before.end_event is not None:
                gap_ms = before.end_event.elapsed_time(done.start_event)
        else:
            step_ms = 1000 * (done.ended - done.started)
            gap_ms = 1000 * (done.started - before.ended) if before is not None else 0.0
        stop, halted_at = done.flags.tolist()
        return StepReport(
            optimizer_step=done.optimizer_step,
            stop=bool(stop),
            halted_at=halted_at,
            step_ms=step_ms,
            gap_ms=gap_ms,
        )
