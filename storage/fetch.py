"""Fetches row groups ahead of their use: range reads on threads, verified, in a fixed amount of memory."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from storage.cell import Cell
from storage.dataset import Dataset
from storage.objects import ObjectNotFound, ObjectTruncated
from storage.shard_format import (
    RowGroupRecord,
    RowHead,
    ShardCorrupt,
    ShardLayout,
    ShardRecord,
    check_chunk,
    mend,
    open_cells,
    read_head,
)

_RECORDS = 1024
"""Commit records that are kept, compact."""
_WINDOW = 64
"""Uses whose commit records are asked for before their row groups."""


class GroupKey(NamedTuple):
    """One row group of a data set."""

    shard: int
    row_group: int


class CompactRecord:
    """What fetching needs of a commit record, in a sixth of its memory; a `ShardLayout`."""

    def __init__(self, record: ShardRecord, columns: tuple[str, ...]) -> None:
        """`columns` are the record's, as one tuple that all records share.

        Raises ValueError when row groups have different numbers of columns, or a digest is none.
        """
        self.shard, self.object, self.columns = record.shard, record.object, columns
        self.row_groups = _CompactRowGroups(record.row_groups)


class _CompactRowGroups:
    """Row groups of one shard as arrays, each made when it is asked for.

    G: row groups; C: chunks or columns; B: bytes of a digest.
    """

    def __init__(self, groups: Sequence[RowGroupRecord]) -> None:
        self._numbers_G5 = np.array([(g.offset, g.size, g.first_row, g.rows, g.tokens) for g in groups])
        self._chunks_GC2 = np.array([[chunk[:2] for chunk in g.chunks] for g in groups])
        self._digests_GCB = _digests([[chunk[2] for chunk in g.chunks] for g in groups])
        self._imprints_GCB = _digests([g.imprints for g in groups])

    def chunk_places(self, number: int) -> list[tuple[int, int]]:
        """(offset, size) of each chunk of a row group; quicker than its whole record."""
        return [(offset, size) for offset, size in self._chunks_GC2[number].tolist()]

    def __getitem__(self, number: int, /) -> RowGroupRecord:
        offset, size, first_row, rows, tokens = self._numbers_G5[number].tolist()
        chunks = zip(self._chunks_GC2[number].tolist(), _hex(self._digests_GCB[number]), strict=True)
        return RowGroupRecord(
            offset=offset,
            size=size,
            first_row=first_row,
            rows=rows,
            tokens=tokens,
            chunks=tuple((start, length, digest) for (start, length), digest in chunks),
            imprints=tuple(_hex(self._imprints_GCB[number])),
        )


class _Part(NamedTuple):
    """What one fetch needs of a record, made once: a `ShardLayout` of one row group."""

    shard: int
    object: str
    columns: tuple[str, ...]
    row_groups: dict[int, RowGroupRecord]


def _digests(digests_GC: Sequence[Sequence[str]]) -> np.ndarray:
    return np.array([[list(bytes.fromhex(digest)) for digest in row] for row in digests_GC], np.uint8)


def _hex(digests_CB: np.ndarray) -> list[str]:
    return [digest.tobytes().hex() for digest in digests_CB]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowGroup:
    """The rows of a row group, verified but for the contents of frames; cells are views of what was read."""

    record: ShardLayout
    first_row: int
    """Of the shard."""
    heads: list[RowHead]
    cells: dict[str, list[Cell]]
    """Column -> one cell a row."""


@dataclass(slots=True, eq=False)
class _Held:
    future: Future[RowGroup]
    size: int
    uses: int = 0


class GroupFetcher:
    """Takes a sequence of uses, and gives the row group of each in turn, fetched ahead.

    Belongs to one thread, which calls `take` and, when it is done with it, `release`, once a use. Holds at
    most `limit_bytes` (encoded), or a single row group that is larger than that; row groups that are used
    again soon are kept while there is room.
    """

    def __init__(
        self,
        dataset: Dataset,
        columns: Sequence[str],
        uses: Iterator[GroupKey],
        *,
        threads: int,
        limit_bytes: int,
    ) -> None:
        self._dataset, self._columns = dataset, tuple(columns)
        self._chunks = [0, *(dataset.columns.index(column) + 1 for column in columns)]
        self._uses, self._limit, self._used = uses, limit_bytes, 0
        self._window: deque[GroupKey] = deque()
        self._started: deque[GroupKey] = deque()
        self._held: OrderedDict[GroupKey, _Held] = OrderedDict()
        self._records: OrderedDict[int, Future[CompactRecord]] = OrderedDict()
        self._pool = ThreadPoolExecutor(threads, "row-group-fetch")

    def take(self, *, must: bool) -> Future[RowGroup] | None:
        """Return the row group of the next use, and start further fetches.

        None when memory does not allow to start its fetch before something is released; with `must` it is
        fetched all the same.
        """
        self._advance(must=must)
        return self._held[self._started.popleft()].future if self._started else None

    def release(self, key: GroupKey) -> None:
        """End a use: the row group may be dropped, or kept for its next use."""
        self._held[key].uses -= 1
        self._held.move_to_end(key)

    @property
    def held_bytes(self) -> int:
        """Encoded bytes of row groups that are fetched or on their way."""
        return self._used

    def close(self) -> None:
        """Stop the threads; idempotent."""
        self._pool.shutdown(cancel_futures=True)

    def _advance(self, *, must: bool) -> None:
        while self._fill_window() and len(self._started) < _WINDOW:
            key = self._window[0]
            if key not in self._held:
                record = self._record(key.shard).result()
                places = record.row_groups.chunk_places(key.row_group)
                size = sum(places[chunk][1] for chunk in self._chunks)
                if not self._make_room(size) and not (must and not self._started):
                    return
                self._held[key] = _Held(self._pool.submit(self._fetch, record, key.row_group), size)
                self._used += size
            self._held[key].uses += 1
            self._started.append(self._window.popleft())

    def _fill_window(self) -> bool:
        while len(self._window) < _WINDOW and (key := next(self._uses, None)) is not None:
            self._window.append(key)
            self._record(key.shard)
        return bool(self._window)

    def _make_room(self, size: int) -> bool:
        """Drop what is not in use, longest unused first, until `size` bytes fit."""
        for key in [key for key, held in self._held.items() if not held.uses]:
            if self._used + size <= self._limit:
                break
            self._used -= self._held.pop(key).size
        return self._used + size <= self._limit

    def _record(self, shard: int) -> Future[CompactRecord]:
        if shard not in self._records:
            if len(self._records) >= _RECORDS:
                self._records.popitem(last=False)
            self._records[shard] = self._pool.submit(self._read_record, shard)
        self._records.move_to_end(shard)
        return self._records[shard]

    def _runs(self, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """(offset, size) of the reads that cover the wanted chunks: neighbours are read together."""
        runs: list[tuple[int, int]] = []
        for offset, size in sorted(places[chunk] for chunk in self._chunks):
            if runs and runs[-1][0] + runs[-1][1] == offset:
                runs[-1] = (runs[-1][0], runs[-1][1] + size)
            else:
                runs.append((offset, size))
        return runs

    # On the pool's threads.

    def _read_record(self, shard: int) -> CompactRecord:
        record = self._dataset.record(shard)
        try:
            return CompactRecord(record, self._dataset.columns)
        except ValueError as error:
            uri = self._dataset.uri
            raise ShardCorrupt(f"the commit record of shard {shard} of {uri}: {error}; {mend(uri)}") from None

    def _fetch(self, record: CompactRecord, row_group: int) -> RowGroup:
        group, uri = record.row_groups[row_group], self._dataset.uri
        part = _Part(record.shard, record.object, record.columns, {row_group: group})
        chunks: dict[int, memoryview] = {}
        places = [(offset, size) for offset, size, _ in group.chunks]
        for start, size in self._runs(places):
            data = np.empty(size, np.uint8).data
            self._read(record, start, data)
            for chunk in self._chunks:
                offset, length = places[chunk]
                if start <= offset < start + size:
                    chunks[chunk] = data[offset - start : offset - start + length]
        check_chunk(part, row_group, 0, chunks[0], uri)
        return RowGroup(
            record=record,
            first_row=group.first_row,
            heads=read_head(chunks[0], group.rows),
            cells={
                column: open_cells(part, row_group, chunk, chunks[chunk], uri)
                for column, chunk in zip(self._columns, self._chunks[1:], strict=True)
            },
        )

    def _read(self, record: CompactRecord, start: int, data: memoryview) -> None:
        try:
            self._dataset.store.read_into(record.object, start, data)
        except (ObjectNotFound, ObjectTruncated) as error:
            raise ShardCorrupt(
                f"shard {record.shard} of {self._dataset.uri}: {error}; {mend(self._dataset.uri)}"
            ) from None
