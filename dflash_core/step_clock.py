"""Keeps the host a few steps ahead of the device, and brings back what earlier steps have to say, without
waiting for it.

After each optimizer step the device copies three numbers into page-locked memory: whether any rank wants to
stop, the step that was not finite, and whether steps take long on any rank. The host looks at them two steps
later, when it has to let the device catch up anyway; where steps take long, from the seventh on, it waits
for the device behind each, so that a request to stop that came while that worked costs no further step. So
all ranks learn of such a request at the same step, and nothing in a step synchronises.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_core.distributed import World

LONG_STEP_MS = 5000.0
"""Behind such steps the host waits for the device: the gap is nothing beside them."""
Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one finished step says."""

    optimizer_step: int
    stop: bool
    """Some rank was asked to stop."""
    halted_at: int
    """Step that was not finite, -1 for none."""
    step_ms: float
    """Time on the device (on the CPU: of the host) from the start to the end of the step, without waiting for
    data.
    """
    gap_ms: float
    """Time on the device between the end of the step before and the start of this one, and between the rows
    of the step: waiting for data, and moving it in.
    """


@dataclass(frozen=True, slots=True)
class _Mark:
    """A point of time of the host and, where there is one, of the device."""

    seconds: float
    event: torch.cuda.Event | None

    def ms_until(self, later: _Mark) -> float:
        """Of the device, which has passed both; on the CPU of the host."""
        if self.event is not None and later.event is not None:
            return self.event.elapsed_time(later.event)
        return 1000 * (later.seconds - self.seconds)


@dataclass(slots=True)
class _Step:
    before: _Mark | None
    """End of what came before: the last step, or what lay between."""
    started: _Mark
    row_waits: list[tuple[_Mark, _Mark]] = field(default_factory=list)
    """Begin and end of each wait for a row within the step."""

    def wait_ms(self) -> float:
        """Waiting for rows within the step."""
        return sum(begun.ms_until(over) for begun, over in self.row_waits)


@dataclass(slots=True)
class _Pending:
    step: _Step
    optimizer_step: int
    flags: Tensor
    ended: _Mark


class StepClock:
    """Call `begin` and `end` round each optimizer step, and take its rows through `rows`; `end` returns the
    reports of the steps that lie `ahead` steps back.
    """

    def __init__(self, world: World, ahead: int = 2) -> None:
        self._world, self._ahead = world, ahead
        self._cuda = world.device.type == "cuda"
        self._pending: deque[_Pending] = deque()
        self._before: _Mark | None = None
        self._step: _Step | None = None
        self._ahead_now = ahead
        self._last_ms: float | None = None
        """Of the last step told of; None: of none yet but the first, which may compile."""
        self._told = 0

    def begin(self) -> None:
        """The step's work starts now; its first row is in place."""
        self._step = _Step(self._before, self._now())

    def rows(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Pass the further rows of a step on; what the device waits for them is told apart from its work."""
        assert self._step is not None
        waits = self._step.row_waits
        while True:
            begun = self._now()
            try:
                row = next(rows)
            except StopIteration:
                return
            waits.append((begun, self._now()))
            yield row

    def end(self, optimizer_step: int, halted_at: Tensor, stop: Callable[[], bool]) -> list[StepReport]:
        """The step's work is queued. `stop`: whether this rank was asked to stop."""
        assert self._step is not None
        if self._ahead_now == 0 and (worked := self._now().event) is not None:
            worked.synchronize()
        slow = self._last_ms is not None and self._last_ms > LONG_STEP_MS
        here = (torch.full_like(halted_at, int(flag)) for flag in (stop(), slow))
        flags = torch.stack([halted_at, *here])
        if self._world.size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        if self._cuda:
            flags = torch.empty(3, dtype=torch.int64, pin_memory=True).copy_(flags, non_blocking=True)
        self._before = self._now()
        self._pending.append(_Pending(self._step, optimizer_step, flags, self._before))
        reports: list[StepReport] = []
        while len(self._pending) > self._ahead_now:
            reports.append(self._take())
        return reports

    def drain(self) -> list[StepReport]:
        """Wait for all steps and return the reports that are still out."""
        reports = []
        while self._pending:
            reports.append(self._take())
        return reports

    def forget(self) -> None:
        """What lay between the last step and now (validation, a checkpoint) is no waiting for data."""
        self._before = self._now()

    def _now(self) -> _Mark:
        event = None
        if self._cuda:
            # Blocking: who waits for the device must not keep a core busy.
            event = torch.cuda.Event(enable_timing=True, blocking=True)
            event.record()
        return _Mark(time.perf_counter(), event)

    def _take(self) -> StepReport:
        done = self._pending.popleft()
        if done.ended.event is not None:
            done.ended.event.synchronize()
        step, wait_ms = done.step, done.step.wait_ms()
        step_ms = step.started.ms_until(done.ended) - wait_ms
        self._told += 1
        self._last_ms = step_ms if self._told > 1 else None
        halted_at, stop, slow = done.flags.tolist()
        # All ranks read the same here, and so look at the same later steps at the same time.
        self._ahead_now = 0 if slow else self._ahead
        return StepReport(
            optimizer_step=done.optimizer_step,
            stop=bool(stop),
            halted_at=halted_at,
            step_ms=step_ms,
            gap_ms=wait_ms + (step.before.ms_until(step.started) if step.before is not None else 0.0),
        )
