"""The `tolerance` codec's way out, many cells in one pass: a Triton kernel, imported on CUDA only.

A packed batch of short documents is hundreds of cells. Step by step in torch each takes some forty kernels,
and with a kernel for each the GPU still waits while the host launches them: it launches about a thousand
ahead at most, and then only as fast as the device takes them. So one kernel takes a list of cells. The
symbols are those of `quantise.quantise`, bit for bit.
"""

# mypy: ignore-errors
# Triton is installed with CUDA builds of torch alone, and its kernels are no annotated Python.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, CHANNELS = 16, 128
"""Tokens and channels of a tile; it takes as many channels of the second half of the width beside them."""
ROUND_TO_EVEN = tl.constexpr(12582912.0)
"""1.5 x 2^23: float32 has no fractions beyond, so adding it rounds, half to even, what is below 2^22."""


@triton.jit
def _symbols(
    states_ptr,
    step_ptr,
    scale_ptr,
    position_ptr,
    outlier_ptr,
    count_ptr,
    row_R1,
    channel_1C,
    T,
    D,
    stop,
    room,
    limit,
    round_up,
    DEAD_ZONE: tl.constexpr,
):
    """Symbols int32 [R, C] of one tile, and its four sums; outliers go to the list."""
    inside = (row_R1 < T) & (channel_1C < stop)
    place = row_R1.to(tl.int64) * D + channel_1C
    stored = tl.load(states_ptr + place, mask=inside, other=0.0)
    value = stored.to(tl.float32)
    step = tl.load(step_ptr + channel_1C, mask=channel_1C < stop, other=1.0)
    step = tl.broadcast_to(step, value.shape)
    quotient = tl.div_rn(value, step)
    if DEAD_ZONE:
        magnitude = tl.floor(tl.abs(quotient) + round_up)
        symbol = tl.where(quotient < 0, -magnitude, magnitude)
    else:
        symbol = (quotient + ROUND_TO_EVEN) - ROUND_TO_EVEN
    # Written so that NaN is outside.
    ordinary = tl.abs(symbol) <= limit
    outside = inside & ~ordinary
    symbol = tl.where(ordinary, symbol, 0.0)
    # Of which lane comes first nothing is promised: the host sorts the list.
    slot = tl.atomic_add(count_ptr + tl.zeros_like(place), 1, mask=outside)
    listed = outside & (slot < room)
    tl.store(position_ptr + slot, place.to(tl.int32), mask=listed)
    tl.store(outlier_ptr + slot, stored, mask=listed)
    finite = inside & (tl.abs(value) < float("inf"))
    decoded = (symbol * step).to(tl.bfloat16).to(tl.float32)
    error = tl.where(ordinary & inside, decoded - value, 0.0)
    scale = tl.load(scale_ptr + channel_1C, mask=channel_1C < stop, other=1.0)
    scaled = error / scale
    value = tl.where(finite, value, 0.0)
    return (
        symbol.to(tl.int32),
        tl.sum(error * error),
        tl.sum(value * value),
        tl.sum(scaled * scaled),
        tl.sum(finite.to(tl.float32)),
    )


