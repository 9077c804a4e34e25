"""What is asked of all commit records needs the memory of a few of them."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.shards_cli import app
from storage.dataset import Dataset, ShardRecord, total_error
from storage.dataset_spec import shard_key
from storage.shard_format import RowGroupRecord
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


def peak_of(work: Callable[[], Any]) -> int:
    """Bytes that `work` held at most."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def call(*arguments: str) -> Any:
    return json.loads(CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).stdout)


@pytest.mark.parametrize("question", ["seal", "list", "show", "verify"])
def test_memory_is_that_of_a_few_records(question: str, dataset: Dataset) -> None:
    questions: dict[str, Callable[[], Any]] = {
        "seal": dataset.seal,
        "list": lambda: call("list", dataset.uri),
        "show": lambda: call("show", dataset.uri),
        "verify": lambda: call("verify", dataset.uri, "--look", "sizes"),
    }
    questions[question]()  # what is imported and kept the first time
    assert peak_of(questions[question]) < peak_of(dataset.records) / 2


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
