"""Packed rows as pieces: what a row group holds of a sample, and how a piece becomes states on a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dflash_core.configuration import UserError
from storage.cell import read_header
from storage.codec import CodecError, Symbols, parse_codec
from storage.dataset import Dataset
from storage.fetch import GroupKey, RowGroup
from storage.shard_format import ShardCorrupt, mend


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The part of a sample that lies in one row group."""

    sample: int
    """Number in the index."""
    key: GroupKey
    row_in_group: int
    first_token: int
    """Of the sample."""
    tokens: int
    start: int
    """Its first position in the packed row."""
    last: bool
    """Whether the sample ends with it."""


class RowEnd:
    """Stands behind the pieces of each row."""


def pieces_of(
    dataset: Dataset, rows: Sequence[np.ndarray | None], row_tokens: int
) -> Iterator[Piece | RowEnd]:
    """Yield what the rows consist of, in order. Raises UserError for a row whose samples do not fit."""
    index, longest = dataset.index, dataset.spec.row_group_tokens
    for number, samples in enumerate(rows):
        start = 0
        for sample in [] if samples is None else samples.tolist():
            tokens, parts = int(index.tokens_N[sample]), int(index.parts_N[sample])
            if start + tokens > row_tokens:
                raise UserError(
                    f"the samples of row {number} do not fit in its {row_tokens} tokens: plan the rows of an "
                    "epoch with the row_tokens of the reader"
                )
            for part in range(parts):
                first = part * longest
                yield Piece(
                    sample=sample,
                    key=GroupKey(int(index.shard_N[sample]), int(index.row_group_N[sample]) + part),
                    row_in_group=0 if part else int(index.row_N[sample]),
                    first_token=first,
                    tokens=min(longest, tokens - first),
                    start=start + first,
                    last=part + 1 == parts,
                )
            start += tokens
        yield RowEnd()


@dataclass(slots=True, eq=False)
class Staging:
    """Host memory for the symbols of one piece at a time."""

    pinned: bool
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    copied: torch.cuda.Event | None = None
    """Passes when the device has the symbols."""

    def reserve(self, size: int) -> Tensor:
        """Wait until the last copy is done, and return at least `size` bytes."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.memory.numel() < size:
            self.memory = torch.empty(size + size // 4, dtype=torch.uint8, pin_memory=self.pinned)
        return self.memory


@dataclass(frozen=True, slots=True, eq=False)
class DecodedPiece:
    """A piece after entropy decoding."""

    piece: Piece
    token_ids_T: np.ndarray
    loss_mask_T: np.ndarray
    symbols: list[Symbols]
    """One a column, one behind the other in `staging`."""
    staging: Staging


class PieceDecoder:
    """Decodes pieces on threads, and finishes them on the caller's device and stream."""

    def __init__(self, dataset: Dataset, columns: Sequence[str], device: torch.device, threads: int) -> None:
        """Raises UserError when a column is not stored, or the scales are missing."""
        absent = [column for column in columns if column not in dataset.columns]
        if absent or not columns:
            raise UserError(
                f"{dataset.uri} does not hold {', '.join(absent) or 'no columns at all'}; it has "
                f"{', '.join(dataset.columns)}: extract again with these taps, or train on those"
            )
        self._dataset, self._columns, self._device = dataset, tuple(columns), device
        self._codec = parse_codec(dataset.spec.codec)
        self._width = dataset.spec.target.hidden_size
        scales = dataset.scales() if self._codec.needs_scales else {}
        if scales is None:
            raise UserError(f"{dataset.uri} has no scales: its extraction has not begun")
        self._scales = {c: scales[c].to(device) if c in scales else None for c in columns}
        self._pool = ThreadPoolExecutor(threads, "cell-decoder", initializer=use_device, initargs=(device,))

    def start(self, piece: Piece, fetched: Future[RowGroup], staging: Staging) -> Future[DecodedPiece]:
        """Entropy decode on a thread once the row group is there.

        The future raises ShardCorrupt, naming shard and row, for anything but the planned and whole row.
        """
        return self._pool.submit(self._decode, piece, fetched, staging)

    def write(self, decoded: DecodedPiece, row_CE: Tensor) -> None:
        """Put the states into their place in a row, on the current stream, without waiting."""
        piece = decoded.piece
        out_TE = row_CE[piece.start : piece.start + piece.tokens]
        if self._device.type == "cpu":
            self._dequantise(decoded.symbols, out_TE)
            return
        sizes = [symbols.header.payload_bytes for symbols in decoded.symbols]
        payload = decoded.staging.memory[: sum(sizes)].to(self._device, non_blocking=True)
        decoded.staging.copied = torch.cuda.current_stream(self._device).record_event()
        headers = [symbols.header for symbols in decoded.symbols]
        parts = zip(headers, payload.split(sizes), strict=True)
        self._dequantise([Symbols(header=header, payload=part) for header, part in parts], out_TE)

    def close(self) -> None:
        """Stop the threads; idempotent."""
        self._pool.shutdown(cancel_futures=True)

    def _decode(self, piece: Piece, fetched: Future[RowGroup], staging: Staging) -> DecodedPiece:
        group = fetched.result()
        record, row, uri = group.record, group.first_row + piece.row_in_group, self._dataset.uri
        where = f"shard {record.shard} ({record.object}) of {uri}, row {row}"
        head = group.heads[piece.row_in_group]
        name = self._dataset.index.sample_ids[piece.sample].as_py()
        found = (head.sample_id, head.first_token, len(head.token_ids_T), len(head.loss_mask_T))
        if found != (name, piece.first_token, piece.tokens, piece.tokens):
            raise ShardCorrupt(f"{where} is not sample {name!r}, as planned; {mend(uri)}")
        cells = [group.cells[column][piece.row_in_group] for column in self._columns]
        try:
            symbols = self._entropy_decode(piece, cells, staging)
        except CodecError as error:
            raise ShardCorrupt(f"{where}: {error}; {mend(uri)}") from error
        # Copies: the row group's bytes must not live as long as the row.
        return DecodedPiece(piece, head.token_ids_T.copy(), head.loss_mask_T.copy(), symbols, staging)

    def _entropy_decode(self, piece: Piece, cells: list[memoryview], staging: Staging) -> list[Symbols]:
        headers = [read_header(cell) for cell in cells]
        if any((header.tokens, header.width) != (piece.tokens, self._width) for header in headers):
            raise CodecError("a cell has another shape than its row")
        memory = staging.reserve(sum(header.payload_bytes for header in headers))
        symbols, at = [], 0
        for cell, header in zip(cells, headers, strict=True):
            symbols.append(self._codec.from_bytes(cell, out=memory[at:]))
            at += header.payload_bytes
        return symbols

    def _dequantise(self, symbols: list[Symbols], out_TE: Tensor) -> None:
        out_TLD = out_TE.view(len(out_TE), len(self._columns), self._width)
        for i, (column, of_column) in enumerate(zip(self._columns, symbols, strict=True)):
            self._codec.decode_on_device(of_column, self._scales[column], out_TLD[:, i])


def use_device(device: torch.device) -> None:
    """Make a thread's CUDA calls (page-locking included) go to this GPU, not to the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
