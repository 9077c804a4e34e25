"""What a shard looks like inside: Arrow schema, rows and row groups planned from lengths, cells found in raw bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dflash_core.configuration import Config

FORMAT_VERSION = 1


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

    A row group never holds more than `max_tokens`; it takes further rows only while it holds fewer than
    `fill_tokens`. Part p of a sample lies in row group (that of part 0) + p.
    """
    raise NotImplementedError


class RowGroupRecord(Config):
    """Where one row group lies in its shard."""

    offset: int
    size: int
    rows: int
    tokens: int
    chunks: tuple[tuple[int, int, str], ...]
    """(offset in the file, size, first 32 hex digits of sha256) of the head (all columns before the first layer:
    ids, tokens, mask), then of each data column in the order of `ShardRecord.columns`. They lie back to back."""


class ShardRecord(Config):
    """The commit record of one shard: a shard without one does not exist."""

    format_version: int = FORMAT_VERSION
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
    columns: tuple[str, ...]
    """Data columns in stored order."""
    row_groups: tuple[RowGroupRecord, ...]
    relative_error: dict[str, float]
    """Column -> sqrt(sum of squared errors / sum of squares) over the shard."""
    column_bytes: dict[str, int]
    """Column -> bytes of its cells."""
    scales_sha256: str | None
    versions: dict[str, str]


class RowHead(NamedTuple):
    """The small columns of one row, read from a head chunk."""

    sample_id: str
    part: int
    parts: int
    start: int
    token_ids_T: object
    """numpy int32 [T]"""
    loss_mask_T: object
    """numpy bool [T]"""


def read_head(chunk: memoryview | bytes, rows: int) -> list[RowHead]:
    """Parse the head chunk of a row group (see `RowGroupRecord.chunks[0]`) without a Parquet footer; arrays are views."""
    raise NotImplementedError


def read_cells(chunk: memoryview | bytes, rows: int) -> list[memoryview]:
    """Return the cells of one data column of a row group from its raw chunk bytes: views, nothing is copied."""
    raise NotImplementedError


def check_chunk(record: ShardRecord, row_group: int, chunk: int, data: memoryview | bytes) -> None:
    """Raise ShardCorrupt (naming shard, row group, column and the command that repairs) unless the digest fits."""
    raise NotImplementedError
