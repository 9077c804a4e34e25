"""The arithmetic of the codecs: bf16 planes, channel scales, uniform quantisation. Plain torch, any device.

Letters: T tokens, D width (channels), H = ceil(D / 2), N outliers. What ends up in a cell is elementwise or
an exact integer reduction, so CPU and GPU give the same bits. Nothing here waits for the device, except
`quantise`, which must learn how many outliers there are.
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
GAUSSIAN_MEDIAN = 0.6744897501960817
"""Median of |x| of a standard normal variable."""


def split_planes(states_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split bf16 [T, D] into uint8 base_D, exponent_TD, rest_TD; bit-exact for every pattern.

    A bf16 number is sign (1 bit), exponent (8), mantissa (7). `base_D` is the rounded mean exponent of a
    channel; `exponent_TD` the exponent minus it, modulo 256, so that all channels look alike to an entropy
    coder; `rest_TD` the mantissa shifted left by one with the sign in the lowest bit.
    """
    bits_TD = states_TD.view(torch.int16)
    exponent_TD = ((bits_TD >> 7) & 0xFF).to(torch.uint8)
    tokens = max(len(bits_TD), 1)
    base_D = ((exponent_TD.sum(0, dtype=torch.int64) * 2 + tokens) // (2 * tokens)).to(torch.uint8)
    rest_TD = ((bits_TD << 1) | ((bits_TD >> 15) & 1)).to(torch.uint8)
    return base_D, exponent_TD - base_D, rest_TD


def join_planes(base_D: Tensor, exponent_TD: Tensor, rest_TD: Tensor, out_TD: Tensor) -> None:
    """Invert `split_planes` into the bf16 view `out_TD` (rows may be strided)."""
    word_TD = (exponent_TD + base_D).to(torch.int16) << 7
    word_TD |= (rest_TD >> 1).to(torch.int16)
    word_TD |= rest_TD.to(torch.int16) << 15
    out_TD.view(torch.int16).copy_(word_TD)


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


def quantise(
    states_TD: Tensor, step_D: Tensor, limit: int, dead_zone: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Round bf16 [T, D] to multiples of float32 `step_D`: int16 symbol_TD, int32 position_N, bf16 outlier_N.

    A magnitude is rounded up from 0.5 + `dead_zone` steps on: a little more error for clearly fewer bits,
    which pays where steps are coarse. What lies beyond `limit` steps, NaN included, becomes symbol 0 and an
    outlier: its position in the flattened [T, D] (ascending) and its exact value.
    """
    symbol_TD = states_TD.float() / step_D
    if dead_zone:
        symbol_TD = symbol_TD.sign() * (symbol_TD.abs() + (0.5 - dead_zone)).floor_()
    else:
        symbol_TD = symbol_TD.round_()
    outside_TD = ~(symbol_TD.abs() <= limit)
    position_N = outside_TD.flatten().nonzero().squeeze(1)
    symbol_TD = symbol_TD.masked_fill_(outside_TD, 0.0).to(torch.int16)
    return symbol_TD, position_N.to(torch.int32), states_TD.flatten()[position_N]


def dequantise(symbol_TD: Tensor, step_D: Tensor, out_TD: Tensor) -> None:
    """Write bf16(float32(symbol) * step) into `out_TD`, one rounding of the product and one to bf16."""
    torch.mul(symbol_TD, step_D, out=out_TD)


def restore_outliers(position_N: Tensor, outlier_N: Tensor, out_TD: Tensor) -> None:
    """Put the exact values of `quantise` back in their places."""
    position_N = position_N.long()
    row_N = torch.div(position_N, out_TD.shape[1], rounding_mode="floor")
    out_TD.index_put_((row_N, position_N - row_N * out_TD.shape[1]), outlier_N)


def fold_nibbles(symbol_TD: Tensor) -> Tensor:
    """Put symbols of -8..7 two to a byte, channel j (high four bits) with channel j + H: uint8 [T, H]."""
    width = symbol_TD.shape[1]
    half = (width + 1) // 2
    folded_TH = (symbol_TD[:, :half] & 15) << 4
    folded_TH[:, : width - half] |= symbol_TD[:, half:] & 15
    return folded_TH.to(torch.uint8)


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
    scale_T = magnitude_TD.masked_fill_(~(magnitude_TD < torch.inf), 0.0).amax(1) / 448.0
    scale_T = torch.where(scale_T > 0, scale_T, 1.0)
    return scale_T, (value_TD / scale_T[:, None]).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)


def from_fp8(scale_T: Tensor, value_TD: Tensor, out_TD: Tensor) -> None:
    """Invert `to_fp8` up to rounding."""
    torch.mul(value_TD.to(torch.float32), scale_T[:, None], out=out_TD)


def error_sums(states_TD: Tensor, decoded_TD: Tensor, scale_D: Tensor | None) -> Tensor:
    """Return float64 [4]: squared error, squared value, squared error in channel scales, values it counts.

    Places where the original is not finite are left out. Without scales the last two are 0.
    """
    value_TD = states_TD.float()
    finite_TD = value_TD.isfinite()
    value_TD = value_TD.masked_fill(~finite_TD, 0.0)
    squared_TD = (decoded_TD.float().masked_fill(~finite_TD, 0.0) - value_TD).square_()
    zero = torch.zeros((), dtype=torch.float64, device=states_TD.device)
    squared_error_D = squared_TD.sum(0, dtype=torch.float64)
    sums = [squared_error_D.sum(), value_TD.square_().sum(dtype=torch.float64), zero, zero]
    if scale_D is not None:
        sums[2] = (squared_error_D / scale_D.double().square()).sum()
        sums[3] = finite_TD.sum().double()
    return torch.stack(sums)
