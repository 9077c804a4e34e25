"""Acceptance length: tokens that a target call brings, measured or simulated, and whether the text stayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dflash_core.draft_layers import draft_layer, final_norm, rotary_tables
from dflash_core.drafter import ContextCache, Drafter
from dflash_core.speculative import Candidates, Generation


@dataclass(frozen=True, kw_only=True, eq=False)
class AcceptanceStats:
    """Counts over verified blocks; those of several prompts or ranks add up."""

    tokens: int
    """Tokens that the blocks brought."""
    reached_K: np.ndarray
    """int64 [K]: entry k = blocks in which at least k drafts were accepted; entry 0 = all blocks."""

    @property
    def blocks(self) -> int:
        """Verified blocks, which is target calls."""
        return int(self.reached_K[0])

    @property
    def acceptance_length(self) -> float:
        """tau: tokens a target call; 1 means that no draft was ever accepted, nan that there was no block."""
        return self.tokens / self.blocks if self.blocks else float("nan")

    @property
    def per_slot(self) -> list[float]:
        """Share of blocks in which slot k and all before it were accepted, for k = 1 .. K-1."""
        return [float(share) for share in self.reached_K[1:] / max(1, self.blocks)]

    def __add__(self, other: AcceptanceStats) -> AcceptanceStats:
        return AcceptanceStats(tokens=self.tokens + other.tokens, reached_K=self.reached_K + other.reached_K)

    def report(self) -> dict[str, Any]:
        """The numbers that a JSON report holds."""
        return {
            "acceptance_length": self.acceptance_length,
            "blocks": self.blocks,
            "tokens": self.tokens,
            "per_slot": self.per_slot,
        }


def count_blocks(accepted: Sequence[int], committed: Sequence[int], block_size: int) -> AcceptanceStats:
    """Add up blocks: `accepted` drafts of each (0 .. block_size-1) and tokens that each brought."""
    histogram = np.bincount(np.asarray(accepted, dtype=np.int64), minlength=block_size)
    return AcceptanceStats(tokens=int(sum(committed)), reached_K=histogram[::-1].cumsum()[::-1].copy())


def stats_of(generations: Sequence[Generation], block_size: int) -> AcceptanceStats:
    """Add up the blocks of real speculative decoding."""
    accepted = [n for generation in generations for n in generation.accepted_per_call]
    committed = [n for generation in generations for n in generation.committed_per_call]
    return count_blocks(accepted, committed, block_size)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first token at which speculative text leaves the greedy text."""

    position: int
    greedy_token: int | None
    """None where the greedy text had ended."""
    speculative_token: int | None
    greedy_candidates: Candidates | None
    """The target's best candidates when it ran token by token ..."""
    speculative_candidates: Candidates | None
    """... and when it verified a block."""
    tie: bool
    """In both runs the two tokens were no further apart than the tolerance."""


