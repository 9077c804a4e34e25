"""The codecs' way back on a CPU, one pass over the symbols: numba kernels, for where numba is installed.

Step by step in torch every pass writes what the next one reads again, and takes Python's lock before and
after, for which the other decoding threads wait. A kernel costs about what copying its result would. The
states are those of `quantise`, bit for bit. Letters as there; N: values from the first to the last of `out`.
"""

# mypy: disable-error-code=no-untyped-def
# The kernels' types are those of their signatures.

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np

CONFIG: Any = numba.config
if CONFIG.DISABLE_JIT:
    raise RuntimeError("NUMBA_DISABLE_JIT is set")
u1, u2, i1, f4, i8 = numba.uint8, numba.uint16, numba.int8, numba.float32, numba.int64


def _own_folder() -> str:
    """Where numba keeps what it compiles: a folder for this source, this numba and this model of CPU alone.

    It takes no lock, and processes of different kinds that start at once could get each other's machine code.
    """
    cpu = llvmlite.binding.get_host_cpu_name() + llvmlite.binding.get_host_cpu_features().flatten()
    kind = f"{Path(__file__).read_text()} {numba.__version__} {np.__version__} {cpu}"
    root = CONFIG.CACHE_DIR or Path.home() / ".cache/dflash"
    return str(Path(root) / "kernels" / hashlib.sha256(kind.encode()).hexdigest()[:16])


_FOLDER_OF_OTHERS, CONFIG.CACHE_DIR = CONFIG.CACHE_DIR, _own_folder()


def decode(
    arrays: Mapping[str, np.ndarray], step_D: np.ndarray | None, out_N: np.ndarray, stride: int
) -> None:
    """Decode the arrays of a lossless or tolerance payload (uint8, docs/codec.md), outliers left out.

    `out_N` is the memory from the first to the last value of the result, bf16 patterns in uint16 whose rows
    start `stride` apart: only of a contiguous array does the compiler know that values are neighbours.
    """
    if "exponent" in arrays:
        _join_planes(arrays["base"], arrays["exponent"], arrays["rest"], out_N, stride)
    elif "symbol" in arrays:
        _dequantise(arrays["symbol"].view(np.int8), step_D, out_N, stride)
    elif "folded" in arrays:
        _dequantise_folded(arrays["folded"], step_D, out_N, stride)
    else:
        _dequantise_wide(arrays["high"].view(np.int8), arrays["low"], step_D, out_N, stride)


def _kernel(*arguments: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compile at import, or load what an earlier process compiled; threads may then call it at any time."""
    kernel: Callable[[Callable[..., None]], Callable[..., None]] = numba.njit(
        numba.void(*arguments), nogil=True, cache=True
    )
    return kernel


@numba.njit(inline="always")
def _to_bf16(bits):
    """Round the bits of a finite float32 (uint32) to those of bf16, half to even."""
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@_kernel(u1[::1], u1[::1], u1[::1], u2[::1], i8)
def _join_planes(base_D, exponent_N, rest_N, out_N, stride):
    width = len(base_D)
    for t in range(len(exponent_N) // width):
        here = slice(t * width, (t + 1) * width)
        exponent_D, rest_D, out_D = exponent_N[here], rest_N[here], out_N[t * stride : t * stride + width]
        for d in range(width):
            exponent, rest = np.uint16(np.uint8(exponent_D[d] + base_D[d])), np.uint16(rest_D[d])
            out_D[d] = (rest << np.uint16(15)) | (exponent << np.uint16(7)) | (rest >> np.uint16(1))


@_kernel(i1[::1], f4[::1], u2[::1], i8)
def _dequantise(symbol_N, step_D, out_N, stride):
    width = len(step_D)
    value_D = np.empty(width, np.float32)
    bits_D = value_D.view(np.uint32)
    for t in range(len(symbol_N) // width):
        symbol_D, out_D = symbol_N[t * width : (t + 1) * width], out_N[t * stride : t * stride + width]
        for d in range(width):
            value_D[d] = np.float32(np.int32(symbol_D[d])) * step_D[d]
        for d in range(width):
            out_D[d] = _to_bf16(bits_D[d])


@_kernel(u1[::1], f4[::1], u2[::1], i8)
def _dequantise_folded(folded_N, step_D, out_N, stride):
    width, half = len(step_D), (len(step_D) + 1) // 2
    value_D = np.empty(width, np.float32)
    bits_D = value_D.view(np.uint32)
    left_H, right_H, left_step_H, right_step_H = value_D[:half], value_D[half:], step_D[:half], step_D[half:]
    for t in range(len(folded_N) // half):
        folded_H, out_D = folded_N[t * half : (t + 1) * half], out_N[t * stride : t * stride + width]
        for h in range(half):
            symbol = np.int8(folded_H[h]) >> 4
            left_H[h] = np.float32(np.int32(symbol)) * left_step_H[h]
        for h in range(len(right_H)):
            symbol = ((folded_H[h] & 15) ^ 8) - 8  # four bits with a sign
            right_H[h] = np.float32(np.int32(symbol)) * right_step_H[h]
        for d in range(width):
            out_D[d] = _to_bf16(bits_D[d])


@_kernel(i1[::1], u1[::1], f4[::1], u2[::1], i8)
def _dequantise_wide(high_N, low_N, step_D, out_N, stride):
    width, half = len(step_D), (len(step_D) + 1) // 2
    value_D = np.empty(width, np.float32)
    bits_D = value_D.view(np.uint32)
    left_H, right_H, left_step_H, right_step_H = value_D[:half], value_D[half:], step_D[:half], step_D[half:]
    for t in range(len(high_N) // width):
        start = t * width
        left_high_H, right_high_H = high_N[start : start + half], high_N[start + half : start + width]
        low_H, out_D = low_N[t * half : (t + 1) * half], out_N[t * stride : t * stride + width]
        for h in range(half):
            left_H[h] = np.float32(np.int32(left_high_H[h] * 16 + (low_H[h] >> 4))) * left_step_H[h]
        for h in range(len(right_H)):
            right_H[h] = np.float32(np.int32(right_high_H[h] * 16 + (low_H[h] & 15))) * right_step_H[h]
        for d in range(width):
            out_D[d] = _to_bf16(bits_D[d])


@numba.njit(numba.boolean(u1[::1], u1[::1], i8, u2[::1], i8), nogil=True, cache=True)
def put_outliers(gap_N, outlier_N, width, out_N, stride):
    """Put outliers into the result of `decode`, from gaps and values as cells store them: planes of bytes.

    False when one lies outside, or two at one place.
    """
    count, at, tokens = len(outlier_N) // 2, 0, (len(out_N) - width) // stride + 1
    for n in range(count):
        low, high = gap_N[n] + 256 * gap_N[count + n], gap_N[2 * count + n] + 256 * gap_N[3 * count + n]
        gap = low + 65536 * high
        at += gap
        if (n and not gap) or at >= tokens * width:
            return False
        out_N[at // width * stride + at % width] = np.uint16(outlier_N[n] + 256 * outlier_N[count + n])
    return True


CONFIG.CACHE_DIR = _FOLDER_OF_OTHERS
