"""The seal of a data set, added up from its commit records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from storage.codec import ErrorSums
from storage.dataset_spec import Manifest, Plan, SealedShard
from storage.shard_format import ShardRecord


def manifest_of(
    records: Mapping[int, ShardRecord],
    plan: Plan,
    *,
    plan_sha256: str,
    scales_sha256: str | None,
    columns: tuple[str, ...],
) -> Manifest:
    """Sum up the records of all shards; a function of them alone, so that sealing twice writes the same."""
    return Manifest(
        fingerprint=plan.fingerprint,
        plan_sha256=plan_sha256,
        scales_sha256=scales_sha256,
        samples=plan.samples,
        tokens=plan.tokens,
        bytes=sum(record.size for record in records.values()),
        relative_error={c: total_error(records.values(), c).relative_error for c in columns},
        column_bytes={c: sum(record.column_bytes[c] for record in records.values()) for c in columns},
        shards=tuple(
            SealedShard(
                shard=shard,
                object=record.object,
                size=record.size,
                sha256=record.sha256,
                tokens=record.tokens,
                record_sha256=hashlib.sha256(record_bytes(record)).hexdigest(),
            )
            for shard, record in sorted(records.items())
        ),
    )


def total_error(records: Iterable[ShardRecord], column: str) -> ErrorSums:
    """Add up what encoding did to one column of some shards."""
    total = ErrorSums()
    for record in records:
        a, b, c, d = record.error_sums[column]
        total += ErrorSums(squared_error=a, squared_value=b, scaled_squared_error=c, scaled_values=d)
    return total


def record_bytes(record: ShardRecord) -> bytes:
    """The commit record as it is stored."""
    return record.model_dump_json().encode()
