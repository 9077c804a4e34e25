"""Captures many samples batch by batch, and goes on with smaller batches where memory runs out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from dflash_core.capture import TargetOutOfMemory
from dflash_core.records import CapturedSample, Sample

if TYPE_CHECKING:
    from dflash_core.target import Target


def captures(
    target: Target,
    samples: Sequence[Sample],
    token_budget: int | None = None,
    on_smaller: Callable[[int], None] | None = None,
) -> Iterator[list[CapturedSample]]:
    """Yield captured batches until every sample came once; None: the target's configured budget.

    Packed targets keep the order of the samples; padded ones yield batches of similar length. On a GPU a
    batch is yielded as soon as its forward is enqueued: a caller that enqueues its own work on the same
    stream and waits for nothing keeps the device busy without a gap. Let go of a batch before asking for
    the next. Where memory runs out, the budget is halved for the rest and `on_smaller` is told the new one.
    Raise TargetOutOfMemory when a single sample does not fit.
    """
    budget = token_budget or target.config.batch_tokens
    queue = deque(target.batches(samples, budget))
    waited = False
    while queue:
        try:
            captured = target.capture(queue[0])
        except TargetOutOfMemory as error:
            no_room = str(error)  # not the error: its traceback holds the batch's activations
        else:
            queue.popleft()
            yield captured
            del captured
            waited = False
            continue
        if target.device.type == "cuda":
            # What is still under way with earlier batches may be what fills the memory.
            torch.cuda.synchronize(target.device)
            torch.cuda.empty_cache()
        if not waited:
            waited = True
            continue
        if len(queue[0]) == 1:
            raise TargetOutOfMemory(no_room)
        budget = _half(queue[0], budget)
        queue = deque(target.batches([sample for batch in queue for sample in batch], budget))
        if on_smaller is not None:
            on_smaller(budget)
        waited = False


def _half(batch: Sequence[Sample], budget: int) -> int:
    """Half of what the failed batch took, padding included."""
    return max(1, min(budget, len(batch) * max(sample.num_tokens for sample in batch)) // 2)
