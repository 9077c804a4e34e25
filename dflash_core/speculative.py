"""Speculative decoding: a drafter proposes a block, the target verifies it in one call, output as without a drafter."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from dflash_core.cached_target import CachedTarget
from dflash_core.drafter import Drafter


@dataclass(kw_only=True)
class Generation:
    """What was generated for one prompt, and what it took."""

    token_ids: list[int]
    """New tokens only; ends with the stop token if one was met."""
    committed_per_call: list[int] = field(default_factory=list)
    """Tokens that each verifying target call brought: accepted drafts + 1 (fewer at the very end)."""
    accepted_per_call: list[int] = field(default_factory=list)
    """Drafts accepted by each call, before a stop token or the length limit cut the end: 0 .. block_size-1."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    top_two_logits: list[tuple[float, float]] = field(default_factory=list)
    """For each new token the target's two largest logits (greedy only): shows ties of floating point."""


def greedy_generate(
    target: CachedTarget, prompt_ids: list[int], *, max_new_tokens: int, stop_ids: Collection[int] = ()
) -> Generation:
    """Decode one token a call with argmax: the text that speculative decoding must reproduce."""
    raise NotImplementedError


def speculative_generate(
    target: CachedTarget,
    drafter: Drafter,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Generation:
    """Decode with drafted blocks. `temperature` 0 gives the target's greedy text, above 0 its exact distribution."""
    raise NotImplementedError
