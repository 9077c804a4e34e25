"""What is asked of all commit records needs the memory of a few of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.shards_cli import app
from storage.dataset import Dataset, ShardCorrupt, ShardRecord, open_dataset, total_error
from storage.dataset_spec import shard_key
from storage.fetch import CompactRecord, GroupFetcher, GroupKey
from storage.shard_format import RowGroupRecord
from tests.memory import peak_of, size_of
from tests.storage.made import WIDTH, made_dataset, made_samples, made_spec

SHARDS, ROW_GROUPS = 150, 60


def hollow_record(dataset: Dataset, shard: int) -> ShardRecord:
    """A record with many row groups, of an object that holds its own name alone."""
    planned, columns = dataset.plan.shards[shard], dataset.columns
    digests = [sha256(f"{shard} {n}".encode()).hexdigest()[:32] for n in range(7 * planned.row_groups)]
    groups = (
        RowGroupRecord(
            offset=100 * n,
            size=100,
            first_row=n,
            rows=1,
            tokens=1,
            chunks=tuple((100 * n + 25 * i, 25, digests[7 * n + i]) for i in range(4)),
            imprints=tuple(digests[7 * n + 4 : 7 * n + 7]),
        )
        for n in range(planned.row_groups)
    )
    content = sha256(str(shard).encode()).hexdigest()
    return ShardRecord(
        fingerprint=dataset.fingerprint,
        shard=shard,
        object=shard_key(shard, content),
        size=len(shard_key(shard, content)),
        sha256=content,
        samples=planned.samples,
        rows=planned.rows,
        tokens=planned.tokens,
        supervised=planned.supervised,
        columns=columns,
        row_groups=tuple(groups),
        relative_error=dict.fromkeys(columns, 0.1),
        error_sums=dict.fromkeys(columns, (shard / 7, 3.0, shard / 3, 60.0)),
        column_bytes=dict.fromkeys(columns, 1000 + shard),
        scales_sha256=None,
        versions={},
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Shards of one sample, each token a row group."""
    one_token = WIDTH * 3 * 2
    spec = made_spec("lossless", shard_tokens=1, row_group_bytes=one_token, row_group_fill_bytes=one_token)
    samples = [s for s in made_samples(4 * SHARDS, 2 * ROW_GROUPS) if s.num_tokens >= ROW_GROUPS][:SHARDS]
    made = made_dataset(tmp_path_factory.mktemp("many"), spec, samples)
    for planned in made.plan.shards:
        record = hollow_record(made, planned.shard)
        made.store.put_bytes(record.object, record.object.encode())
        made.commit(record)
    assert len(made.plan.shards) == SHARDS
    return made


def random_digest() -> str:
    return os.urandom(16).hex()


HOLLOW = {
    "fingerprint": "f",
    "shard": 3,
    "object": "shards/00003-0123456789abcdef.parquet",
    "size": 6 << 30,
    "sha256": "s",
    "samples": 4000,
    "rows": 4000,
    "tokens": 65_500,
    "supervised": 30_000,
    "relative_error": {},
    "error_sums": {},
    "column_bytes": {},
    "scales_sha256": None,
    "versions": {},
}


def call(*arguments: str) -> Any:
    return json.loads(CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).stdout)


QUESTIONS: dict[str, Callable[[str], Any]] = {
    "records": lambda uri: open_dataset(uri).records(),
    "seal": lambda uri: open_dataset(uri).seal(),
    "list": lambda uri: call("list", uri),
    "show": lambda uri: call("show", uri),
    "verify": lambda uri: call("verify", uri, "--look", "sizes"),
}


def ask(question: str, uri: str) -> Any:
    return QUESTIONS[question](uri)


@pytest.mark.parametrize("question", ["seal", "list", "show", "verify"])
def test_memory_is_that_of_a_few_records(question: str, dataset: Dataset) -> None:
    assert peak_of(ask, question, dataset.uri) < peak_of(ask, "records", dataset.uri) / 2


def fetch(uri: str) -> GroupFetcher:
    """Ask for one row group of every shard; records stay for the row groups that may follow."""
    dataset = open_dataset(uri)
    keys = [GroupKey(shard, 0) for shard in range(SHARDS)]
    fetcher = GroupFetcher(dataset, dataset.columns, iter(keys), threads=2, limit_bytes=1)
    for key in keys:
        fetched = fetcher.take(must=True)
        assert fetched is not None and isinstance(fetched.exception(), ShardCorrupt)  # a hollow object
        fetcher.release(key)
    return fetcher


def test_fetching_keeps_little_of_each_record(dataset: Dataset) -> None:
    assert size_of(fetch, dataset.uri) < size_of(ask, "records", dataset.uri) / 3


def whole_record(text: str) -> ShardRecord:
    return ShardRecord.model_validate_json(text)


def compact_record(text: str) -> CompactRecord:
    record = whole_record(text)
    return CompactRecord(record, record.columns)


def test_a_compact_record_is_small_and_says_the_same() -> None:
    """At real sizes: a hundred row groups of seven layers."""
    columns = tuple(f"layer_{n:03d}" for n in range(7))
    groups = [
        {
            "offset": n << 26,
            "size": 60_000_000 + n,
            "first_row": 40 * n,
            "rows": 40,
            "tokens": 655,
            "chunks": [((n << 26) + (i << 23), 8_000_000 + i, random_digest()) for i in range(8)],
            "imprints": [random_digest() for _ in columns],
        }
        for n in range(100)
    ]
    text = json.dumps({**HOLLOW, "columns": columns, "row_groups": groups})
    record, compact = whole_record(text), compact_record(text)
    whole, kept = size_of(whole_record, text), size_of(compact_record, text)
    assert kept < 50_000 and kept < whole / 3
    assert [compact.row_groups[n] for n in range(100)] == list(record.row_groups)
    assert (compact.shard, compact.object, compact.columns) == (record.shard, record.object, record.columns)


def test_a_record_of_uneven_row_groups_is_refused(dataset: Dataset) -> None:
    groups = dataset.record(0).row_groups
    for uneven in ({"imprints": groups[0].imprints[1:]}, {"imprints": ("no digest",) * 3}):
        record = dataset.record(0).model_copy(
            update={"row_groups": (groups[0].model_copy(update=uneven), *groups[1:])}
        )
        with pytest.raises(ValueError):
            CompactRecord(record, dataset.columns)


def test_the_seal_is_the_sum_of_all_records(dataset: Dataset) -> None:
    manifest, records = dataset.seal(), dataset.records()
    assert [(s.shard, s.object, s.tokens) for s in manifest.shards] == [
        (shard, record.object, record.tokens) for shard, record in records.items()
    ]
    assert manifest.bytes == sum(record.size for record in records.values())
    for column in dataset.columns:
        assert manifest.column_bytes[column] == sum(r.column_bytes[column] for r in records.values())
        assert manifest.relative_error[column] == total_error(records.values(), column).relative_error
    verdict = call("verify", dataset.uri, "--look", "sizes")
    assert verdict["good"] == SHARDS and verdict["sealed"] and verdict["orphans"] == []
