"""Packed rows being filled: states on the host, or symbols on a GPU that become states when a row is used.

Letters: C positions of a row, T tokens of a piece, L columns, D width of a column, E = L * D, N outliers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_core import quantise
from storage.cell import CellHeader
from storage.codec import Codec, CodecError, Symbols
from storage.pieces import DecodedPiece

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
        given = [scale_D.to(device) for scale_D in scales if scale_D is not None]
        if codec.needs_scales and [tuple(scale_D.shape) for scale_D in given] != [(width,)] * len(scales):
            raise CodecError(f"codec {codec.name} needs scales of {width} channels for each column")
        self.codec, self.row_tokens, self.width, self.columns = codec, row_tokens, width, len(scales)
        self.device, self._scales = device, given
        self._steps: dict[Steps, Tensor] = {}

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

    def steps_of(self, decoded: DecodedPiece) -> Steps:
        """Quantisation step of each column of a piece."""
        return tuple(symbols.header.step for symbols in decoded.symbols)

    def channel_steps(self, steps: Steps) -> Tensor | None:
        """Quantisation step of each channel, float32 [L, 1, D]; kept: nearly all pieces have the same."""
        if not self.codec.needs_scales:
            return None
        if steps not in self._steps:
            scaled = [scale_D * step for scale_D, step in zip(self._scales, steps, strict=True)]
            self._steps[steps] = torch.stack(scaled).unsqueeze(1)
        return self._steps[steps]


class HostRow:
    """A row on the host: the states themselves."""

    reusable = False
    """The consumer uses the memory until it asks for the next row."""

    def __init__(self, shape: RowShape) -> None:
        self._shape, self._states_CE = shape, shape.empty_states()

    def begin(self) -> None:
        """Start a new row."""

    def write(self, decoded: DecodedPiece) -> None:
        """Put a piece in its place."""
        piece, codec = decoded.piece, self._shape.codec
        step_L1D = self._shape.channel_steps(self._shape.steps_of(decoded))
        states_LTD = self._shape.by_column(self._states_CE[piece.start : piece.start + piece.tokens])
        for i, symbols in enumerate(decoded.symbols):
            step_1D = None if step_L1D is None else step_L1D[i]
            for rows in quantise.row_blocks(states_LTD[i]):
                codec.decode_arrays(symbols.arrays(rows), step_1D, states_LTD[i, rows])
        self._states_CE.view(-1)[decoded.position_N] = decoded.outlier_N

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


class DeviceRow:
    """A row on a GPU: its symbols, column by column, until the consumer takes it.

    `begin`, `write` and `end` copy, on their caller's stream. `states` does the arithmetic, a few large
    kernels on the consumer's stream. So beside a step there are only copies, which take nothing from its
    kernels. No method waits for the device, and once the first rows are read nothing is allocated.
    """

    reusable = True
    """The memory may be filled again once `states` has returned."""

    def __init__(self, shape: RowShape, target: DeviceStates) -> None:
        """Memory belongs to the stream that is current here."""
        self._shape, self._target = shape, target
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
        self._tokens = 0
        self._copied, self._used = torch.cuda.Event(), torch.cuda.Event()
        self._used.record(self._stream())

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._shape.device)

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._shape.device)

    def begin(self) -> None:
        """Start a new row once the symbols of the last one are used."""
        self._used.wait(self._stream())
        self._runs = []
        for growing in self._growing:
            growing.used = 0

    def write(self, decoded: DecodedPiece) -> None:
        """Copy a piece to its place; its staging learns when it is free again."""
        start, stop = decoded.piece.start, decoded.piece.start + decoded.piece.tokens
        run = _Run(start, stop, self._shape.steps_of(decoded), self._bases.used)
        for i, symbols in enumerate(decoded.symbols):
            for name, array in symbols.arrays(slice(None)).items():
                if name == "base":
                    self._bases.append(array[None])
                else:
                    self._arrays[name][i, start:stop].copy_(array, non_blocking=True)
        self._positions.append(decoded.position_N)
        self._outliers.append(decoded.outlier_N)
        decoded.staging.mark_copied(self._stream())
        if self._runs and self._runs[-1].steps == run.steps and run.base == self._bases.used:
            self._runs[-1].stop = stop
        else:
            self._runs.append(run)

    def end(self, tokens: int) -> None:
        """No piece follows: `tokens` are there, the rest is padding."""
        self._tokens = tokens
        self._copied.record(self._stream())

    def states(self) -> Tensor:
        """Make and return the row: bf16 [C, E], complete for what is enqueued from now on."""
        stream, states_CE = self._stream(), self._target.states_CE
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


@dataclass(slots=True)
class _Run:
    """Neighbouring pieces that are decoded together."""

    start: int
    stop: int
    steps: Steps
    base: int
    """Where the first of its columns' bases lies (lossless)."""


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
            self.memory = larger
        self.memory[self.used : stop].copy_(entries, non_blocking=True)
        self.used = stop

    def filled(self) -> Tensor:
        """What was appended; a view."""
        return self.memory[: self.used]
