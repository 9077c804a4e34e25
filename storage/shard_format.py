"""What a shard looks like inside: rows planned from lengths, the Parquet file, cells in its raw bytes."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import AfterValidator

from dflash_core.configuration import Config, UserError
from storage.cell import Cell, CodecError, imprint, open_cell

FORMAT_VERSION = 1
HEAD_COLUMNS = ("sample_id", "part", "parts", "first_token", "token_ids", "loss_mask")
"""Columns before the data columns; see docs/shard-format.md for their types."""
METADATA_KEY = "dflash"
"""Entry of the Parquet footer: JSON with the data set's spec, its fingerprint, shard and versions."""
SCALES_KEY = "dflash.scales"
"""Footer entry of codecs with scales: base64 of scales.safetensors."""

_BYTE_ARRAY, _INT32 = "bytes", "int32"
_HEAD_TYPES = (_BYTE_ARRAY, _INT32, _INT32, _INT32, _BYTE_ARRAY, _BYTE_ARRAY)
_DATA_PAGE, _PLAIN = 0, 0


class ShardCorrupt(UserError):
    """Bytes of a shard are missing or wrong; the message names shard, rows and the remedy."""


class PlannedRow(NamedTuple):
    """One row of a shard: a sample, or one part of a sample that is longer than a row group may be."""

    sample: int
    """Position of the sample in its shard."""
    part: int
    parts: int
    start: int
    """First token of the part in the sample."""
    stop: int
    row_group: int
    row: int
    """Row inside the row group."""


def plan_rows(lengths: Sequence[int], max_tokens: int, fill_tokens: int) -> list[PlannedRow]:
    """Cut samples into rows and rows into row groups; a pure function of the lengths.

    A row group never holds more than `max_tokens`; it takes a further row only while it holds fewer than
    `fill_tokens`. A part that is not the last holds `max_tokens`, so part p of a sample lies in row group
    (that of part 0) + p.
    """
    rows: list[PlannedRow] = []
    group, held, row = -1, max_tokens, 0
    for sample, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sample {sample} has no tokens")
        parts = -(-length // max_tokens)
        for part in range(parts):
            start, stop = part * max_tokens, min(length, (part + 1) * max_tokens)
            if held >= fill_tokens or held + stop - start > max_tokens:
                group, held, row = group + 1, 0, 0
            rows.append(PlannedRow(sample, part, parts, start, stop, group, row))
            held, row = held + stop - start, row + 1
    return rows


def _known_format(version: int) -> int:
    if version != FORMAT_VERSION:
        raise ValueError(
            f"format version {version}: this version of the software reads and writes {FORMAT_VERSION} alone"
        )
    return version


FormatVersion = Annotated[int, AfterValidator(_known_format)]
"""The version of everything that a data set holds."""


class RowGroupRecord(Config):
    """Where one row group lies in its shard."""

    offset: int
    size: int
    first_row: int
    rows: int
    tokens: int
    chunks: tuple[tuple[int, int, str], ...]
    """(offset in the file, size, first 32 hex digits of sha256) of the head (HEAD_COLUMNS together), then of
    each data column in the order of `ShardRecord.columns`. They lie back to back and fill the row group."""
    imprints: tuple[str, ...]
    """`storage.cell.imprint` of the cells of each data column."""


class ShardRecord(Config):
    """The commit record of one shard: a shard without one does not exist."""

    format_version: FormatVersion = FORMAT_VERSION
    fingerprint: str
    """Fingerprint of the data set."""
    shard: int
    object: str
    """Key of the Parquet object below the data set's root."""
    size: int
    sha256: str
    samples: int
    rows: int
    tokens: int
    supervised: int
    columns: tuple[str, ...]
    """Data columns in stored order."""
    row_groups: tuple[RowGroupRecord, ...]
    relative_error: dict[str, float]
    """Column -> RMS of the error in units of each channel's scale (`ErrorSums.relative_error`)."""
    error_sums: dict[str, tuple[float, float, float, float]]
    """Column -> fields of `ErrorSums` over the shard: add them up to speak of many shards."""
    column_bytes: dict[str, int]
    """Column -> bytes of its cells."""
    scales_sha256: str | None
    """Digest of scales.safetensors as encoded with; None for a codec without scales."""
    versions: dict[str, str]


class RowGroups(Protocol):
    """Row groups by number."""

    def __getitem__(self, number: int, /) -> RowGroupRecord: ...


class ShardLayout(Protocol):
    """What is needed of a commit record to read from its shard."""

    @property
    def shard(self) -> int: ...
    @property
    def object(self) -> str: ...
    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def row_groups(self) -> RowGroups: ...


class RowHead(NamedTuple):
    """The small columns of one row."""

    sample_id: str
    part: int
    parts: int
    first_token: int
    token_ids_T: np.ndarray
    """int32 [T], T tokens of this row."""
    loss_mask_T: np.ndarray
    """bool [T]"""


# Writing.


def shard_schema(columns: Sequence[str]) -> pa.Schema:
    """Arrow schema of a shard with these data columns. No column is nullable, so pages hold values alone."""
    types = {_BYTE_ARRAY: pa.binary(), _INT32: pa.int32()}
    fields = [(name, types[kind]) for name, kind in zip(HEAD_COLUMNS, _HEAD_TYPES, strict=True)]
    fields[0] = ("sample_id", pa.string())
    fields += [(name, pa.binary()) for name in columns]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])


