"""The attention mask of packed blocks, from two intervals a query; as a dense tensor and as flex attention's
block mask.

Keys are the C context tokens of the row, then the Q slots. A slot sees context tokens lo <= t < hi and slots
own_lo <= s < own_hi. The four bounds say everything about documents, anchors, sliding windows and padding, so
full and sliding layers share one mask function and one compiled graph. Shapes: Q queries, C context tokens, S
= C + Q keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash_core.blocks import Blocks
from dflash_core.configuration import UserError

TILE = 128
"""Edge of flex attention's tiles, in queries and in keys."""


@dataclass(frozen=True, slots=True, eq=False)
class TileTables:
    """Flex attention's eight int32 tables: how many and which tiles are partly or fully visible, by query and
    by key tile.

    Index tables keep their full width whatever the mask, so their shapes never change.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """The tables in the order in which `BlockMask` takes them."""
        return tuple(getattr(self, name) for name in TileTables.__slots__)

    def to(self, device: torch.device) -> TileTables:
        """Copy to a device without waiting (sources should be pinned)."""
        return TileTables(*(t.to(device, non_blocking=True) for t in self.tensors()))

    def pin(self) -> TileTables:
        """Move to page-locked memory."""
        return TileTables(*(t.pin_memory() for t in self.tensors()))


def visible_bounds(blocks: Blocks, row_tokens: int, *, sliding_window: int | None = None) -> np.ndarray:
    """int32 [4, Q]: context bounds lo, hi and slot bounds own_lo, own_hi (key indices, the latter from C
    upwards).

    Full layers: context strictly before the anchor in its document; the whole own block. Sliding layers: of
    these the last `sliding_window` positions counted from the slot itself, and the own block up to the slot.
    Padding sees its own block only.
    """
    anchors, slots = blocks.scored_AK.shape
    slot_K = np.arange(slots)
    block_start_A = row_tokens + np.arange(anchors) * slots
    lo_AK = np.broadcast_to(blocks.document_start_A[:, None], (anchors, slots))
    hi_AK = np.broadcast_to(blocks.anchor_A[:, None], (anchors, slots))
    own_lo_AK = np.broadcast_to(block_start_A[:, None], (anchors, slots))
    own_hi_AK = own_lo_AK + slots
    if sliding_window is not None:
        first_AK = blocks.anchor_A[:, None] + slot_K[None, :] - sliding_window + 1
        lo_AK = np.minimum(np.maximum(lo_AK, first_AK), hi_AK)
        own_lo_AK = own_lo_AK + np.maximum(0, slot_K - sliding_window + 1)[None, :]
        own_hi_AK = block_start_A[:, None] + slot_K[None, :] + 1
    lo_AK = np.where(blocks.valid_A[:, None], lo_AK, 0)
    hi_AK = np.where(blocks.valid_A[:, None], hi_AK, 0)
    return np.stack([lo_AK, hi_AK, own_lo_AK, own_hi_AK]).reshape(4, -1).astype(np.int32)


def last_layer_queries(blocks: Blocks, multiple: int) -> np.ndarray:
    """int64 [P]: the slots (indices into Q) that the last layer is computed for: slots 1..K-1, block after
    block.

    P is rounded up to a multiple; the padding repeats the last slot.
    """
    anchors, slots = blocks.scored_AK.shape
    slot_Q = np.arange(anchors * slots).reshape(anchors, slots)[:, 1:].reshape(-1)
    return np.concatenate([slot_Q, np.full(-len(slot_Q) % multiple, slot_Q[-1])])


def dense_mask(bounds_4P: np.ndarray, keys: int) -> Tensor:
    """Bool [P, S], True where a query sees a key: for SDPA on small rows, and to check the tile tables
    against. Raises UserError where there is no memory for it.
    """
    key_S = np.arange(keys)[None, :]
    lo, hi, own_lo, own_hi = (bound[:, None] for bound in bounds_4P)
    try:
        return torch.from_numpy(((key_S >= lo) & (key_S < hi)) | ((key_S >= own_lo) & (key_S < own_hi)))
    except MemoryError:
        raise UserError(
            f"no memory for the attention mask of a row with {bounds_4P.shape[1]} slots: lower "
            "training.anchors_per_row, drafter.block_size or training.row_tokens, or use a GPU"
        ) from None


def tile_tables(bounds_4P: np.ndarray, row_tokens: int, keys: int, tile: int = TILE) -> TileTables:
    """Build flex attention's tables on the CPU from the intervals, without a Q x S mask.

    Raises UserError unless row and queries are whole tiles (a tile must not straddle context and slots).
    """
    if row_tokens % tile or keys % tile or bounds_4P.shape[1] % tile:
        raise UserError(
            f"training.row_tokens ({row_tokens}) and anchors_per_row * block_size ({keys - row_tokens}) must "
            f"be multiples of {tile} for flex attention; round them up (what is not used is padding)"
        )
    touched = _count_tiles(bounds_4P, keys // tile, tile, whole=False)
    covered = _count_tiles(bounds_4P, keys // tile, tile, whole=True)
    full = covered == tile
    partial = (touched > 0) & ~full
    return TileTables(*_ordered(partial), *_ordered(full), *_ordered(partial.T), *_ordered(full.T))


def block_mask(bounds: tuple[Tensor, Tensor, Tensor, Tensor], tables: TileTables, keys: int) -> BlockMask:
    """Assemble a `BlockMask` on the tensors' device. Only tensors are captured, so new masks never recompile
    a graph.

    `bounds` are the four rows of `visible_bounds`, int32 [Q] each.
    """
    lo_Q, hi_Q, own_lo_Q, own_hi_Q = bounds

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        context = (key >= lo_Q[query]) & (key < hi_Q[query])
        return context | ((key >= own_lo_Q[query]) & (key < own_hi_Q[query]))

    named = {name: getattr(tables, name) for name in TileTables.__slots__}
    return BlockMask((lo_Q.shape[0], keys), **named, BLOCK_SIZE=(TILE, TILE), mask_mod=sees)


def _count_tiles(bounds_4Q: np.ndarray, key_tiles: int, tile: int, *, whole: bool) -> np.ndarray:
    """int [query tiles, key tiles]: queries of a query tile that see something (or, `whole`, everything) of a
    key tile.
    """
    queries = bounds_4Q.shape[1]
    query_tile_Q = np.arange(queries) // tile
    difference = np.zeros((queries // tile, key_tiles + 1), np.int64)
    for lo_Q, hi_Q in (bounds_4Q[0:2], bounds_4Q[2:4]):
        first_Q = -(-lo_Q // tile) if whole else lo_Q // tile
        last_Q = hi_Q // tile if whole else -(-hi_Q // tile)
        some_Q = (hi_Q > lo_Q) & (last_Q > first_Q)
        np.add.at(difference, (query_tile_Q[some_Q], first_Q[some_Q]), 1)
        np.add.at(difference, (query_tile_Q[some_Q], last_Q[some_Q]), -1)
    return difference.cumsum(axis=1)[:, :key_tiles]


def _ordered(dense_RC: np.ndarray) -> tuple[Tensor, Tensor]:
    """Counts [1, 1, R] and column indices [1, 1, R, C] with the True columns first, both in ascending
    order.
    """
    indices_RC = np.argsort(~dense_RC, axis=1, kind="stable").astype(np.int32)
    counts_R = dense_RC.sum(axis=1, dtype=np.int32)
    return torch.from_numpy(counts_R)[None, None], torch.from_numpy(indices_RC)[None, None]
