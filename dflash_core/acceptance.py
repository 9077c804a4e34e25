"""Acceptance length: how many tokens a target call brings, measured or simulated, and whether the text stayed the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dflash_core.drafter import Drafter
from dflash_core.speculative import Generation


@dataclass(kw_only=True)
class AcceptanceStats:
    """Counts that add up over blocks, prompts and ranks."""

    blocks: int
    """Verified blocks (target calls)."""
    accepted_K: np.ndarray
    """int64 [K]: entry k = blocks in which at least k drafts were accepted; entry 0 = blocks."""

    @property
    def acceptance_length(self) -> float:
        """tau: tokens a target call, 1 (the target's own) + mean number of accepted drafts."""
        raise NotImplementedError

    @property
    def per_slot(self) -> list[float]:
        """Share of blocks in which slot k and all before it were accepted, k = 1 .. K-1."""
        raise NotImplementedError

    def __add__(self, other: AcceptanceStats) -> AcceptanceStats:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place at which two generations differ."""

    position: int
    greedy_token: int
    speculative_token: int
    logit_gap: float
    """Target's largest minus second largest logit there, in the plain run; a tie if within `epsilon`."""
    tie: bool


def first_difference(greedy: Generation, speculative: Generation, *, epsilon: float) -> Difference | None:
    """Compare two greedy generations token for token; None when equal."""
    raise NotImplementedError


def stats_of(generations: Sequence[Generation], block_size: int) -> AcceptanceStats:
    """Add up the accepted drafts of real speculative decoding."""
    raise NotImplementedError


def teacher_forced_acceptance(
    drafter: Drafter,
    taps_TC: torch.Tensor,
    token_ids_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    embedding_VD: torch.Tensor,
    head_VD: torch.Tensor,
    *,
    stride: int = 1,
) -> AcceptanceStats:
    """Leading match of drafted blocks with a stored response that the target itself wrote greedily.

    One block is drafted at every `stride`-th anchor of the supervised tokens; taps are the sample's concatenated
    states [T, L*D]. Blocks that would run past the supervised span are left out.
    """
    raise NotImplementedError