class ShardFile:
    """A Parquet file being written, row group by row group, to an unbuffered local file; hashes as it goes.

    Values are PLAIN, uncompressed (cells are entropy coded already) and without statistics, so that the bytes
    are a function of the rows and `read_cells` finds cells without a footer.
    """

    def __init__(self, file: BinaryIO, columns: Sequence[str], metadata: dict[str, str]) -> None:
        self._sink = _HashingSink(file)
        self._schema = shard_schema(columns)
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._sink, mode="w"),
            self._schema,
            version="2.6",
            compression="NONE",
            use_dictionary=False,
            write_statistics=False,
            data_page_version="1.0",
            data_page_size=1 << 30,
            store_schema=False,
        )
        self._writer.add_key_value_metadata(metadata)

    def write_row_group(self, heads: Sequence[RowHead], cells: dict[str, list[bytes]]) -> tuple[int, int]:
        """Append one row group; returns its (offset, size): its bytes can be read back at once."""
        start = self._sink.position
        arrays: list[Any] = [
            pa.array([head.sample_id for head in heads], pa.string()),
            *(pa.array([head[i] for head in heads], pa.int32()) for i in (1, 2, 3)),
            pa.array([np.asarray(head.token_ids_T, "<i4").tobytes() for head in heads], pa.binary()),
            pa.array([np.asarray(head.loss_mask_T, "u1").tobytes() for head in heads], pa.binary()),
            *(pa.array(column, pa.binary()) for column in cells.values()),
        ]
        table = pa.Table.from_arrays(arrays, schema=self._schema)
        self._writer.write_table(table, row_group_size=len(heads))
        return max(start, 4), self._sink.position - max(start, 4)

    def finish(self) -> tuple[int, str]:
        """Write the footer; returns (size, sha256) of the whole file."""
        self._writer.close()
        return self._sink.position, self._sink.digest.hexdigest()

    def abandon(self) -> None:
        """Write nothing more; idempotent."""
        self._sink.abandoned = True
        with suppress(pa.ArrowException, OSError):
            self._writer.close()