def first_difference(greedy: Generation, speculative: Generation, *, tolerance: float) -> Difference | None:
    """Compare two greedy texts token for token; None when they are equal.

    A block of tokens and a single token go through different kernels, so two candidates whose logits nearly
    agree may swap. That counts as a tie when in both runs the logits of the two tokens lie within `tolerance`
    times the larger magnitude (0: nothing is a tie but exactly equal logits).
    """
    one, two = greedy.token_ids, speculative.token_ids
    differing = (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    position = next(differing, min(len(one), len(two)))
    if position == len(one) == len(two):
        return None
    tokens = [ids[position] if position < len(ids) else None for ids in (one, two)]
    candidates = [
        g.candidates[position] if position < len(g.candidates) else None for g in (greedy, speculative)
    ]
    return Difference(
        position=position,
        greedy_token=tokens[0],
        speculative_token=tokens[1],
        greedy_candidates=candidates[0],
        speculative_candidates=candidates[1],
        tie=all(_near(found, tokens, tolerance) for found in candidates),
    )


def _near(found: Candidates | None, tokens: Sequence[int | None], tolerance: float) -> bool:
    """Whether these two tokens are candidates whose logits nearly agree."""
    if found is None:
        return False
    one, two = (found.logit(token) for token in tokens)
    return one is not None and two is not None and abs(one - two) <= tolerance * max(abs(one), abs(two))


@torch.inference_mode()
def leading_matches(
    drafter: Drafter,
    taps_TE: torch.Tensor,
    token_ids_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    embedding_VD: torch.Tensor,
    head_VD: torch.Tensor,
    *,
    anchors_per_forward: int = 64,
) -> np.ndarray:
    """Draft a block at every supervised token of one sample and count the drafts that equal the text from the
    start.

    `taps_TE` [T, L*D]; `token_ids_T`, `loss_mask_T` [T] on the same device. Returns int64 [T]: leading
    matches of the block whose anchor is token t, at most the supervised tokens that follow it without a gap;
    -1 where t is no anchor.
    """
    device, slots = taps_TE.device, drafter.config.block_size
    following_T = _supervised_following(loss_mask_T.cpu().numpy(), slots - 1)
    matches_T = np.full(len(token_ids_T), -1, dtype=np.int64)
    cache = ContextCache()
    drafter.extend(cache, taps_TE)
    anchors = torch.from_numpy(np.flatnonzero(following_T >= 0)).to(device)
    padded_T = F.pad(token_ids_T.long(), (0, slots), value=-1)
    for anchor_A in anchors.split(anchors_per_forward):
        ids_AK = torch.full((len(anchor_A), slots), drafter.config.mask_token_id, device=device)
        ids_AK[:, 0] = padded_T[anchor_A]
        hidden_QD = draft_blocks(drafter, cache, anchor_A, F.embedding(ids_AK.view(-1), embedding_VD))
        draft_AK = F.linear(hidden_QD.to(head_VD.dtype), head_VD).argmax(-1).view(-1, slots)[:, 1:]
        wanted_AK = padded_T[anchor_A[:, None] + torch.arange(1, slots, device=device)]
        count_A = (draft_AK == wanted_AK).int().cumprod(1).sum(1).cpu().numpy()
        chosen = anchor_A.cpu().numpy()
        matches_T[chosen] = np.minimum(count_A, following_T[chosen])
    return matches_T


def draft_blocks(
    drafter: Drafter, cache: ContextCache, anchor_A: torch.Tensor, input_QD: torch.Tensor
) -> torch.Tensor:
    """Final states [A*K, D] of blocks at many anchors of one text, each seeing the context before its own
    anchor.

    Equals `Drafter.draft` block by block. `cache` holds the whole text; `input_QD` are the embeddings of the
    blocks' tokens. Runs uncompiled, so that any number of tokens and anchors may come.
    """
    config = drafter.config
    slot_Q = torch.arange(config.block_size, device=anchor_A.device).repeat(len(anchor_A))
    anchor_Q = anchor_A.repeat_interleave(config.block_size)
    position_Q = anchor_Q + slot_Q
    token_C = torch.arange(cache.length, device=anchor_A.device)
    seen_QC = token_C[None, :] < anchor_Q[:, None]
    own_QQ = anchor_Q[:, None] == anchor_Q[None, :]
    cos_QF, sin_QF = rotary_tables(position_Q, config.rope_theta, config.head_dim)
    x_QD = input_QD.to(drafter.compute_dtype)
    for i, layer in enumerate(drafter.layers):
        mask_QS = torch.cat([seen_QC, own_QQ], dim=1)
        if (window := config.window_of(i)) is not None:
            distance_QS = position_Q[:, None] - torch.cat([token_C, position_Q])[None, :]
            mask_QS = mask_QS & (distance_QS >= 0) & (distance_QS < window)
        keys, values = cache.keys[i][: cache.length], cache.values[i][: cache.length]
        weights = layer.weights()  # type: ignore[operator]
        x_QD = draft_layer(x_QD, keys, values, weights, cos_QF, sin_QF, mask_QS, drafter.shape)
    return final_norm(x_QD, drafter.norm.weight, config.rms_norm_eps, drafter.compute_dtype)


def simulate(matches_T: np.ndarray, loss_mask_T: np.ndarray, block_size: int) -> AcceptanceStats:
    """Walk through a sample's responses as speculative decoding would, jumping over what each block brings.

    `matches_T` comes from `leading_matches`. The first token of each response is given, as the prompt's own
    forward brings it; a block that reaches the end of its response brings no token after it.
    """
    accepted, committed = [], []
    following_T = _supervised_following(loss_mask_T, len(loss_mask_T))
    position = 0
    while position < len(loss_mask_T):
        left = int(following_T[position])
        if left <= 0:
            position += 1
            continue
        count = int(matches_T[position])
        accepted.append(count)
        committed.append(min(count + 1, left))
        position += committed[-1]
    return count_blocks(accepted, committed, block_size)


def teacher_forced_acceptance(
    drafter: Drafter,
    taps_TE: torch.Tensor,
    token_ids_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    embedding_VD: torch.Tensor,
    head_VD: torch.Tensor,
    *,
    anchors_per_forward: int = 64,
) -> AcceptanceStats:
    """Acceptance on one stored sample whose responses the target wrote greedily; no target is run.

    Equals what real speculative decoding would accept, as far as the stored taps equal those of decoding.
    """
    matches_T = leading_matches(
        drafter,
        taps_TE,
        token_ids_T,
        loss_mask_T,
        embedding_VD,
        head_VD,
        anchors_per_forward=anchors_per_forward,
    )
    return simulate(matches_T, loss_mask_T.cpu().numpy(), drafter.config.block_size)


def _supervised_following(loss_mask_T: np.ndarray, limit: int) -> np.ndarray:
    """int64 [T]: supervised tokens that follow t without a gap, at most `limit`; -1 where t is not one."""
    following_T = np.full(len(loss_mask_T), -1, dtype=np.int64)
    run = -1
    for t in range(len(loss_mask_T) - 1, -1, -1):
        run = run + 1 if loss_mask_T[t] else -1
        following_T[t] = min(run, limit)
    return following_T
