"""Packed rows being filled: states on the host, or symbols on a GPU that become states when a row is used.

Letters: C positions of a row, T tokens of a piece, L columns, D width of a column, E = L * D, N outliers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from storage.cell import Cell, CellHeader
from storage.codec import Codec, channel_steps
from storage.pieces import Piece, Staging
from storage.symbols import Symbols

DEVICE_BLOCK = 1 << 25
"""Values that a GPU decodes at a time: bounds what the arithmetic holds in between."""


Steps = tuple[float, ...]


class RowShape:
    """What the rows of a reader have in common."""

    def __init__(
        self,
        codec: Codec,
        row_tokens: int,
        width: int,
        scales: Sequence[Tensor | None],
        device: torch.device,
    ) -> None:
        """`scales`: float32 [D] of each column; None for a codec that needs none."""
        self.codec, self.row_tokens, self.width, self.columns = codec, row_tokens, width, len(scales)
        self.device = device
        self.scales = [None if scale_D is None else scale_D.to(device) for scale_D in scales]
        self._steps: dict[Steps, Tensor] = {}
        self._host_steps: dict[Steps, list[np.ndarray]] = {}

    def header(self, tokens: int) -> CellHeader:
        """What a cell of so many tokens says that has no outliers."""
        kind, layout = self.codec.kind, self.codec.layout
        return CellHeader(kind=kind, layout=layout, tokens=tokens, width=self.width, outliers=0, step=0.0)

    def piece_bytes(self, tokens: int) -> int:
        """Payloads of so many tokens, all columns together, without outliers."""
        return self.columns * self.header(tokens).payload_bytes

    def empty_states(self) -> Tensor:
        """Zeros: bf16 [C, E]."""
        shape = self.row_tokens, self.columns * self.width
        return torch.zeros(shape, dtype=torch.bfloat16, device=self.device)

    def by_column(self, states_CE: Tensor) -> Tensor:
        """View states as [L, C, D]."""
        return states_CE.view(len(states_CE), self.columns, self.width).transpose(0, 1)

    def channel_steps(self, steps: Steps) -> Tensor | None:
        """Quantisation step of each channel, float32 [L, 1, D]; kept: nearly all pieces have the same."""
        if not self.codec.needs_scales:
            return None
        if steps not in self._steps:
            scaled = zip(self.scales, steps, strict=True)
            self._steps[steps] = torch.stack([channel_steps(s, self.width, step) for s, step in scaled])[
                :, None
            ]
        return self._steps[steps]

    def host_steps(self, steps: Steps) -> Sequence[np.ndarray | None]:
        """The same in numpy, one float32 [D] a column: a view of torch's takes as long as decoding a short
        cell.
        """
        if not self.codec.needs_scales:
            return [None] * self.columns
        if steps not in self._host_steps:
            scaled = zip(self.scales, steps, strict=True)
            self._host_steps[steps] = [channel_steps(s, self.width, step).numpy() for s, step in scaled]
        return self._host_steps[steps]


class HostRow:
    """A row on the host: the states themselves."""

    reusable = False
    """The consumer uses the memory until it asks for the next row."""

    def __init__(self, shape: RowShape) -> None:
        self._shape, self._states_CE = shape, shape.empty_states()
        self._patterns_N = self._states_CE.view(torch.int16).numpy().view(np.uint16).reshape(-1)
        """The same memory as bf16 patterns, flat."""

    def begin(self) -> None:
        """Start a new row."""

    def write(self, piece: Piece, cells: Sequence[Cell], staging: Staging) -> None:
        """Decode a piece, column by column: its symbols stay in the caches."""
        memory = staging.reserve(max(cell.header.payload_bytes for cell in cells))
        if self._shape.codec.in_one_pass:
            self._write_in_one_pass(piece, cells, memory.numpy())
            return
        states_LTD = self._shape.by_column(self._states_CE[piece.start : piece.start + piece.tokens])
        for cell, scale_D, states_TD in zip(cells, self._shape.scales, states_LTD, strict=True):
            symbols = self._shape.codec.from_bytes(cell, out=memory)
            self._shape.codec.decode_on_device(symbols, scale_D, states_TD)

    def _write_in_one_pass(self, piece: Piece, cells: Sequence[Cell], memory: np.ndarray) -> None:
        """Do the same with numpy alone, whose views take a tenth of the time of torch's."""
        width, stride = self._shape.width, self._states_CE.shape[1]
        steps = self._shape.host_steps(tuple(cell.header.step for cell in cells))
        first, last = piece.start * stride, (piece.start + piece.tokens - 1) * stride
        for i, (cell, step_D) in enumerate(zip(cells, steps, strict=True)):
            out_N = self._patterns_N[first + i * width : last + (i + 1) * width]
            self._shape.codec.decode_on_host(cell, memory, step_D, out_N, stride)

    def end(self, tokens: int) -> None:
        """No piece follows: `tokens` are there, the rest is padding."""
        self._states_CE[tokens:].zero_()

    def states(self) -> Tensor:
        """Return the row: bf16 [C, E]."""
        return self._states_CE


