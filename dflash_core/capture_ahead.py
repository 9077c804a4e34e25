"""Captures many samples with the next forward always under way while the caller works on the last one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from dflash_core.capture import TargetOutOfMemory
from dflash_core.records import CapturedSample, Sample

if TYPE_CHECKING:
    from dflash_core.target import Target

_Launched = tuple[list[CapturedSample], torch.cuda.Event | None]


def captures(
    target: Target,
    samples: Sequence[Sample],
    token_budget: int | None = None,
    on_smaller: Callable[[int], None] | None = None,
) -> Iterator[list[CapturedSample]]:
    """Yield captured batches until every sample came once; None: the target's configured budget.

    Packed targets keep the order of the samples; padded ones yield batches of similar length. On a GPU the
    next batch is launched before a batch is yielded, and the caller's body runs with another CUDA stream
    current, so that its own work on the device (encoding, copies) and the next forward overlap. Let go of a
    batch before asking for the next. Where memory runs out, the budget is halved for the rest and
    `on_smaller` is told the new one. Raise TargetOutOfMemory when a single sample does not fit.
    """
    budget = token_budget or target.config.batch_tokens
    side = torch.cuda.Stream(target.device) if target.device.type == "cuda" else None
    queue = deque(target.batches(samples, budget))
    held: _Launched | None = None
    while queue or held is not None:
        fresh: _Launched | None = None
        try:
            if queue:
                fresh = _launch(target, queue[0])
                queue.popleft()
        except TargetOutOfMemory:
            torch.cuda.empty_cache()
            # A batch that still waits may be what fills the memory: it is handed over first.
            if held is None:
                if len(queue[0]) == 1:
                    raise
                budget = _half(queue[0], budget)
                queue = deque(target.batches([sample for batch in queue for sample in batch], budget))
                if on_smaller is not None:
                    on_smaller(budget)
        if held is not None:
            captured, ready = held
            held = None
            with _current(side, ready):
                yield captured
            del captured
        held = fresh


def _launch(target: Target, batch: Sequence[Sample]) -> _Launched:
    captured = target.capture(batch)
    if target.device.type != "cuda":
        return captured, None
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(target.device))
    return captured, ready


def _half(batch: Sequence[Sample], budget: int) -> int:
    """Half of what the failed batch took, padding included."""
    return max(1, min(budget, len(batch) * max(sample.num_tokens for sample in batch)) // 2)


@contextmanager
def _current(side: torch.cuda.Stream | None, ready: torch.cuda.Event | None) -> Iterator[None]:
    """Make `side` current once `ready` is reached; afterwards the main stream waits for its work."""
    if side is None or ready is None:
        yield
        return
    main = torch.cuda.current_stream(side.device)
    side.wait_event(ready)
    with torch.cuda.stream(side):
        yield
    # The batch's memory belongs to the main stream and is used again by what follows there.
    main.wait_stream(side)
