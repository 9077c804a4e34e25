"""One packed row as tensors: everything that a training step needs beside the taps, prepared on the CPU by
the loader.

Shapes are static: C, A, K, Q and N come from the configuration alone (letters: see `dflash_core.blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash_core.blocks import build_blocks, scored_slots
from dflash_core.drafter import DrafterConfig, LayerType
from dflash_core.loss import HeadInputs
from dflash_core.mask import TileTables, block_mask, dense_mask, tile_tables, visible_bounds
from dflash_core.packing import PackedTokens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerMask:
    """The mask of one kind of layer: dense for SDPA, or bounds and tile tables for flex attention."""

    dense_QS: Tensor | None
    bounds: tuple[Tensor, ...]
    tables: TileTables | None

    def to(self, device: torch.device) -> LayerMask:
        return LayerMask(
            dense_QS=None if self.dense_QS is None else self.dense_QS.to(device, non_blocking=True),
            bounds=tuple(bound.to(device, non_blocking=True) for bound in self.bounds),
            tables=None if self.tables is None else self.tables.to(device),
        )

    def pin(self) -> LayerMask:
        return LayerMask(
            dense_QS=None if self.dense_QS is None else self.dense_QS.pin_memory(),
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
    """int64 [N]: scored slots, as indices into Q; padded."""
    label_N: Tensor
    """int64 [N]."""
    rank_Q: Tensor
    """int64 [Q]: place among the scored slots, or -1."""
    scored_AK: Tensor
    """bool [A, K]."""
    teacher_N: Tensor
    """int64 [N]: context row whose last hidden state predicts the scored slot (anchor + k - 1)."""
    masks: dict[LayerType, LayerMask]
    count: int
    """Scored slots."""
    num_tokens: int
    """Context tokens that are not padding."""
    num_blocks: int
    """Anchors that are not padding."""
    sample_ids: tuple[str, ...]

    @property
    def head_inputs(self) -> HeadInputs:
        return HeadInputs(self.slot_N, self.label_N, self.rank_Q, self.count)

    def attention_masks(self) -> dict[LayerType, BlockMask | Tensor]:
        """The masks as the drafter takes them."""
        found: dict[LayerType, BlockMask | Tensor] = {}
        for kind, mask in self.masks.items():
            if mask.tables is None:
                assert mask.dense_QS is not None
                found[kind] = mask.dense_QS
            else:
                lo, hi, own_lo, own_hi = mask.bounds
                found[kind] = block_mask((lo, hi, own_lo, own_hi), mask.tables, self.position_C.shape[0])
        return found

    def to(self, device: torch.device) -> RowBatch:
        """Copy to a device without waiting for it."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in self._tensors()}
        return replace(self, masks={kind: mask.to(device) for kind, mask in self.masks.items()}, **moved)

    def pin(self) -> RowBatch:
        """Move to page-locked memory, from which copies to a GPU run beside its work."""
        pinned = {name: getattr(self, name).pin_memory() for name in self._tensors()}
        return replace(self, masks={kind: mask.pin() for kind, mask in self.masks.items()}, **pinned)

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
    masks: dict[LayerType, LayerMask] = {}
    for kind in sorted(set(drafter.types)):
        window = drafter.sliding_window if kind == "sliding_attention" else None
        bounds = visible_bounds(blocks, row_tokens, sliding_window=window)
        masks[kind] = LayerMask(
            dense_QS=dense_mask(bounds, row_tokens) if dense else None,
            bounds=tuple(torch.from_numpy(np.ascontiguousarray(bound)) for bound in bounds),
            tables=None if dense else tile_tables(bounds, row_tokens),
        )
    slots = scored_slots(blocks)
    block_N, slot_in_block_N = np.divmod(slots.slot_N.astype(np.int64), drafter.block_size)
    teacher_N = np.maximum(blocks.anchor_A[block_N].astype(np.int64) + slot_in_block_N - 1, 0)
    return RowBatch(
        position_C=torch.from_numpy(packed.position_C),
        input_ids_R=torch.from_numpy(np.append(blocks.anchor_ids_A, drafter.mask_token_id).astype(np.int64)),
        position_Q=torch.from_numpy(blocks.position_Q),
        slot_N=torch.from_numpy(slots.slot_N.astype(np.int64)),
        label_N=torch.from_numpy(slots.label_N.astype(np.int64)),
        rank_Q=torch.from_numpy(slots.rank_Q.astype(np.int64)),
        scored_AK=torch.from_numpy(blocks.scored_AK),
        teacher_N=torch.from_numpy(teacher_N),
        masks=masks,
        count=slots.count,
        num_tokens=packed.num_tokens,
        num_blocks=int(blocks.valid_A.sum()),
        sample_ids=packed.sample_ids,
    )