class _HashingSink:
    """What pyarrow writes to: writes through and hashes. Not closed by it.

    pyarrow's writer finishes its file when it is collected, whatever happened: `abandoned` keeps it off ours.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._descriptor = file.fileno()
        self.position = 0
        self.digest = hashlib.sha256()
        self.closed = self.abandoned = False

    def write(self, data: Any) -> int:
        if self.abandoned:
            return 0
        view = memoryview(data).cast("B")
        self.digest.update(view)
        self.position += len(view)
        while len(view):
            view = view[os.write(self._descriptor, view) :]
        return 0

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self.closed = True


def record_row_group(
    data: memoryview, offset: int, first_row: int, rows: int, tokens: int, columns: int
) -> RowGroupRecord:
    """Find the chunks of a row group in its bytes as written, and hash them.

    This reads every page header back: a file that `read_cells` could not read is never committed.
    """
    ends, imprints = [0], []
    for kinds in (_HEAD_TYPES, *[(_BYTE_ARRAY,)] * columns):
        end = ends[-1]
        for kind in kinds:
            values, end = _read_column(data, end, rows, kind)
        if len(ends) > 1:
            imprints.append(imprint(map(open_cell, values)))
        ends.append(end)
    if ends[-1] != len(data):
        raise RuntimeError(
            "the Parquet library wrote row groups in an unknown form: pyarrow's version is not supported"
        )
    chunks = tuple(
        (offset + start, stop - start, digest(data[start:stop])) for start, stop in itertools.pairwise(ends)
    )
    return RowGroupRecord(
        offset=offset,
        size=len(data),
        first_row=first_row,
        rows=rows,
        tokens=tokens,
        chunks=chunks,
        imprints=tuple(imprints),
    )


def digest(data: memoryview | bytes) -> str:
    """First 32 hex digits of sha256."""
    return hashlib.sha256(data).hexdigest()[:32]


# Reading.


def check_chunk(
    record: ShardLayout, row_group: int, chunk: int, data: memoryview | bytes, dataset_uri: str
) -> None:
    """Compare the bytes of `RowGroupRecord.chunks[chunk]` with their digest. Raises ShardCorrupt."""
    group = record.row_groups[row_group]
    if len(data) != group.chunks[chunk][1] or digest(data) != group.chunks[chunk][2]:
        raise _not_committed(record, row_group, chunk, dataset_uri)


def open_cells(
    record: ShardLayout, row_group: int, chunk: int, data: memoryview | bytes, dataset_uri: str
) -> list[Cell]:
    """Read the cells of a data column and compare them with their imprint: views, no copies.

    What is inside of their frames is checked when they are unpacked. Raises ShardCorrupt.
    """
    group = record.row_groups[row_group]
    with suppress(CodecError, ValueError, IndexError, KeyError, TypeError, RecursionError):
        cells = [open_cell(cell) for cell in read_cells(data, group.rows)]
        if imprint(cells) == group.imprints[chunk - 1]:
            return cells
    raise _not_committed(record, row_group, chunk, dataset_uri)


def _not_committed(record: ShardLayout, row_group: int, chunk: int, dataset_uri: str) -> ShardCorrupt:
    group = record.row_groups[row_group]
    column = "ids and tokens" if chunk == 0 else record.columns[chunk - 1]
    rows = f"rows {group.first_row} to {group.first_row + group.rows - 1}"
    return ShardCorrupt(
        f"shard {record.shard} ({record.object}) of {dataset_uri}: {column} of {rows} "
        f"(row group {row_group}) is not what was committed; {mend(dataset_uri)}"
    )


def mend(dataset_uri: str) -> str:
    """The remedy that every error about a corrupt or missing shard ends with."""
    return (
        f"`dflash shards repair {dataset_uri}` drops the bad shards, and the extraction, run again "
        "with the same configuration, writes just those"
    )


def read_head(chunk: memoryview | bytes, rows: int) -> list[RowHead]:
    """Parse the head chunk of a row group (`RowGroupRecord.chunks[0]`) without a footer; arrays are views."""
    view, end = memoryview(chunk), 0
    columns: list[list[Any]] = []
    for kind in _HEAD_TYPES:
        values, end = _read_column(view, end, rows, kind)
        columns.append(values)
    return [
        RowHead(
            str(name, "utf-8"),
            part,
            parts,
            first,
            np.frombuffer(tokens, "<i4"),
            np.frombuffer(mask, np.bool_),
        )
        for name, part, parts, first, tokens, mask in zip(*columns, strict=True)
    ]


def read_cells(chunk: memoryview | bytes, rows: int) -> list[memoryview]:
    """Return the cells of one data column of a row group from its raw chunk bytes: views, no copies."""
    return _read_column(memoryview(chunk), 0, rows, _BYTE_ARRAY)[0]


def _read_column(view: memoryview, position: int, rows: int, kind: str) -> tuple[list[Any], int]:
    """Read the pages of one column chunk from `position` until `rows` values are found; (values, end).

    Source: the Parquet format's PageHeader (Thrift compact protocol) and PLAIN encoding.
    Raises ValueError for anything but version 1 data pages of PLAIN values.
    """
    values: list[Any] = []
    while len(values) < rows:
        size, count, position = _read_page_header(view, position)
        end = position + size
        if size < 0 or end > len(view):
            raise ValueError("a page does not end in its chunk")
        if kind == _INT32:
            values.extend(np.frombuffer(view[position:end], "<i4").tolist())
        else:
            for _ in range(count):
                start = position + 4
                position = start + int.from_bytes(view[position:start], "little")
                if position > end:
                    break
                values.append(view[start:position])
            if position != end:
                raise ValueError("a page does not end where its values end")
        position = end
    return values, position


_VARINT = rb"([\x80-\xff]*[\x00-\x7f])"
_USUAL_PAGE_HEADER = re.compile(
    rb"\x15\x00\x15%b\x15%b\x2c\x15%b\x15\x00\x15\x06\x15\x06(?:\x1c\x00)?\x00\x00" % ((_VARINT,) * 3),
    re.DOTALL,
)
"""A data page of PLAIN values as pyarrow writes it: sizes before and after compression, values."""


def _read_page_header(view: memoryview, position: int) -> tuple[int, int, int]:
    """Return a page's bytes, its values, and where it begins. Raises ValueError as `_read_column`."""
    if (usual := _USUAL_PAGE_HEADER.match(view, position)) is not None:
        size, count = (_read_integer(memoryview(usual[i]), 0)[0] for i in (2, 3))
        return size, count, usual.end()
    header, position = _read_struct(view, position)
    page = header.get(5)
    if header.get(1) != _DATA_PAGE or not isinstance(page, dict) or page.get(2) != _PLAIN:
        raise ValueError("not a version 1 data page of PLAIN values")
    return header[3], page[1], position


def _read_struct(view: memoryview, position: int) -> tuple[dict[int, Any], int]:
    """Read a Thrift compact struct into {field id: value}."""
    fields: dict[int, Any] = {}
    number = 0
    while view[position]:
        kind, delta = view[position] & 15, view[position] >> 4
        position += 1
        if delta:
            number += delta
        else:
            number, position = _read_integer(view, position)
        if kind in (1, 2):
            fields[number] = kind == 1
        elif kind in (4, 5, 6):
            fields[number], position = _read_integer(view, position)
        elif kind == 8:
            size, position = _read_varint(view, position)
            position += size
        elif kind == 12:
            fields[number], position = _read_struct(view, position)
        else:
            raise ValueError(f"a page header with a field of Thrift type {kind}")
    return fields, position + 1


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position


def _read_integer(view: memoryview, position: int) -> tuple[int, int]:
    value, position = _read_varint(view, position)
    return (value >> 1) ^ -(value & 1), position
