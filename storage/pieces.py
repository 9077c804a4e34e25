"""Packed rows as pieces: what a row group holds of a sample, and how it is decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

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


class Staging:
    """Host memory for the symbols of one piece at a time."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        """`size`: bytes that pieces without outliers need at most."""
        self._memory, self._size, self._pinned = torch.empty(0, dtype=torch.uint8), size + size // 64, pinned
        # Blocking: a thread that waits for a copy must not keep a core busy.
        self._copied = torch.cuda.Event(blocking=True) if pinned else None

    def reserve(self, size: int) -> Tensor:
        """Wait until the last copy is done, and return at least `size` bytes."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._memory.numel() < size:
            self._size = max(self._size, size + size // 4)
            self._memory = torch.empty(self._size, dtype=torch.uint8, pin_memory=self._pinned)
        return self._memory

    def mark_copied(self, stream: torch.cuda.Stream) -> None:
        """Say that what has been enqueued so far includes the copy to the device."""
        assert self._copied is not None
        self._copied.record(stream)


@dataclass(frozen=True, slots=True, eq=False)
class DecodedPiece:
    """A piece after entropy decoding; tensors lie in `staging`."""

    piece: Piece
    token_ids_T: np.ndarray
    loss_mask_T: np.ndarray
    symbols: list[Symbols]
    """One a column."""
    position_N: Tensor
    """int64: where outliers of all columns belong in the flattened row."""
    outlier_N: Tensor
    """bf16: their values."""
    staging: Staging


class PieceDecoder:
    """Checks and entropy decodes pieces on threads."""

    def __init__(self, dataset: Dataset, columns: Sequence[str], device: torch.device, threads: int) -> None:
        """Raises UserError when a column is not stored."""
        absent = [column for column in columns if column not in dataset.columns]
        if absent or not columns:
            raise UserError(
                f"{dataset.uri} does not hold {', '.join(absent) or 'no columns at all'}; it has "
                f"{', '.join(dataset.columns)}: extract again with these taps, or train on those"
            )
        self._dataset, self._columns = dataset, tuple(columns)
        self._codec = parse_codec(dataset.spec.codec)
        self._width = dataset.spec.target.hidden_size
        self._pool = ThreadPoolExecutor(threads, "cell-decoder", initializer=use_device, initargs=(device,))

    def start(self, piece: Piece, fetched: Future[RowGroup], staging: Staging) -> Future[DecodedPiece]:
        """Entropy decode on a thread once the row group is there.

        The future raises ShardCorrupt, naming shard and row, for anything but the planned and whole row.
        """
        return self._pool.submit(self._decode, piece, fetched, staging)

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
            symbols, position_N, outlier_N = self._entropy_decode(piece, cells, staging)
        except CodecError as error:
            raise ShardCorrupt(f"{where}: {error}; {mend(uri)}") from error
        # Copies: the row group's bytes must not live as long as the row.
        tokens_T, mask_T = head.token_ids_T.copy(), head.loss_mask_T.copy()
        return DecodedPiece(piece, tokens_T, mask_T, symbols, position_N, outlier_N, staging)

    def _entropy_decode(
        self, piece: Piece, cells: list[memoryview], staging: Staging
    ) -> tuple[list[Symbols], Tensor, Tensor]:
        headers = [read_header(cell) for cell in cells]
        if any((header.tokens, header.width) != (piece.tokens, self._width) for header in headers):
            raise CodecError("a cell has another shape than its row")
        payload = sum(header.payload_bytes for header in headers)
        outliers = sum(header.outliers for header in headers)
        memory = staging.reserve(payload + 10 * outliers)
        symbols, at = [], 0
        for cell, header in zip(cells, headers, strict=True):
            symbols.append(self._codec.from_bytes(cell, out=memory[at:]))
            at += header.payload_bytes
        position_N = memory[payload : payload + 8 * outliers].view(torch.int64)
        outlier_N = memory[payload + 8 * outliers : payload + 10 * outliers].view(torch.bfloat16)
        self._gather_outliers(piece, symbols, position_N.numpy(), outlier_N)
        return symbols, position_N, outlier_N

    def _gather_outliers(
        self, piece: Piece, symbols: list[Symbols], position_N: np.ndarray, outlier_N: Tensor
    ) -> None:
        """Count the positions of outliers from the beginning of the row [C, L * D] instead of their cells."""
        at, row_width = 0, self._width * len(symbols)
        for i, cell in enumerate(symbols):
            if not cell.header.outliers:
                continue
            part = slice(at, at + cell.header.outliers)
            token_N, channel_N = np.divmod(cell.array("position").numpy(), self._width)
            token_N = token_N.astype(np.int64) + piece.start
            position_N[part] = token_N * row_width + (i * self._width + channel_N)
            outlier_N[part] = cell.array("outlier")
            at = part.stop


def use_device(device: torch.device) -> None:
    """Make a thread's CUDA calls (page-locking included) go to this GPU, not to the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
