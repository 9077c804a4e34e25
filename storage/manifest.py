"""The seal of a data set, added up from its commit records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from storage.dataset_spec import Manifest, Plan, SealedShard
from storage.shard_format import ShardRecord
from storage.symbols import ErrorSums


class Totals:
    """What the records of any number of shards add up to: a few numbers a column."""

    def __init__(self, columns: Iterable[str]) -> None:
        self.tokens = self.bytes = 0
        self.column_bytes = dict.fromkeys(columns, 0)
        self.errors = dict.fromkeys(self.column_bytes, ErrorSums())

    def add(self, record: ShardRecord) -> None:
        self.tokens += record.tokens
        self.bytes += record.size
        for column in self.errors:
            self.column_bytes[column] += record.column_bytes[column]
            self.errors[column] += _error_sums(record, column)


def manifest_of(
    records: Iterable[ShardRecord],
    plan: Plan,
    *,
    plan_sha256: str,
    scales_sha256: str | None,
    columns: tuple[str, ...],
) -> Manifest:
    """Sum up the records of all shards, which come in order and are not kept.

    A function of them alone, so that sealing twice writes the same.
    """
    totals, shards = Totals(columns), []
    for record in records:
        totals.add(record)
        shards.append(_sealed(record))
    return Manifest(
        fingerprint=plan.fingerprint,
        plan_sha256=plan_sha256,
        scales_sha256=scales_sha256,
        samples=plan.samples,
        tokens=plan.tokens,
        bytes=totals.bytes,
        relative_error={column: error.relative_error for column, error in totals.errors.items()},
        column_bytes=totals.column_bytes,
        shards=tuple(shards),
    )


def _sealed(record: ShardRecord) -> SealedShard:
    return SealedShard(
        shard=record.shard,
        object=record.object,
        size=record.size,
        sha256=record.sha256,
        tokens=record.tokens,
        record_sha256=hashlib.sha256(record_bytes(record)).hexdigest(),
    )


def total_error(records: Iterable[ShardRecord], column: str) -> ErrorSums:
    """Add up what encoding did to one column of some shards."""
    return sum((_error_sums(record, column) for record in records), ErrorSums())


def _error_sums(record: ShardRecord, column: str) -> ErrorSums:
    a, b, c, d = record.error_sums[column]
    return ErrorSums(squared_error=a, squared_value=b, scaled_squared_error=c, scaled_values=d)


def record_bytes(record: ShardRecord) -> bytes:
    """The commit record as it is stored."""
    return record.model_dump_json().encode()
