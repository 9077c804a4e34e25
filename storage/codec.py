"""Hidden states <-> cells: three codecs, the arithmetic on the device and the entropy coding on threads.

The way out: `Codec.encode_on_device` (torch, where the states are), `Symbols.to("cpu")`, `Codec.to_bytes`
(any thread; zstandard frees the GIL). `Codec.encode_at_once` does not wait for the device: the copy may be
asynchronous, and `Symbols.settled` comes after it. The way back: `Codec.from_bytes` (any thread, into a
pinned buffer if given), `Symbols.to(device)`, `Codec.decode_on_device`. docs/codec.md specifies the bytes.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from dflash_core import quantise
from storage.cell import (
    ALIGNMENT,
    LIMITS,
    MAX_CELL_VALUES,
    OUTSIDE,
    Cell,
    CellHeader,
    CodecError,
    Kind,
    Layout,
    open_cell,
    pack_cell,
)
from storage.symbols import Symbols, SymbolsBatch

log = logging.getLogger(__name__)

WIDE_BELOW = 0.02
"""Tolerances below this need more than 8 bits a symbol."""
NIBBLES_FROM = 0.16
"""From this tolerance on nearly all symbols fit in four bits, and two are coded together."""
DEAD_ZONE = 0.25
"""Widening of the interval that becomes 0, in steps per unit of tolerance, where symbols are nibbles."""


@dataclass(frozen=True, slots=True)
class Codec:
    """A way to store bf16 hidden states [T, D]; make one with `parse_codec`. Stateless and free to share."""

    name: str
    kind: Kind
    tolerance: float = 0.0

    @property
    def needs_scales(self) -> bool:
        """Whether encoding and decoding need the data set's channel scales."""
        return self.kind == Kind.TOLERANCE

    @property
    def has_kernel(self) -> bool:
        """Whether encoding has a kernel, without which it waits for the device; where not, it never waits."""
        return self.kind == Kind.TOLERANCE

    @property
    def layout(self) -> Layout:
        """How the symbols lie in bytes: a function of the tolerance alone."""
        if self.kind != Kind.TOLERANCE or WIDE_BELOW <= self.tolerance < NIBBLES_FROM:
            return Layout.BYTES
        return Layout.WIDE if self.tolerance < WIDE_BELOW else Layout.NIBBLES

    def encode_on_device(self, states_TD: Tensor, scale_D: Tensor | None = None) -> Symbols:
        """Turn bf16 [T, D] into symbols on the same device; `tolerance` waits for the device once.

        `scale_D` (float32 [D]) is required by `tolerance`; the other codecs only use it to state their error.
        Raises CodecError on a wrong dtype, shape or size, or when scales are missing.
        """
        self._check_states(states_TD, scale_D)
        states_TD = states_TD.detach().contiguous()
        symbols, step_D = self._empty_symbols(states_TD, scale_D)
        if self.kind == Kind.LOSSLESS:
            symbols.array("base").copy_(quantise.mean_exponent(states_TD))
        sums = torch.zeros(4, dtype=torch.float64, device=states_TD.device)
        outliers: list[tuple[Tensor, Tensor]] = []
        for rows in quantise.row_blocks(states_TD):
            block_TD, decoded_TD, finite = states_TD[rows], states_TD[rows], False
            if self.kind == Kind.TOLERANCE:
                outside_TD = self._quantise(block_TD, step_D, symbols, rows)
                position_N, outlier_N = quantise.find_outliers(block_TD, outside_TD)
                outliers.append((position_N + rows.start * states_TD.shape[1], outlier_N))
                finite = not len(position_N)
            elif self.kind == Kind.FP8:
                symbols.array("token_scale")[rows], symbols.array("value")[rows] = quantise.to_fp8(block_TD)
            else:
                exponent_TD, rest_TD = quantise.split_planes(block_TD, symbols.array("base"))
                symbols.array("exponent")[rows], symbols.array("rest")[rows] = exponent_TD, rest_TD
            if self.kind != Kind.LOSSLESS:
                decoded_TD = torch.empty_like(block_TD)
                self._decode_rows(symbols, rows, step_D, decoded_TD)
                if not finite and self.kind == Kind.TOLERANCE:
                    decoded_TD = torch.where(outside_TD, block_TD, decoded_TD)
            sums += quantise.error_sums(block_TD, decoded_TD, scale_D, finite=finite)
        return symbols.with_outliers(outliers, sums)

    def encode_at_once(
        self, cells: Sequence[tuple[Tensor, Tensor | None]], outlier_rooms: Sequence[int]
    ) -> SymbolsBatch:
        """Turn the states and scales of many cells of one width into symbols without waiting: one Triton
        kernel does it all, on CUDA, for codecs that have one.

        `outlier_rooms`: room for so many outliers in each cell. Symbols must be `settled` before they are
        coded. Raises CodecError as `encode_on_device`, and for states that are not on a GPU.
        """
        like = cells[0][0]
        for states_TD, scale_D in cells:
            self._check_states(states_TD, scale_D)
            if not states_TD.is_cuda:
                raise CodecError(
                    f"encoding at once is for states on a GPU, and these are on {states_TD.device}"
                )
            assert scale_D is not None  # or it has been refused
            if states_TD.shape[1] != like.shape[1] or {states_TD.device, scale_D.device} != {like.device}:
                raise CodecError(
                    "cells that are encoded at once have one width and lie, with scales, on one GPU"
                )
        from dflash_core.quantise_kernel import CellArrays, encode

        whole = [states_TD.detach().contiguous() for states_TD, _ in cells]
        headers = tuple(
            self._header(len(states_TD), states_TD.shape[1], room)
            for states_TD, room in zip(whole, outlier_rooms, strict=True)
        )
        sizes = [-(-header.payload_bytes // ALIGNMENT) * ALIGNMENT for header in headers]
        starts = (0, *accumulate(sizes))
        payload = torch.empty(starts[-1], dtype=torch.uint8, device=whole[0].device)
        steps: dict[int, Tensor] = {}
        arrays = []
        for (_, scale_D), states_TD, header, start in zip(cells, whole, headers, starts, strict=False):
            assert scale_D is not None
            if id(scale_D) not in steps:  # columns have one each, whatever the number of cells
                steps[id(scale_D)] = channel_steps(scale_D, header.width, header.step)
            symbols = Symbols(header=header, payload=payload[start : start + header.payload_bytes])
            of_rows = symbols.arrays(slice(None))
            arrays.append(
                CellArrays(
                    states_TD,
                    steps[id(scale_D)],
                    scale_D.contiguous(),
                    of_rows.get("symbol", of_rows.get("high")),
                    of_rows.get("folded", of_rows.get("low")),
                    symbols.array("position"),
                    symbols.array("outlier"),
                )
            )
        sums_P4, first_sums, counts = encode(
            arrays,
            limit=LIMITS[self.layout],
            dead_zone=self._dead_zone,
            shift=4 if self.layout == Layout.WIDE else 0,
        )
        return SymbolsBatch(
            headers=headers,
            payload=payload,
            starts=starts[:-1],
            sums_P4=sums_P4,
            first_sums=first_sums,
            outlier_counts=counts,
        )

    def decode_on_device(self, symbols: Symbols, scale_D: Tensor | None, out_TD: Tensor) -> None:
        """Write the states into `out_TD`, a bf16 view [T, D] with rows of any stride, without waiting.

        Raises CodecError when the cell is of another codec or shape than `out_TD` and `scale_D`.
        """
        header = symbols.header
        self._check_cell(header)
        if tuple(out_TD.shape) != (header.tokens, header.width) or out_TD.dtype != torch.bfloat16:
            raise CodecError(
                f"a cell of {header.tokens} tokens x {header.width} channels does not fit a"
                f" {out_TD.dtype} buffer of shape {tuple(out_TD.shape)}"
            )
        step_D = None
        if self.kind == Kind.TOLERANCE:
            step_D = channel_steps(scale_D, header.width, header.step)
        if not header.tokens:
            return
        arrays = symbols.arrays(slice(None))
        if not self._decoded_in_one_pass(arrays, step_D, out_TD):
            # Decoding runs on threads already: so little that torch starts none of its own.
            values = quantise.UNTHREADED_BLOCK if torch.get_num_threads() > 1 else quantise.CPU_BLOCK
            for rows in quantise.row_blocks(out_TD, values):
                self._decode_rows(symbols, rows, step_D, out_TD[rows])
        if header.outliers:
            quantise.restore_outliers(symbols.array("position"), symbols.array("outlier"), out_TD)

    def decode_on_host(
        self, cell: Cell, memory: np.ndarray, step_D: np.ndarray | None, out_N: np.ndarray, stride: int
    ) -> None:
        """Decode a cell in one pass on the CPU (see `in_one_pass`), through `memory` (uint8, of its payload).

        Writes bf16 patterns (uint16) into `out_N`, the memory from the first to the last value, whose rows
        start `stride` apart. Raises CodecError unless it is a whole cell of this codec.
        """
        header, kernels = cell.header, cpu_kernels()
        self._check_cell(header)
        assert kernels is not None
        values = (header.tokens - 1) * stride + header.width if header.tokens else 0
        if len(out_N) != values or (step_D is not None and len(step_D) != header.width):
            raise CodecError(
                f"a cell of {header.tokens} tokens x {header.width} channels does not fit {len(out_N)} values"
                f" in rows of {stride}"
            )
        payload = memory[: header.payload_bytes]
        cell.unpack_sections(payload)
        arrays = {name: payload[start : start + size] for name, (start, size) in header.offsets.items()}
        if header.tokens:
            kernels.decode(arrays, step_D, out_N, stride)
        if header.outliers and not kernels.put_outliers(
            arrays["position"], arrays["outlier"], header.width, out_N, stride
        ):
            raise CodecError(OUTSIDE)

    def to_bytes(self, symbols: Symbols) -> bytes:
        """Entropy code symbols that lie on the host. Thread-safe; frees the GIL while it codes."""
        return pack_cell(symbols.header, symbols.payload.numpy())

    def from_bytes(self, cell: bytes | memoryview | Cell, out: Tensor | None = None) -> Symbols:
        """Undo `to_bytes`, into the first bytes of `out` (uint8 on the host, e.g. pinned) when given.

        Thread-safe; frees the GIL while it decodes. Raises CodecError unless it is a whole cell of this
        codec.
        """
        cell = cell if isinstance(cell, Cell) else open_cell(cell)
        header = cell.header
        self._check_cell(header)
        if out is None:
            out = torch.empty(header.payload_bytes, dtype=torch.uint8)
        if out.numel() < header.payload_bytes:
            raise CodecError(f"a buffer of {out.numel()} bytes cannot hold {header.payload_bytes} of a cell")
        payload = out[: header.payload_bytes]
        cell.unpack(payload.numpy())
        return Symbols(header=header, payload=payload)

    def _empty_symbols(self, states_TD: Tensor, scale_D: Tensor | None) -> tuple[Symbols, Tensor | None]:
        """Room for everything but outliers, and the quantisation steps if there are any."""
        header = self._header(len(states_TD), states_TD.shape[1])
        step_D = channel_steps(scale_D, header.width, header.step) if self.needs_scales else None
        payload = torch.empty(header.payload_bytes, dtype=torch.uint8, device=states_TD.device)
        return Symbols(header=header, payload=payload), step_D

    def symbol_bytes(self, tokens: int, width: int) -> int:
        """Size of a cell's symbols, outliers left out."""
        return self._header(tokens, width).payload_bytes

    def _header(self, tokens: int, width: int, outliers: int = 0) -> CellHeader:
        step = 0.0
        if self.kind == Kind.TOLERANCE:
            step = float(np.float32(quantise.step_for(self.tolerance, self._dead_zone)))
        return CellHeader(
            kind=self.kind, layout=self.layout, tokens=tokens, width=width, outliers=outliers, step=step
        )

    @property
    def _dead_zone(self) -> float:
        return DEAD_ZONE * self.tolerance if self.layout == Layout.NIBBLES else 0.0

    def _quantise(self, block_TD: Tensor, step_D: Tensor | None, symbols: Symbols, rows: slice) -> Tensor:
        """Write the symbols of some rows; returns where the outliers are, bool [T, D]."""
        assert step_D is not None
        symbol_TD, outside_TD = quantise.quantise(block_TD, step_D, LIMITS[self.layout], self._dead_zone)
        small_TD = symbol_TD.to(torch.int16 if self.layout == Layout.WIDE else torch.int8)
        small_TD.masked_fill_(outside_TD, 0)
        if self.layout == Layout.BYTES:
            symbols.array("symbol")[rows] = small_TD
        elif self.layout == Layout.NIBBLES:
            symbols.array("folded")[rows] = quantise.fold_nibbles(small_TD)
        else:
            symbols.array("high")[rows] = (small_TD >> 4).to(torch.int8)
            symbols.array("low")[rows] = quantise.fold_nibbles(small_TD.to(torch.int8))
        return outside_TD

    def decode_arrays(self, arrays: Mapping[str, Tensor], step_D: Tensor | None, out_TD: Tensor) -> None:
        """Decode the arrays of a payload, outliers left out, into the bf16 view `out_TD` of any strides.

        Arrays are those of docs/codec.md by name. Dimensions may stand in front of all (a column a row, say),
        those of `base` and `step_D` ([..., 1, D]) too. `step_D` is scale x step; `tolerance` alone needs it.
        """
        if self._decoded_in_one_pass(arrays, step_D, out_TD):
            return
        if self.kind == Kind.LOSSLESS:
            quantise.join_planes(arrays["base"], arrays["exponent"], arrays["rest"], out_TD)
            return
        if self.kind == Kind.FP8:
            quantise.from_fp8(arrays["token_scale"], arrays["value"], out_TD)
            return
        assert step_D is not None
        if "symbol" in arrays:
            quantise.dequantise(arrays["symbol"], step_D, out_TD)
        elif "folded" in arrays:
            quantise.dequantise_folded(arrays["folded"], step_D, out_TD)
        else:
            quantise.dequantise_wide(arrays["high"], arrays["low"], step_D, out_TD)

    @property
    def in_one_pass(self) -> bool:
        """Whether a CPU decodes it with `dflash_core.quantise_cpu`."""
        return self.kind != Kind.FP8 and cpu_kernels() is not None

    def _decoded_in_one_pass(
        self, arrays: Mapping[str, Tensor], step_D: Tensor | None, out_TD: Tensor
    ) -> bool:
        """Decode with numba, which checks no bounds; False, and nothing done, where that is not for these."""
        if out_TD.device.type != "cpu" or out_TD.ndim != 2 or out_TD.dtype != torch.bfloat16:
            return False
        tokens, width = out_TD.shape
        channels = arrays.get("base") if self.kind == Kind.LOSSLESS else step_D
        fits = channels is not None and channels.numel() == width and tokens > 0
        fits = fits and all(len(array) == tokens for name, array in arrays.items() if name != "base")
        if not fits or out_TD.stride(1) != 1 or out_TD.stride(0) < width or not self.in_one_pass:
            return False
        kernels = cpu_kernels()
        assert kernels is not None
        stride = out_TD.stride(0)
        out_N = out_TD.as_strided(((tokens - 1) * stride + width,), (1,))
        bytes_of = {name: array.reshape(-1).view(torch.uint8).numpy() for name, array in arrays.items()}
        step = None if step_D is None else step_D.reshape(-1).numpy()
        kernels.decode(bytes_of, step, out_N.view(torch.int16).numpy().view(np.uint16), stride)
        return True

    def _decode_rows(self, symbols: Symbols, rows: slice, step_D: Tensor | None, out_TD: Tensor) -> None:
        """Decode some rows of a cell, outliers left out."""
        self.decode_arrays(symbols.arrays(rows), step_D, out_TD)

    def _check_states(self, states_TD: Tensor, scale_D: Tensor | None) -> None:
        if states_TD.ndim != 2 or states_TD.dtype != torch.bfloat16:
            raise CodecError(
                f"codec {self.name} takes bfloat16 states of shape [tokens, width]; found"
                f" {states_TD.dtype} {tuple(states_TD.shape)}: run the target in bfloat16, or cast its states"
            )
        if states_TD.numel() > MAX_CELL_VALUES or states_TD.shape[1] == 0:
            raise CodecError(f"a cell cannot hold {tuple(states_TD.shape)} values: cut the sample into parts")
        if self.needs_scales and scale_D is None:
            raise CodecError(f"codec {self.name} needs the channel scales of the data set")

    def _check_cell(self, header: CellHeader) -> None:
        if header.kind != self.kind:
            raise CodecError(f"codec {self.name} cannot read a cell of kind {header.kind.name.lower()}")


@cache
def cpu_kernels() -> ModuleType | None:
    """quantise_cpu.py, where numba is installed and fits; None elsewhere, where torch does its work."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        return importlib.import_module("dflash_core.quantise_cpu")
    except Exception as error:  # noqa: BLE001  of numba, llvmlite or the disk, of any type
        log.warning(
            "shards are decoded with torch, at half the speed: numba cannot be used (%s: %s). Remove or mend "
            "it; what it compiled lies in ~/.cache/dflash, or where NUMBA_CACHE_DIR says, and can be removed",
            *(type(error).__name__, error),
        )
        return None


def channel_steps(scale_D: Tensor | None, width: int, step: float) -> Tensor:
    """Quantisation step of each channel, float32 [D]."""
    if scale_D is None or tuple(scale_D.shape) != (width,) or scale_D.dtype != torch.float32:
        found = "none" if scale_D is None else f"{scale_D.dtype} {tuple(scale_D.shape)}"
        raise CodecError(f"cells of {width} channels need float32 scales of that length; found: {found}")
    return scale_D * step


def parse_codec(name: str) -> Codec:
    """Make the codec called "lossless", "fp8" or "tolerance=<relative error>" (0.005 to 0.7).

    Raises CodecError for any other name.
    """
    if name in ("lossless", "fp8"):
        return Codec(name, Kind.LOSSLESS if name == "lossless" else Kind.FP8)
    key, _, number = name.partition("=")
    try:
        tolerance = float(number)
    except ValueError:
        tolerance = math.nan
    if key != "tolerance" or not 0.005 <= tolerance <= 0.7:
        raise CodecError(
            f"codec {name!r} does not exist: use lossless, fp8, or tolerance=E with E from 0.005 to 0.7"
        )
    return Codec(name, Kind.TOLERANCE, tolerance)
