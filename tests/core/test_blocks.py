"""Anchors, labels and scored slots, against loops written out."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_core.blocks import build_blocks, choose_anchors, scored_slots, share_anchors
from dflash_core.packing import PackedTokens, pack_tokens
from dflash_core.records import Sample

MASK = 99


def random_row(
    lengths: list[int], row_tokens: int, *, seed: int = 0, supervised: float = 0.8, vocabulary: int = 90
) -> PackedTokens:
    generator = np.random.default_rng(seed)
    samples = [
        Sample(
            sample_id=f"s{seed}-{i}",
            token_ids_T=generator.integers(0, vocabulary, n).astype(np.int32),
            loss_mask_T=generator.random(n) < supervised,
        )
        for i, n in enumerate(lengths)
    ]
    return pack_tokens(samples, row_tokens)


@pytest.mark.parametrize("lengths", [[20, 1, 30, 2, 7], [64], [1, 1, 1], [], [40, 24]])
@pytest.mark.parametrize("anchors", [4, 60])
def test_blocks_against_loops(lengths: list[int], anchors: int) -> None:
    packed = random_row(lengths, 64)
    k = 5
    blocks = build_blocks(packed, anchors=anchors, block_size=k, mask_token_id=MASK, seed=3, epoch=1)
    eligible = [
        t
        for t in range(63)
        if packed.document_C[t] >= 0
        and packed.document_C[t] == packed.document_C[t + 1]
        and packed.loss_mask_C[t]
        and packed.loss_mask_C[t + 1]
    ]
    used = blocks.anchor_A[blocks.valid_A]
    assert len(used) == min(anchors, len(eligible)) and len(set(used.tolist())) == len(used)
    assert set(used.tolist()) <= set(eligible) and sorted(used.tolist()) == used.tolist()
    assert blocks.valid_A.tolist() == sorted(blocks.valid_A.tolist(), reverse=True)
    for a in range(anchors):
        anchor = int(blocks.anchor_A[a])
        for slot in range(k):
            q, at = a * k + slot, anchor + slot
            if not blocks.valid_A[a]:
                assert not blocks.scored_AK[a, slot] and blocks.anchor_ids_A[a] == MASK
                continue
            assert blocks.anchor_ids_A[a] == packed.token_ids_C[anchor]
            assert blocks.position_Q[q] == packed.position_C[anchor] + slot
            scored = (
                slot > 0
                and at < 64
                and packed.document_C[at] == packed.document_C[anchor]
                and bool(packed.loss_mask_C[anchor : at + 1].all())
            )
            assert blocks.scored_AK[a, slot] == scored
            assert blocks.labels_AK[a, slot] == (packed.token_ids_C[at] if scored else 0)
        if blocks.valid_A[a]:
            assert blocks.scored_AK[a, 1], "an anchor always has a slot to learn from"


def test_scored_slots_are_the_scored_ones_in_order() -> None:
    blocks = build_blocks(
        random_row([30, 25], 64), anchors=12, block_size=4, mask_token_id=MASK, seed=0, epoch=0
    )
    slots = scored_slots(blocks, 40)
    assert slots.count == blocks.scored_AK.sum() > 0
    numbers = [a * 3 + k - 1 for a, k in zip(*np.nonzero(blocks.scored_AK), strict=True)]
    assert slots.slot_N[: slots.count].tolist() == numbers
    for n, p in enumerate(numbers):
        assert slots.rank_P[p] == n and slots.label_N[n] == blocks.labels_AK[p // 3, p % 3 + 1]
    assert (slots.rank_P >= 0).sum() == slots.count
    assert len(slots.slot_N) == 36 and len(slots.rank_P) == 40


def test_anchors_depend_on_seed_epoch_and_sample_alone() -> None:
    positions = np.arange(100)
    chosen = choose_anchors(positions, 10, seed=1, epoch=2, sample_id="x")
    assert np.array_equal(chosen, choose_anchors(positions, 10, seed=1, epoch=2, sample_id="x"))
    assert set(chosen) <= set(choose_anchors(positions, 20, seed=1, epoch=2, sample_id="x"))
    for other in ({"seed": 2}, {"epoch": 3}, {"sample_id": "y"}):
        keys = {"seed": 1, "epoch": 2, "sample_id": "x"} | other
        assert not np.array_equal(chosen, choose_anchors(positions, 10, **keys))


def test_share_is_proportional_and_complete() -> None:
    assert share_anchors(np.array([10, 20, 30]), 100).tolist() == [10, 20, 30]
    assert share_anchors(np.array([10, 20, 30]), 6).tolist() == [1, 2, 3]
    generator = np.random.default_rng(0)
    for _ in range(50):
        eligible = generator.integers(0, 50, 7)
        share = share_anchors(eligible, 40)
        assert share.sum() == min(40, eligible.sum()) and (share <= eligible).all()
        if eligible.sum() > 40:
            assert (np.abs(share - eligible * 40 / eligible.sum()) < 1).all()
