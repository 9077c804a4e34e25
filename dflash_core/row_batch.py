"""One packed row as tensors: everything that a training step needs beside the taps, prepared on the CPU by
the loader.

Shapes are static: C, A, K, Q and N come from the configuration alone (letters: see `dflash_core.blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash_core.blocks import build_blocks, scored_slots
from dflash_core.drafter import DrafterConfig, LayerType
from dflash_core.loss import HeadInputs
from dflash_core.mask import (
    TILE,
    TileTables,
    block_mask,
    dense_mask,
    last_layer_queries,
    tile_tables,
    visible_bounds,
)
from dflash_core.packing import PackedTokens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerMask:
    """The mask of one kind of layer: dense for SDPA, or bounds and tile tables for flex attention."""

    dense_PS: Tensor | None
    bounds: tuple[Tensor, ...]
    tables: TileTables | None

    def build(self, keys: int) -> BlockMask | Tensor:
        """The mask as attention takes it, for S = `keys`."""
        if self.tables is None:
            assert self.dense_PS is not None
            return self.dense_PS
        lo, hi, own_lo, own_hi = self.bounds
        return block_mask((lo, hi, own_lo, own_hi), self.tables, keys)

    def to(self, device: torch.device) -> LayerMask:
        return LayerMask(
            dense_PS=None if self.dense_PS is None else self.dense_PS.to(device, non_blocking=True),
            bounds=tuple(bound.to(device, non_blocking=True) for bound in self.bounds),
            tables=None if self.tables is None else self.tables.to(device),
        )

    def pin(self) -> LayerMask:
        return LayerMask(
            dense_PS=None if self.dense_PS is None else self.dense_PS.pin_memory(),
            bounds=tuple(bound.pin_memory() for bound in self.bounds),
            tables=None if self.tables is None else self.tables.pin(),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowBatch:
    """One row; all tensors on one device."""

    position_C: Tensor
    """int32 [C]."""
    input_ids_R: Tensor
    """int64 [A + 1]: the tokens of the anchors, then the mask token, which fills all other slots."""
    position_Q: Tensor
    """int32 [Q]."""
    slot_N: Tensor
    """int64 [N]: scored slots, counted without slot 0; padded."""
    label_N: Tensor
    """int64 [N]."""
    rank_P: Tensor
    """int64 [P]: place among the scored slots, or -1, of each row that the last layer gives."""
    scored_AK: Tensor
    """bool [A, K]."""
    teacher_N: Tensor
    """int64 [N]: context row whose last hidden state predicts the scored slot (anchor + k - 1)."""
    masks: dict[LayerType, LayerMask]
    last_mask: LayerMask
    """For the P queries of the last layer."""
    count: int
    """Scored slots."""
    num_tokens: int
    """Context tokens that are not padding."""
    num_blocks: int
    """Anchors that are not padding."""
    sample_ids: tuple[str, ...]

    @property
    def head_inputs(self) -> HeadInputs:
        return HeadInputs(self.slot_N, self.label_N, self.rank_P, self.count)

    def attention_masks(self) -> tuple[dict[LayerType, BlockMask | Tensor], BlockMask | Tensor]:
        """The masks as the drafter takes them: by kind of layer, and that of the last layer."""
        keys = self.position_C.shape[0] + self.position_Q.shape[0]
        return {kind: mask.build(keys) for kind, mask in self.masks.items()}, self.last_mask.build(keys)

    def to(self, device: torch.device) -> RowBatch:
        """Copy to a device without waiting for it."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in self._tensors()}
        masks = {kind: mask.to(device) for kind, mask in self.masks.items()}
        return replace(self, masks=masks, last_mask=self.last_mask.to(device), **moved)

    def pin(self) -> RowBatch:
        """Move to page-locked memory, from which copies to a GPU run beside its work."""
        pinned = {name: getattr(self, name).pin_memory() for name in self._tensors()}
        masks = {kind: mask.pin() for kind, mask in self.masks.items()}
        return replace(self, masks=masks, last_mask=self.last_mask.pin(), **pinned)

    def _tensors(self) -> list[str]:
        return [f.name for f in fields(self) if isinstance(getattr(self, f.name), Tensor)]


def prepare_row(
    packed: PackedTokens, drafter: DrafterConfig, *, anchors: int, seed: int, epoch: int, dense: bool
) -> RowBatch:
    """Choose the row's anchors and build all its tensors on the CPU; a pure function of its arguments.

    `dense` builds masks for SDPA (small rows), otherwise flex attention's tables. Raises UserError when the
    row and the queries are not whole tiles.
    """
    blocks = build_blocks(
        packed,
        anchors=anchors,
        block_size=drafter.block_size,
        mask_token_id=drafter.mask_token_id,
        seed=seed,
        epoch=epoch,
    )
    row_tokens = len(packed.token_ids_C)
    bounds_of = {
        kind: visible_bounds(
            blocks,
            row_tokens,
            sliding_window=drafter.sliding_window if kind == "sliding_attention" else None,
        )
        for kind in sorted(set(drafter.types))
    }
    query_P = last_layer_queries(blocks, 1 if dense else TILE)
    keys = row_tokens + len(blocks.position_Q)
    make = partial(_layer_mask, row_tokens=row_tokens, keys=keys, dense=dense)
    slots = scored_slots(blocks, len(query_P))
    block_N, slot_in_block_N = np.divmod(slots.slot_N, drafter.block_size - 1)
    return RowBatch(
        position_C=torch.from_numpy(packed.position_C),
        input_ids_R=torch.from_numpy(np.append(blocks.anchor_ids_A, drafter.mask_token_id).astype(np.int64)),
        position_Q=torch.from_numpy(blocks.position_Q),
        slot_N=torch.from_numpy(slots.slot_N),
        label_N=torch.from_numpy(slots.label_N),
        rank_P=torch.from_numpy(slots.rank_P),
        scored_AK=torch.from_numpy(blocks.scored_AK),
        teacher_N=torch.from_numpy(blocks.anchor_A[block_N] + slot_in_block_N),
        masks={kind: make(bounds) for kind, bounds in bounds_of.items()},
        last_mask=make(bounds_of[drafter.types[-1]][:, query_P]),
        count=slots.count,
        num_tokens=packed.num_tokens,
        num_blocks=int(blocks.valid_A.sum()),
        sample_ids=packed.sample_ids,
    )


def _layer_mask(bounds_4P: np.ndarray, *, row_tokens: int, keys: int, dense: bool) -> LayerMask:
    return LayerMask(
        dense_PS=dense_mask(bounds_4P, keys) if dense else None,
        bounds=tuple(torch.from_numpy(np.ascontiguousarray(bound)) for bound in bounds_4P),
        tables=None if dense else tile_tables(bounds_4P, row_tokens, keys),
    )
