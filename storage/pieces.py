"""Packed rows as pieces: what a row group holds of a sample, and how it is decoded."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dflash_core.configuration import UserError
from storage.cell import Cell, CodecError
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
    """Host memory for what one thread has decoded and not passed on yet."""

    def __init__(self, size: int = 0, *, pinned: bool) -> None:
        """`size`: bytes that are taken at least; one that is known beforehand saves growing later."""
        self._memory, self._size, self._pinned = torch.empty(0, dtype=torch.uint8), size, pinned
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


class PieceSink(Protocol):
    """Where pieces go: a row that is being filled. Threads may write different pieces at a time."""

    def write(self, piece: Piece, cells: Sequence[Cell], staging: Staging) -> None:
        """Decode one cell a column into the piece's place. Raises CodecError."""


class DecodedPiece(NamedTuple):
    """What the row must know of a piece beside its states."""

    piece: Piece
    token_ids_T: np.ndarray
    loss_mask_T: np.ndarray


class PieceDecoder:
    """Checks pieces and decodes them on threads."""

    def __init__(
        self,
        dataset: Dataset,
        columns: Sequence[str],
        device: torch.device,
        threads: int,
        stagings: Sequence[Staging],
    ) -> None:
        self._dataset, self._columns = dataset, tuple(columns)
        self._width = dataset.spec.target.hidden_size
        self._stagings: queue.SimpleQueue[Staging] = queue.SimpleQueue()
        for staging in stagings:
            self._stagings.put(staging)
        threads = min(threads, len(os.sched_getaffinity(0)))  # more would only wait for each other
        self._pool = ThreadPoolExecutor(threads, "cell-decoder", initializer=use_device, initargs=(device,))

    def start(self, piece: Piece, fetched: Future[RowGroup], sink: PieceSink) -> Future[DecodedPiece]:
        """Decode on a thread once the row group is there.

        The future raises ShardCorrupt, naming shard and row, for anything but the planned and whole row.
        """
        return self._pool.submit(self._decode, piece, fetched, sink)

    def close(self) -> None:
        """Stop the threads; idempotent."""
        self._pool.shutdown(cancel_futures=True)

    def _decode(self, piece: Piece, fetched: Future[RowGroup], sink: PieceSink) -> DecodedPiece:
        group = fetched.result()
        record, row, uri = group.record, group.first_row + piece.row_in_group, self._dataset.uri
        where = f"shard {record.shard} ({record.object}) of {uri}, row {row}"
        head = group.heads[piece.row_in_group]
        name = self._dataset.index.sample_ids[piece.sample].as_py()
        found = (head.sample_id, head.first_token, len(head.token_ids_T), len(head.loss_mask_T))
        if found != (name, piece.first_token, piece.tokens, piece.tokens):
            raise ShardCorrupt(f"{where} is not sample {name!r}, as planned; {mend(uri)}")
        staging = self._stagings.get()
        try:
            cells = [group.cells[column][piece.row_in_group] for column in self._columns]
            if any((cell.header.tokens, cell.header.width) != (piece.tokens, self._width) for cell in cells):
                raise CodecError("a cell has another shape than its row")
            sink.write(piece, cells, staging)
        except CodecError as error:
            raise ShardCorrupt(f"{where}: {error}; {mend(uri)}") from error
        finally:
            self._stagings.put(staging)
        # Copies: the row group's bytes must not live as long as the row.
        return DecodedPiece(piece, head.token_ids_T.copy(), head.loss_mask_T.copy())


def use_device(device: torch.device) -> None:
    """Make a thread's CUDA calls (page-locking included) go to this GPU, not to the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