@triton.jit
def _encode(
    cell_ptr,
    tile_ptr,
    count_ptr,
    sums_ptr,
    D,
    H,
    limit,
    round_up,
    DEAD_ZONE: tl.constexpr,
    WHOLE: tl.constexpr,
    SHIFT: tl.constexpr,
    FOLDED: tl.constexpr,
    FIELDS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    cell = tl.load(tile_ptr + 2 * tl.program_id(0))
    first_row = tl.load(tile_ptr + 2 * tl.program_id(0) + 1)
    cell_ptr += cell * FIELDS
    states_ptr = tl.load(cell_ptr).to(tl.pointer_type(tl.bfloat16))
    step_ptr = tl.load(cell_ptr + 1).to(tl.pointer_type(tl.float32))
    scale_ptr = tl.load(cell_ptr + 2).to(tl.pointer_type(tl.float32))
    whole_ptr = tl.load(cell_ptr + 3).to(tl.pointer_type(tl.int8))
    folded_ptr = tl.load(cell_ptr + 4).to(tl.pointer_type(tl.uint8))
    position_ptr = tl.load(cell_ptr + 5).to(tl.pointer_type(tl.int32))
    outlier_ptr = tl.load(cell_ptr + 6).to(tl.pointer_type(tl.bfloat16))
    T = tl.load(cell_ptr + 7)
    room = tl.load(cell_ptr + 8)
    count_ptr += cell
    row_R1 = first_row + tl.arange(0, R)[:, None]
    left_1C = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    right_1C = left_1C + H
    # fmt: off
    left, a, b, c, d = _symbols(
        states_ptr, step_ptr, scale_ptr, position_ptr, outlier_ptr, count_ptr,
        row_R1, left_1C, T, D, H, room, limit, round_up, DEAD_ZONE,
    )
    right, e, f, g, h = _symbols(
        states_ptr, step_ptr, scale_ptr, position_ptr, outlier_ptr, count_ptr,
        row_R1, right_1C, T, D, D, room, limit, round_up, DEAD_ZONE,
    )
    # fmt: on
    row = row_R1.to(tl.int64)
    if WHOLE:
        left_here, right_here = (row_R1 < T) & (left_1C < H), (row_R1 < T) & (right_1C < D)
        tl.store(whole_ptr + row * D + left_1C, (left >> SHIFT).to(tl.int8), mask=left_here)
        tl.store(whole_ptr + row * D + right_1C, (right >> SHIFT).to(tl.int8), mask=right_here)
    if FOLDED:
        byte = ((left & 15) << 4) | (right & 15)
        tl.store(folded_ptr + row * H + left_1C, byte.to(tl.uint8), mask=(row_R1 < T) & (left_1C < H))
    sum_ptr = sums_ptr + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 4
    tl.store(sum_ptr, a + e)
    tl.store(sum_ptr + 1, b + f)
    tl.store(sum_ptr + 2, c + g)
    tl.store(sum_ptr + 3, d + h)


class CellArrays(NamedTuple):
    """What one cell is made of, and where its symbols go."""

    states_TD: Tensor
    """Contiguous bf16."""
    step_D: Tensor
    scale_D: Tensor
    whole_TD: Tensor | None
    """int8, gets the symbols shifted right."""
    folded_TH: Tensor | None
    """uint8, gets their low four bits, two channels a byte, as `quantise.fold_nibbles` lays them."""
    position_N: Tensor
    """int32, places of outliers, in any order."""
    outlier_N: Tensor
    """bf16, their values; where there are more of them than places, the rest is missing."""

    @property
    def table_row(self) -> list[int]:
        """Addresses and sizes, as the kernel reads them."""
        addresses = [0 if array is None else array.data_ptr() for array in self]
        return [*addresses, len(self.states_TD), len(self.position_N)]


def encode(
    cells: Sequence[CellArrays], *, limit: int, dead_zone: float, shift: int
) -> tuple[Tensor, list[int], Tensor]:
    """Quantise cells of one width into the arrays given, without waiting for the device.

    Returns sums float64 [P, 4] (`quantise.error_sums`) of P stretches of rows, the first stretch of each cell
    and P, and the counts of outliers, int32 [cells]. `shift` is that of `whole_TD`.
    """
    device, width = cells[0].states_TD.device, cells[0].states_TD.shape[1]
    half = (width + 1) // 2
    tiles_C = np.array([triton.cdiv(len(cell.states_TD), ROWS) for cell in cells])
    first_C1 = np.concatenate([[0], tiles_C.cumsum()])
    cell_P = np.repeat(np.arange(len(cells)), tiles_C)
    row_P = ROWS * (np.arange(len(cell_P)) - first_C1[cell_P])
    table = _on_device(np.array([cell.table_row for cell in cells], np.int64), device)
    tiles = _on_device(np.stack([cell_P, row_P], 1).astype(np.int32), device)
    grid = (len(cell_P), triton.cdiv(half, CHANNELS))
    sums_PG4 = torch.empty(*grid, 4, dtype=torch.float32, device=device)
    count_C = torch.zeros(len(cells), dtype=torch.int32, device=device)
    with torch.cuda.device(device):  # Triton launches on the current one
        _encode[grid](
            table,
            tiles,
            count_C,
            sums_PG4,
            width,
            half,
            float(limit),
            0.5 - dead_zone,
            DEAD_ZONE=dead_zone > 0,
            WHOLE=cells[0].whole_TD is not None,
            SHIFT=shift,
            FOLDED=cells[0].folded_TH is not None,
            FIELDS=table.shape[1],
            R=ROWS,
            C=CHANNELS,
        )
    return sums_PG4.sum(1, dtype=torch.float64), first_C1.tolist(), count_C


def _on_device(table: np.ndarray, device: torch.device) -> Tensor:
    """From page-locked memory, or the caller would wait until the device gets there."""
    return torch.from_numpy(table).pin_memory().to(device, non_blocking=True)
