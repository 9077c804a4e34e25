"""The arithmetic of the codecs: bf16 planes, channel scales, uniform quantisation. Plain torch, any device.

Letters: T tokens, D width (channels), H = ceil(D / 2), N outliers. What ends up in a cell is elementwise or
an exact integer reduction, so CPU and GPU give the same bits. Encoding and decoding do not wait for the
device, except `find_outliers`; quantise_kernel.py does the way out of one codec without it, in one kernel,
and quantise_cpu.py the way back on a CPU in one pass.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

OCTAVES = 64
"""The calibration histogram covers magnitudes from 2^-32 to 2^32."""
BINS_PER_OCTAVE = 8
LOUD = 8.0
"""Values beyond so many robust deviations do not count for a channel's scale: they are stored as outliers."""
BF16_ROUNDING = 0.00166
"""RMS of the relative error that rounding to bf16 makes."""
CPU_BLOCK = 1 << 17
"""Values that are worked on at a time on a CPU."""
UNTHREADED_BLOCK = 1 << 15
"""Values for which torch starts no threads of its own."""
GAUSSIAN_MEDIAN = 0.6744897501960817
"""Median of |x| of a standard normal variable."""


def row_blocks(states_TD: Tensor, values: int = CPU_BLOCK) -> list[slice]:
    """Cut [T, D] into blocks of rows: on the CPU of about so many values, elsewhere a single one."""
    tokens, width = states_TD.shape
    rows = max(1, values // width) if states_TD.device.type == "cpu" else max(1, tokens)
    return [slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]


def mean_exponent(states_TD: Tensor) -> Tensor:
    """Return uint8 [D]: the rounded mean exponent of each channel of bf16 [T, D]."""
    total_D = torch.zeros(states_TD.shape[1], dtype=torch.int64, device=states_TD.device)
    for rows in row_blocks(states_TD):
        total_D += ((states_TD[rows].view(torch.int16) >> 7) & 0xFF).sum(0)
    tokens = max(len(states_TD), 1)
    return ((total_D * 2 + tokens) // (2 * tokens)).to(torch.uint8)


def split_planes(states_TD: Tensor, base_D: Tensor) -> tuple[Tensor, Tensor]:
    """Split bf16 [T, D] into uint8 exponent_TD and rest_TD; bit-exact for every pattern.

    A bf16 number is sign (1 bit), exponent (8), mantissa (7). `exponent_TD` is the exponent minus `base_D`,
    modulo 256: with the channel's mean exponent for a base, all channels look alike to an entropy coder.
    `rest_TD` is the mantissa shifted left by one, with the sign in the lowest bit.
    """
    bits_TD = states_TD.view(torch.int16)
    exponent_TD = (bits_TD >> 7).to(torch.uint8).sub_(base_D)
    rest_TD = (bits_TD << 1).to(torch.uint8).bitwise_or_((bits_TD < 0).view(torch.uint8))
    return exponent_TD, rest_TD


def join_planes(base_D: Tensor, exponent_TD: Tensor, rest_TD: Tensor, out_TD: Tensor) -> None:
    """Invert `split_planes` into the bf16 view `out_TD` (rows may be strided)."""
    exponent_TD, rest_TD = (exponent_TD + base_D).to(torch.int16), rest_TD.to(torch.int16)
    word_TD = torch.add(rest_TD >> 1, exponent_TD, alpha=1 << 7)
    # Modulo 2^16 this leaves the lowest bit of rest, the sign, in the highest place.
    torch.add(word_TD, rest_TD, alpha=-(1 << 15), out=out_TD.view(torch.int16))


class ChannelHistogram:
    """Magnitudes of each channel, counted: the same whatever order, batch or device the tokens came in."""

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.counts_DB = torch.zeros(width, OCTAVES * BINS_PER_OCTAVE, dtype=torch.int64, device=device)

    def add(self, states_TD: Tensor) -> None:
        """Count bf16 [T, D]. Non-finite values count as the largest magnitude."""
        bins = OCTAVES * BINS_PER_OCTAVE
        offset_D = torch.arange(len(self.counts_DB), device=states_TD.device) * bins
        for chunk_TD in states_TD.split(1024):
            magnitude_TD = chunk_TD.view(torch.int16).to(torch.int32) & 0x7FFF
            bin_TD = (magnitude_TD >> 4) - (127 - OCTAVES // 2) * BINS_PER_OCTAVE
            flat = (bin_TD.clamp(0, bins - 1) + offset_D).flatten()
            self.counts_DB += torch.bincount(flat, minlength=self.counts_DB.numel()).view_as(self.counts_DB)

    def scale(self) -> Tensor:
        """Return float32 [D]: RMS of each channel without its loud values; 1 for a channel without any.

        A value is loud beyond `LOUD` times the deviation of a normal variable with the channel's median
        magnitude. One massive token in ten thousand would otherwise set the scale of its channels.
        """
        counts_DB = self.counts_DB.cpu().double()
        bins = torch.arange(counts_DB.shape[1], dtype=torch.float64)
        mantissa_B = 1 + (bins % BINS_PER_OCTAVE + 0.5) / BINS_PER_OCTAVE
        centre_B = mantissa_B * 2.0 ** (bins // BINS_PER_OCTAVE - OCTAVES // 2)
        centre_B[0] = 0.0
        half_D = counts_DB.sum(1, keepdim=True) / 2
        median_D = centre_B[(counts_DB.cumsum(1) < half_D).sum(1).clamp(max=len(centre_B) - 1)]
        ordinary_DB = centre_B <= LOUD / GAUSSIAN_MEDIAN * median_D[:, None]
        ordinary_DB |= (median_D == 0)[:, None]
        kept_DB = counts_DB * ordinary_DB
        energy_D = (kept_DB * centre_B**2).sum(1) / kept_DB.sum(1).clamp(min=1)
        return torch.where(energy_D > 0, energy_D, 1.0).sqrt().float()


@cache
def step_for(tolerance: float, dead_zone: float) -> float:
    """Return the step, in channel scales, that makes an error of `tolerance` on normal values.

    Magnitudes are rounded up from 0.5 + `dead_zone` steps on, results to bf16. The error follows from the
    moments of the normal density over each interval of rounding, the step from it by bisection.
    """
    wanted = tolerance**2 - BF16_ROUNDING**2
    low, high = tolerance, 6 * tolerance
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _normal_error(middle, dead_zone) < wanted else (low, middle)
    return low


def _normal_error(step: float, dead_zone: float) -> float:
    """Mean squared error of a standard normal variable after rounding to multiples of `step`."""

    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    edges = [0.0] + [(k - 0.5 + dead_zone) * step for k in range(1, math.ceil(9 / step) + 1)]
    total = 0.0
    for k, (a, b) in enumerate(pairwise(edges)):
        r = k * step
        total += (1 + r * r) * (math.erf(b / math.sqrt(2)) - math.erf(a / math.sqrt(2))) / 2
        total += (2 * r - b) * density(b) - (2 * r - a) * density(a)
    return 2 * total


def quantise(states_TD: Tensor, step_D: Tensor, limit: int, dead_zone: float) -> tuple[Tensor, Tensor]:
    """Round bf16 [T, D] to multiples of float32 `step_D`; returns symbol_TD and outside_TD.

    symbol_TD: whole float32 numbers. outside_TD: where the magnitude is beyond `limit` steps or not a number:
    these values are outliers, their symbols mean nothing.
    A magnitude is rounded up from 0.5 + `dead_zone` steps on: a little more error for clearly fewer bits,
    which pays where steps are coarse.
    """
    symbol_TD = states_TD / step_D
    if dead_zone:
        magnitude_TD = symbol_TD.abs().add_(0.5 - dead_zone).floor_()
        symbol_TD = magnitude_TD.copysign_(symbol_TD)
    else:
        symbol_TD = symbol_TD.round_()
    return symbol_TD, (symbol_TD.abs() <= limit).logical_not_()


def find_outliers(states_TD: Tensor, outside_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return position_N (int64, ascending, in the flattened [T, D]) and outlier_N, their bf16 values.

    Waits for the device to learn how many there are.
    """
    position_N = outside_TD.view(-1).nonzero().squeeze(1)
    return position_N, states_TD.reshape(-1)[position_N]


def dequantise(symbol_TD: Tensor, step_D: Tensor, out_TD: Tensor) -> None:
    """Write bf16(float32(symbol) * step) into `out_TD`, one rounding of the product and one to bf16."""
    torch.mul(symbol_TD, step_D, out=out_TD)


def dequantise_folded(folded_TH: Tensor, step_D: Tensor, out_TD: Tensor) -> None:
    """Do the same with symbols of four bits, as `fold_nibbles` lays them."""
    half, width = folded_TH.shape[-1], out_TD.shape[-1]
    torch.mul(unfold_high(folded_TH), step_D[..., :half], out=out_TD[..., :half])
    torch.mul(unfold_low(folded_TH)[..., : width - half], step_D[..., half:], out=out_TD[..., half:])


def dequantise_wide(high_TD: Tensor, low_TH: Tensor, step_D: Tensor, out_TD: Tensor) -> None:
    """Do the same with symbols whose upper bits are int8 and whose low four are folded."""
    low_TD = torch.cat([low_TH >> 4, low_TH & 15], dim=-1)[..., : out_TD.shape[-1]]
    torch.mul((high_TD.to(torch.int16) << 4) | low_TD, step_D, out=out_TD)


def restore_outliers(position_N: Tensor, outlier_N: Tensor, out_TD: Tensor) -> None:
    """Put the exact values of `quantise` back in their places."""
    position_N = position_N.long()
    row_N = torch.div(position_N, out_TD.shape[1], rounding_mode="floor")
    out_TD.index_put_((row_N, position_N - row_N * out_TD.shape[1]), outlier_N)


def fold_nibbles(symbol_TD: Tensor) -> Tensor:
    """Put the low four bits of int8 symbols into bytes, channel j above channel j + H: uint8 [T, H]."""
    bits_TD = symbol_TD.view(torch.uint8)
    width = symbol_TD.shape[1]
    half = (width + 1) // 2
    folded_TH = bits_TD[:, :half] << 4
    folded_TH[:, : width - half] |= bits_TD[:, half:] & 15
    return folded_TH


def unfold_high(folded_TH: Tensor) -> Tensor:
    """Return the symbols of channels 0..H-1 as int8 (arithmetic shift keeps the sign)."""
    return folded_TH.view(torch.int8) >> 4


def unfold_low(folded_TH: Tensor) -> Tensor:
    """Return the symbols of channels H.. as int8; the last column is padding when the width is odd."""
    return (folded_TH.view(torch.int8) << 4) >> 4


def to_fp8(states_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Scale each token so that its largest finite magnitude is 448: float32 scale_T, float8 e4m3 [T, D].

    NaN stays NaN; infinities become the largest finite magnitude of the token.
    """
    value_TD = states_TD.float()
    magnitude_TD = value_TD.abs()
    # By a tensor: a GPU would multiply by the inverse of a number, and round otherwise than a CPU.
    largest = torch.full((1,), 448.0, device=states_TD.device)
    scale_T = magnitude_TD.masked_fill_(~(magnitude_TD < torch.inf), 0.0).amax(1) / largest
    scale_T = torch.where(scale_T > 0, scale_T, 1.0)
    return scale_T, (value_TD / scale_T[:, None]).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)


def from_fp8(scale_T: Tensor, value_TD: Tensor, out_TD: Tensor) -> None:
    """Invert `to_fp8` up to rounding."""
    torch.mul(value_TD.to(torch.float32), scale_T[..., None], out=out_TD)


def error_sums(states_TD: Tensor, decoded_TD: Tensor, scale_D: Tensor | None, *, finite: bool) -> Tensor:
    """Return float64 [4]: squared error, squared value, squared error in channel scales, values it counts.

    Places where the original is not finite are left out; `finite` says that there are none. Without scales
    the last two are 0.
    """
    value_TD = states_TD.float()
    error_TD = decoded_TD - value_TD
    if not finite:
        absent_TD = value_TD.isfinite().logical_not_()
        value_TD.masked_fill_(absent_TD, 0.0)
        error_TD.masked_fill_(absent_TD, 0.0)
    # A cell is small enough for float32 sums of each channel; in float64 torch would copy all values first.
    squared_error_D = error_TD.square_().sum(0).double()
    squared_value = value_TD.square_().sum(0).double().sum()
    zero = torch.zeros_like(squared_value)
    scaled, count = zero, zero
    if scale_D is not None:
        scaled = (squared_error_D / scale_D.double().square()).sum()
        absent = 0 if finite else absent_TD.sum(0, dtype=torch.int32).sum()
        count = zero + (states_TD.numel() - absent)
    return torch.stack([squared_error_D.sum(), squared_value, scaled, count])
