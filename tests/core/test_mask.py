"""The mask, against a loop written out and against flex attention's own builder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from dflash_core.blocks import Blocks, build_blocks
from dflash_core.configuration import UserError
from dflash_core.mask import (
    TileTables,
    block_mask,
    dense_mask,
    last_layer_queries,
    tile_tables,
    visible_bounds,
)
from dflash_core.packing import PackedTokens
from tests.core.test_blocks import random_row

WINDOWS = [None, 1, 3, 9, 200]


def by_hand(packed: PackedTokens, blocks: Blocks, window: int | None) -> np.ndarray:
    anchors, slots = blocks.scored_AK.shape
    c = len(packed.token_ids_C)
    seen = np.zeros((anchors * slots, c + anchors * slots), bool)
    for a in range(anchors):
        anchor = int(blocks.anchor_A[a])
        for k in range(slots):
            q = a * slots + k
            if blocks.valid_A[a]:
                for t in range(c):
                    same = packed.document_C[t] == packed.document_C[anchor]
                    near = window is None or anchor + k - t < window
                    seen[q, t] = same and t < anchor and near
            for other in range(slots):
                if window is None or (other <= k and k - other < window):
                    seen[q, c + a * slots + other] = True
    return seen


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", [[20, 1, 30, 2, 7], [64], []])
def test_dense_mask_by_hand(window: int | None, lengths: list[int]) -> None:
    packed = random_row(lengths, 64)
    blocks = build_blocks(packed, anchors=9, block_size=5, mask_token_id=99, seed=0, epoch=0)
    mask = dense_mask(visible_bounds(blocks, 64, sliding_window=window), 64 + 45)
    assert np.array_equal(mask.numpy(), by_hand(packed, blocks, window))


def test_a_dense_mask_beyond_all_memory_says_what_to_lower() -> None:
    with pytest.raises(UserError, match=f"{2**50} slots.*anchors_per_row"):
        dense_mask(np.broadcast_to(np.zeros((4, 1), np.int32), (4, 2**50)), 128)


def test_no_attention_crosses_a_document() -> None:
    packed = random_row([30, 34, 40], 128)
    blocks = build_blocks(packed, anchors=40, block_size=4, mask_token_id=99, seed=0, epoch=0)
    mask = dense_mask(visible_bounds(blocks, 128), 128 + 160).numpy()[:, :128]
    queries, keys = np.nonzero(mask)
    own = packed.document_C[blocks.anchor_A[queries // 4]]
    assert len(keys) > 100 and (packed.document_C[keys] == own).all()


@pytest.mark.parametrize("last_layer", [False, True])
@pytest.mark.parametrize("window", [None, 100, 2048])
@pytest.mark.parametrize("lengths", [[700, 1, 300, 20], [1024], [], [129, 127, 256]])
def test_tile_tables_equal_flex_attentions_own(
    window: int | None, lengths: list[int], last_layer: bool
) -> None:
    blocks = build_blocks(
        random_row(lengths, 1024), anchors=64, block_size=8, mask_token_id=99, seed=0, epoch=0
    )
    bounds = visible_bounds(blocks, 1024, sliding_window=window)
    if last_layer:
        bounds = bounds[:, last_layer_queries(blocks, 128)]
    tables = tile_tables(bounds, 1024, 1536)
    tensors = tuple(torch.from_numpy(b.copy()) for b in bounds)
    ours = block_mask(tensors, tables, 1536)
    theirs = create_block_mask(ours.mask_mod, None, None, len(tensors[0]), 1536, device="cpu", BLOCK_SIZE=128)
    for name in TileTables.__slots__:
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.shape == theirs.shape and ours.BLOCK_SIZE == theirs.BLOCK_SIZE


def test_tables_have_one_shape_whatever_the_row() -> None:
    shapes = set()
    for lengths in ([700, 1, 300], [1024], []):
        blocks = build_blocks(
            random_row(lengths, 1024), anchors=32, block_size=8, mask_token_id=99, seed=0, epoch=0
        )
        shapes.add(tuple(t.shape for t in tile_tables(visible_bounds(blocks, 1024), 1024, 1280).tensors()))
    assert len(shapes) == 1


def test_rows_must_be_whole_tiles() -> None:
    blocks = build_blocks(random_row([50], 64), anchors=16, block_size=8, mask_token_id=99, seed=0, epoch=0)
    with pytest.raises(UserError, match="multiples of 128"):
        tile_tables(visible_bounds(blocks, 64), 64, 192)