class DeviceStates:
    """Memory for the states of one row on a GPU, filled and handed out again and again."""

    def __init__(self, shape: RowShape) -> None:
        self.states_CE = shape.empty_states()
        self.filled = torch.cuda.Event()
        """Passes when the states of the last row are complete."""


class DevicePiece(NamedTuple):
    """A decoded piece on its way to a GPU; tensors lie in `staging`."""

    piece: Piece
    symbols: list[Symbols]
    """One a column."""
    position_N: Tensor
    """int64: where outliers of all columns belong in the flattened row."""
    outlier_N: Tensor
    """bf16: their values."""
    staging: Staging


class DeviceRow:
    """A row on a GPU: its symbols, column by column, until the consumer takes it.

    `begin`, `write` and `end` copy, on a stream of their own. `states` does the arithmetic, a few large
    kernels on the consumer's stream. So beside a step there are only copies, which take nothing from its
    kernels. No method waits for the device, and once the first rows are read nothing is allocated.
    """

    reusable = True
    """The memory may be filled again once `states` has returned."""

    def __init__(self, shape: RowShape, target: DeviceStates, copies: torch.cuda.Stream) -> None:
        """Memory belongs to the stream that is current here, copies run on `copies`."""
        self._shape, self._target, self._copies = shape, target, copies
        header = shape.header(shape.row_tokens)
        payload = torch.empty(header.payload_bytes, dtype=torch.uint8, device="meta")
        self._arrays = {
            name: self._empty(shape.columns, *array.shape, dtype=array.dtype)
            for name, array in Symbols(header=header, payload=payload).arrays(slice(None)).items()
            if name != "base"
        }
        self._positions = _Growing(self._empty(1 << 16, dtype=torch.int64))
        self._outliers = _Growing(self._empty(1 << 16, dtype=torch.bfloat16))
        self._bases = _Growing(self._empty(shape.columns, shape.width, dtype=torch.uint8))
        self._growing = (self._positions, self._outliers, self._bases)
        self._runs: list[_Run] = []
        self._lock = threading.Lock()
        self._tokens = 0
        self._copied, self._used = torch.cuda.Event(), torch.cuda.Event()
        self._used.record(self._current())

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._shape.device)

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._shape.device)

    def begin(self) -> None:
        """Start a new row once the symbols of the last one are used."""
        self._used.wait(self._copies)
        self._runs = []
        for growing in self._growing:
            growing.used = 0

    def write(self, piece: Piece, cells: Sequence[Cell], staging: Staging) -> None:
        """Decode a piece and copy it to its place; its staging learns when it is free again."""
        self.copy(self.decode(piece, cells, staging))

    def decode(self, piece: Piece, cells: Sequence[Cell], staging: Staging) -> DevicePiece:
        """Entropy decode a piece."""
        payload = sum(cell.header.payload_bytes for cell in cells)
        outliers = sum(cell.header.outliers for cell in cells)
        memory = staging.reserve(payload + 10 * outliers)
        symbols, at = [], 0
        for cell in cells:
            symbols.append(self._shape.codec.from_bytes(cell, out=memory[at:]))
            at += cell.header.payload_bytes
        position_N = memory[payload : payload + 8 * outliers].view(torch.int64)
        outlier_N = memory[payload + 8 * outliers : payload + 10 * outliers].view(torch.bfloat16)
        self._gather_outliers(piece, symbols, position_N.numpy(), outlier_N)
        return DevicePiece(piece, symbols, position_N, outlier_N, staging)

    def _gather_outliers(
        self, piece: Piece, symbols: list[Symbols], position_N: np.ndarray, outlier_N: Tensor
    ) -> None:
        """Count the positions of outliers from the beginning of the row instead of their cells."""
        at, width = 0, self._shape.width
        for i, cell in enumerate(symbols):
            if not cell.header.outliers:
                continue
            part = slice(at, at + cell.header.outliers)
            token_N, channel_N = np.divmod(cell.array("position").numpy(), width)
            token_N = token_N.astype(np.int64) + piece.start
            position_N[part] = token_N * (width * len(symbols)) + (i * width + channel_N)
            outlier_N[part] = cell.array("outlier")
            at = part.stop

    def copy(self, decoded: DevicePiece) -> None:
        """Copy a decoded piece to its place."""
        piece = decoded.piece
        steps = tuple(symbols.header.step for symbols in decoded.symbols)
        with torch.cuda.stream(self._copies), self._lock:
            run = _Run(piece.start, piece.start + piece.tokens, steps, self._bases.used)
            self._runs.append(run)
            for i, symbols in enumerate(decoded.symbols):
                for name, array in symbols.arrays(slice(None)).items():
                    if name == "base":
                        self._bases.append(array[None])
                    else:
                        self._arrays[name][i, run.start : run.stop].copy_(array, non_blocking=True)
            self._positions.append(decoded.position_N)
            self._outliers.append(decoded.outlier_N)
        decoded.staging.mark_copied(self._copies)

    def end(self, tokens: int) -> None:
        """No piece follows: `tokens` are there, the rest is padding."""
        self._tokens = tokens
        self._runs = _joined(self._runs)
        self._copied.record(self._copies)

    def states(self) -> Tensor:
        """Make and return the row: bf16 [C, E], complete for what is enqueued from now on."""
        stream, states_CE = self._current(), self._target.states_CE
        self._copied.wait(stream)
        self._target.filled.wait(stream)  # the consumer may have changed its stream
        for growing in self._growing:  # it may have grown on another stream
            growing.memory.record_stream(stream)
        for run in self._runs:
            self._decode(run, states_CE)
        states_CE.view(-1)[self._positions.filled()] = self._outliers.filled()
        states_CE[self._tokens :].zero_()
        self._used.record(stream)
        self._target.filled.record(stream)
        return states_CE

    def _decode(self, run: _Run, states_CE: Tensor) -> None:
        shape, block = self._shape, max(1, DEVICE_BLOCK // states_CE.shape[1])
        step_L1D, states_LCD = shape.channel_steps(run.steps), shape.by_column(states_CE)
        base_L1D = self._bases.memory[run.base : run.base + shape.columns, None]
        for start in range(run.start, run.stop, block):
            tokens = slice(start, min(start + block, run.stop))
            arrays = {name: array[:, tokens] for name, array in self._arrays.items()} | {"base": base_L1D}
            shape.codec.decode_arrays(arrays, step_L1D, states_LCD[:, tokens])


class _Run(NamedTuple):
    """One piece, or neighbours that are decoded together."""

    start: int
    stop: int
    steps: Steps
    base: int
    """Where the first of its columns' bases lies (lossless)."""


def _joined(runs: list[_Run]) -> list[_Run]:
    """Sort, and join neighbours that are decoded alike."""
    joined: list[_Run] = []
    for run in sorted(runs):
        if joined and joined[-1][1:] == (run.start, *run[2:]):
            run = joined.pop()._replace(stop=run.stop)
        joined.append(run)
    return joined


class _Growing:
    """Memory on a device for as many entries as a row turns out to have."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.used = memory, 0

    def append(self, entries: Tensor) -> None:
        """Copy from the host, on the current stream."""
        stop = self.used + len(entries)
        if stop > len(self.memory):
            larger = self.memory.new_empty((2 * stop, *self.memory.shape[1:]))
            larger[: self.used] = self.filled()
            if self.memory.is_cuda:  # it was allocated on another stream, which may reuse it at once
                self.memory.record_stream(torch.cuda.current_stream(self.memory.device))
            self.memory = larger
        self.memory[self.used : stop].copy_(entries, non_blocking=True)
        self.used = stop

    def filled(self) -> Tensor:
        """What was appended; a view."""
        return self.memory[: self.used]
