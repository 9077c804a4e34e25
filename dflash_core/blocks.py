"""Blocks of a packed row: which anchors are trained on, what their slots read and predict, and which slots
are scored.

Shapes: C tokens of a row, A anchors, K slots of a block, Q = A*K, N = A*(K-1) the most slots that can be
scored.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from dflash_core.packing import PackedTokens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blocks:
    """Blocks of one row in static shapes. Unused anchors are padding: index 0, not valid, no scored slot."""

    anchor_A: np.ndarray
    """int32 [A]: row index of each anchor, ascending; 0 in padding."""
    valid_A: np.ndarray
    """bool [A]."""
    document_start_A: np.ndarray
    """int32 [A]: row index at which the anchor's document starts; 0 in padding."""
    anchor_ids_A: np.ndarray
    """int32 [A]: the anchor's token, which slot 0 reads; all other slots read the mask token, as does
    padding.
    """
    position_Q: np.ndarray
    """int32 [Q]: position of each slot in its document."""
    labels_AK: np.ndarray
    """int32 [A, K]: token at anchor + k; 0 where not scored."""
    scored_AK: np.ndarray
    """bool [A, K]: slot k >= 1 whose token and all between it and the anchor are supervised and in the
    anchor's document.
    """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredSlots:
    """The scored slots of a row one behind the other, so that only they go through the head. Padded to N
    entries.

    Slots are counted without slot 0, which is never scored: slot k of block a is number a * (K - 1) + k - 1.
    """

    slot_N: np.ndarray
    """int64 [N]: number of the slot; 0 in padding."""
    label_N: np.ndarray
    """int64 [N]; 0 in padding."""
    rank_P: np.ndarray
    """int64 [P], P >= N: each slot's place among the scored ones, -1 where not scored."""
    count: int
    """Scored slots; known to the host, so that skipping the rest needs no synchronisation."""


def eligible_anchors(packed: PackedTokens) -> np.ndarray:
    """bool [C]: positions whose token and next token are both supervised and in one document (so slot 1 is
    scored).
    """
    eligible_C = np.zeros(len(packed.token_ids_C), bool)
    same_C = (packed.document_C[:-1] == packed.document_C[1:]) & (packed.document_C[:-1] >= 0)
    eligible_C[:-1] = packed.loss_mask_C[:-1] & packed.loss_mask_C[1:] & same_C
    return eligible_C


def share_anchors(eligible_per_document_N: np.ndarray, anchors: int) -> np.ndarray:
    """Divide the row's anchors among its documents in proportion to their eligible positions (largest
    remainder).

    A document never gets more than it has. Ties go to the earlier document; depends on nothing but the row.
    """
    eligible = np.asarray(eligible_per_document_N, np.int64)
    total = int(eligible.sum())
    if total <= anchors:
        return eligible
    share = eligible * anchors // total
    remainder = eligible * anchors - share * total
    order = np.argsort(-remainder, kind="stable")
    share[order[: anchors - int(share.sum())]] += 1
    return share


def choose_anchors(positions: np.ndarray, count: int, *, seed: int, epoch: int, sample_id: str) -> np.ndarray:
    """Draw `count` of the eligible positions of one document without replacement, ascending.

    The draw depends on (seed, epoch, sample_id) alone, not on rank, row or order. More anchors of the same
    document contain those of a smaller count.
    """
    digest = hashlib.sha256(sample_id.encode()).digest()
    words = np.frombuffer(digest[:16], np.uint32)
    generator = np.random.default_rng([seed, epoch, *(int(word) for word in words)])
    return np.sort(generator.permutation(positions)[:count])


def build_blocks(
    packed: PackedTokens, *, anchors: int, block_size: int, mask_token_id: int, seed: int, epoch: int
) -> Blocks:
    """Choose the anchors of a row and lay out their blocks (shapes: see `Blocks`)."""
    eligible_C = eligible_anchors(packed)
    starts_N = packed.starts_N
    documents = len(packed.sample_ids)
    per_document = [np.flatnonzero(eligible_C[starts_N[i] : starts_N[i + 1]]) for i in range(documents)]
    share_N = share_anchors(np.array([len(p) for p in per_document], np.int64), anchors)
    anchor_A = np.zeros(anchors, np.int32)
    document_start_A = np.zeros(anchors, np.int32)
    used = 0
    for i, sample_id in enumerate(packed.sample_ids):
        chosen = choose_anchors(per_document[i], int(share_N[i]), seed=seed, epoch=epoch, sample_id=sample_id)
        anchor_A[used : used + len(chosen)] = starts_N[i] + chosen
        document_start_A[used : used + len(chosen)] = starts_N[i]
        used += len(chosen)
    valid_A = np.arange(anchors) < used
    return _lay_out(packed, anchor_A, document_start_A, valid_A, block_size, mask_token_id)


def _lay_out(
    packed: PackedTokens,
    anchor_A: np.ndarray,
    document_start_A: np.ndarray,
    valid_A: np.ndarray,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """Fill in inputs, positions, labels and the scored slots of given anchors."""
    row_tokens = len(packed.token_ids_C)
    slot_K = np.arange(block_size)
    index_AK = anchor_A[:, None].astype(np.int64) + slot_K[None, :]
    inside_AK = index_AK < row_tokens
    index_AK = np.minimum(index_AK, row_tokens - 1)
    same_document_AK = packed.document_C[index_AK] == packed.document_C[anchor_A][:, None]
    scored_AK = inside_AK & same_document_AK & packed.loss_mask_C[index_AK] & valid_A[:, None]
    # Nothing is drafted behind the end of an answer, though the next one may begin in the same block.
    scored_AK[:, 1:] = np.logical_and.accumulate(scored_AK[:, 1:], axis=1)
    scored_AK[:, 0] = False
    position_A = np.where(valid_A, anchor_A - document_start_A, 0)
    return Blocks(
        anchor_A=anchor_A,
        valid_A=valid_A,
        document_start_A=document_start_A,
        anchor_ids_A=np.where(valid_A, packed.token_ids_C[anchor_A], mask_token_id).astype(np.int32),
        position_Q=(position_A[:, None] + slot_K[None, :]).astype(np.int32).reshape(-1),
        labels_AK=np.where(scored_AK, packed.token_ids_C[index_AK], 0).astype(np.int32),
        scored_AK=scored_AK,
    )


def scored_slots(blocks: Blocks, queries: int) -> ScoredSlots:
    """Gather the scored slots of a row (shapes: see `ScoredSlots`); `queries` is P."""
    scored_N = blocks.scored_AK[:, 1:].reshape(-1)
    found = np.flatnonzero(scored_N)
    slot_N = np.zeros(len(scored_N), np.int64)
    slot_N[: len(found)] = found
    label_N = np.zeros_like(slot_N)
    label_N[: len(found)] = blocks.labels_AK[:, 1:].reshape(-1)[found]
    rank_P = np.full(queries, -1, np.int64)
    rank_P[found] = np.arange(len(found))
    return ScoredSlots(slot_N=slot_N, label_N=label_N, rank_P=rank_P, count=len(found))
