"""The `tolerance` codec's way out in one pass over the states: a Triton kernel, imported on CUDA only.

Step by step in torch a cell takes some forty kernels. A packed batch of short documents is hundreds of cells,
and the GPU waits while the host launches them. The symbols are those of `quantise.quantise`, bit for bit.
"""

# mypy: ignore-errors
# Triton is installed with CUDA builds of torch alone, and its kernels are no annotated Python.

from __future__ import annotations

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


@triton.jit(do_not_specialize=["T", "room"])
def _encode(
    states_ptr,
    step_ptr,
    scale_ptr,
    first_ptr,
    low_ptr,
    position_ptr,
    outlier_ptr,
    count_ptr,
    sums_ptr,
    T,
    D,
    H,
    room,
    limit,
    round_up,
    DEAD_ZONE: tl.constexpr,
    WHOLE: tl.constexpr,
    SHIFT: tl.constexpr,
    FOLDED: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    row_R1 = tl.program_id(0) * R + tl.arange(0, R)[:, None]
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
        tl.store(first_ptr + row * D + left_1C, (left >> SHIFT).to(tl.int8), mask=left_here)
        tl.store(first_ptr + row * D + right_1C, (right >> SHIFT).to(tl.int8), mask=right_here)
    if FOLDED:
        byte = ((left & 15) << 4) | (right & 15)
        tl.store(low_ptr + row * H + left_1C, byte.to(tl.uint8), mask=(row_R1 < T) & (left_1C < H))
    sum_ptr = sums_ptr + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 4
    tl.store(sum_ptr, a + e)
    tl.store(sum_ptr + 1, b + f)
    tl.store(sum_ptr + 2, c + g)
    tl.store(sum_ptr + 3, d + h)


def encode(
    states_TD: Tensor,
    step_D: Tensor,
    scale_D: Tensor,
    *,
    limit: int,
    dead_zone: float,
    whole_TD: Tensor | None,
    shift: int,
    folded_TH: Tensor | None,
    position_N: Tensor,
    outlier_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """Quantise contiguous bf16 [T, D] into the arrays given; return sums, (`quantise.error_sums`) and count.

    `whole_TD` (int8) gets the symbols shifted right by `shift` bits, `folded_TH` (uint8) their low four bits,
    two channels a byte, as `quantise.fold_nibbles` lays them. The first `count` (int32 [1]) places of
    `position_N` (int32) and `outlier_N` (bf16) get the outliers in any order; where there are more than
    places, the rest is missing.
    """
    tokens, width = states_TD.shape
    half = (width + 1) // 2
    grid = (triton.cdiv(tokens, ROWS), triton.cdiv(half, CHANNELS))
    sums_P4 = torch.empty(grid[0] * grid[1], 4, dtype=torch.float32, device=states_TD.device)
    count = torch.zeros(1, dtype=torch.int32, device=states_TD.device)
    with torch.cuda.device(states_TD.device):  # Triton launches on the current one
        _encode[grid](
            states_TD,
            step_D,
            scale_D,
            states_TD if whole_TD is None else whole_TD,
            states_TD if folded_TH is None else folded_TH,
            position_N,
            outlier_N,
            count,
            sums_P4,
            tokens,
            width,
            half,
            len(position_N),
            float(limit),
            0.5 - dead_zone,
            DEAD_ZONE=dead_zone > 0,
            WHOLE=whole_TD is not None,
            SHIFT=shift,
            FOLDED=folded_TH is not None,
            R=ROWS,
            C=CHANNELS,
        )
    return sums_P4.sum(0, dtype=torch.float64), count
