"""A shard is written whole or not at all, decodes to what went in, and is the same however it was written."""

from __future__ import annotations

import hashlib
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from dflash_core.configuration import UserError
from dflash_core.records import CapturedSample
from storage.codec import parse_codec
from storage.dataset import Dataset, DatasetError, ShardAlreadyCommitted, create_dataset
from storage.objects import Store, open_store
from storage.shard_format import check_chunk, read_cells, read_head
from storage.writer import ShardWriter, WriterConfig
from tests.storage.made import (
    capture,
    contents,
    made_dataset,
    made_samples,
    made_spec,
    made_states,
    write_missing,
    write_shard,
)


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(
        str(tmp_path / "store") if request.param == "local" else request.getfixturevalue("s3_uri")
    )


def read_back(dataset: Dataset, shard: int) -> dict[str, dict[str, torch.Tensor]]:
    """sample id -> column -> bf16 [T, D], by range reads of single chunks as a reader does them."""
    record, codec, scales = dataset.record(shard), parse_codec(dataset.spec.codec), dataset.scales() or {}
    found: dict[str, dict[str, list[torch.Tensor]]] = {}
    for number, group in enumerate(record.row_groups):
        chunks = [dataset.store.get_range(record.object, offset, size) for offset, size, _ in group.chunks]
        for position, chunk in enumerate(chunks):
            check_chunk(record, number, position, chunk, dataset.uri)
        heads = read_head(chunks[0], group.rows)
        for column, chunk in zip(record.columns, chunks[1:], strict=True):
            for head, cell in zip(heads, read_cells(chunk, group.rows), strict=True):
                states_TD = torch.empty(len(head.token_ids_T), 32, dtype=torch.bfloat16)
                codec.decode_on_device(codec.from_bytes(cell), scales.get(column), states_TD)
                found.setdefault(head.sample_id, {}).setdefault(column, []).append(states_TD)
    return {name: {c: torch.cat(parts) for c, parts in columns.items()} for name, columns in found.items()}


@pytest.mark.parametrize("codec", ["lossless", "tolerance=0.1", "fp8"])
def test_round_trip(root: Store, codec: str, tmp_path: Path) -> None:
    dataset = made_dataset(root, made_spec(codec), made_samples(8, longest=70))
    write_missing(dataset, tmp_path)
    assert any(parts > 1 for parts in dataset.index.parts_N)
    for planned in dataset.plan.shards:
        found = read_back(dataset, planned.shard)
        for sample in dataset.samples(planned.shard):
            for column, states_TD in made_states(sample, dataset.columns).items():
                got_TD = found[sample.sample_id][column]
                if codec == "lossless":
                    assert torch.equal(got_TD.view(torch.int16), states_TD.view(torch.int16))
                else:
                    error = (got_TD.float() - states_TD.float()).norm() / states_TD.float().norm()
                    assert error < 0.2
        record = dataset.record(planned.shard)
        assert all(error == 0 for error in record.relative_error.values()) == (codec == "lossless")


def test_a_shard_explains_itself(tmp_path: Path) -> None:
    dataset = made_dataset(tmp_path, made_spec(), made_samples(8, longest=70))
    write_shard(dataset, 0)
    record = dataset.record(0)
    data = dataset.store.get(record.object)
    assert hashlib.sha256(data).hexdigest() == record.sha256 and len(data) == record.size
    parquet = pq.ParquetFile(dataset.store.open(record.object))
    metadata = parquet.metadata.metadata[b"dflash"].decode()
    assert dataset.fingerprint in metadata and '"tap_layer_ids": [1, 3, 5]' in metadata
    assert "output of decoder layer i" in metadata and '"pyarrow": ' in metadata
    assert parquet.num_row_groups == len(record.row_groups)
    table = parquet.read()
    planned = dataset.spec.plan_rows([sample.num_tokens for sample in dataset.samples(0)])
    assert table["first_token"].to_pylist() == [row.start for row in planned]
    assert sum(map(len, table["layer_003"].to_pylist())) == record.column_bytes["layer_003"]


def test_row_groups_are_bounded(tmp_path: Path) -> None:
    dataset = made_dataset(tmp_path, made_spec("lossless", shard_tokens=500), made_samples(3, longest=400))
    write_missing(dataset)
    groups = [group for record in dataset.records().values() for group in record.row_groups]
    assert max(group.tokens for group in groups) == dataset.spec.row_group_tokens == 24
    assert sum(group.tokens for group in groups) == dataset.plan.tokens


def test_same_bytes_whatever_the_resources(tmp_path: Path) -> None:
    dataset = made_dataset(tmp_path / "a", made_spec(), made_samples(20))
    other = made_dataset(tmp_path / "b", made_spec(), made_samples(20))
    write_missing(dataset)
    for shard in reversed(other.missing()):
        with ShardWriter(other, shard, tmp_path, WriterConfig(threads=3, pending_bytes=1)) as writer:
            for sample in other.samples(shard):
                writer.add(capture(sample, other))
            writer.close()
    other.seal()
    assert contents(dataset.store) == contents(other.store)


def test_what_is_added_must_be_what_was_planned(tmp_path: Path) -> None:
    dataset = made_dataset(tmp_path, made_spec(), made_samples(20))
    first, second = dataset.samples(0)[:2]
    good = capture(first, dataset)
    states = good.states
    wrong = {
        "wants 'chat-000000' next": capture(second, dataset),
        "tokens are not those": CapturedSample(sample=made_samples(1, seed=9)[0], states=states),
        "columns": CapturedSample(sample=first, states={"layer_001": states["layer_001"]}),
        "must be bfloat16": CapturedSample(sample=first, states={k: v.float() for k, v in states.items()}),
        "layer_001 must be": CapturedSample(
            sample=first, states=states | {"layer_001": states["layer_001"][1:]}
        ),
    }
    for message, captured in wrong.items():
        with ShardWriter(dataset, 0) as writer, pytest.raises(UserError, match=message):
            writer.add(captured)
    with ShardWriter(dataset, 0) as writer:
        writer.add(good)
        with pytest.raises(UserError, match="'chat-000001' was not added"):
            writer.close()
    assert not list(dataset.store.list("shards/")) and dataset.missing()[0] == 0
    assert not dataset.store.abort_unfinished()


@pytest.mark.parametrize("together", [1, 2000, 1 << 30])
def test_samples_of_one_call_are_written_as_one_by_one(
    tmp_path: Path, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long samples cover several rows; a call with a wrong sample adds none."""
    monkeypatch.setattr("storage.writer._ENCODED_TOGETHER", together)
    spec, samples = made_spec(), made_samples(30)
    expected, dataset = (made_dataset(tmp_path / name, spec, samples) for name in ("single", "many"))
    write_missing(expected)
    for shard in dataset.missing():
        captured = [capture(sample, dataset) for sample in dataset.samples(shard)]
        with ShardWriter(dataset, shard) as writer:
            writer.add()
            with pytest.raises(UserError, match=r"next|whole already"):
                writer.add(captured[0], captured[0], *captured[1:])
            writer.add(*captured[:1])
            writer.add(*captured[1:])
            writer.close()
    assert dataset.records() == expected.records() and len(expected.records()) > 1


def test_no_scales_no_shard(tmp_path: Path) -> None:
    dataset = create_dataset(open_store(tmp_path), "made", made_spec(), made_samples(5))
    with pytest.raises(DatasetError, match="calibrate"):
        ShardWriter(dataset, 0)


def test_a_block_left_early_leaves_nothing(root: Store, tmp_path: Path) -> None:
    dataset = made_dataset(root, made_spec(), made_samples(20))
    with pytest.raises(RuntimeError, match="target failed"), ShardWriter(dataset, 0, tmp_path) as writer:
        writer.add(capture(dataset.samples(0)[0], dataset))
        raise RuntimeError("target failed")
    assert not list(dataset.store.list("shards/")) and not list(dataset.store.list("records/"))
    assert not dataset.store.abort_unfinished() and not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("same", [True, False])
def test_two_workers_at_the_same_shard(root: Store, same: bool, tmp_path: Path) -> None:
    """One wins, the other notices; with other bytes the loser's object is removed."""
    dataset = made_dataset(root, made_spec("lossless"), made_samples(4))
    barrier = threading.Barrier(3)

    def work(number: int) -> str:
        with ShardWriter(dataset, 0, tmp_path) as writer:
            for sample in dataset.samples(0):
                states = made_states(sample, dataset.columns)
                if not same:
                    states["layer_001"] = states["layer_001"] + number
                writer.add(CapturedSample(sample=sample, states=states))
            barrier.wait()
            try:
                return writer.close().object
            except ShardAlreadyCommitted:
                return "lost"

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(work, range(3)))
    assert results.count("lost") == 2
    (winner,) = set(results) - {"lost"}
    assert [info.key for info in dataset.store.list("shards/")] == [winner] == [dataset.record(0).object]
    with pytest.raises(ShardAlreadyCommitted):
        ShardWriter(dataset, 0)


def test_redo_replaces_then_removes(root: Store, tmp_path: Path) -> None:
    dataset = made_dataset(root, made_spec("lossless"), made_samples(8))
    write_missing(dataset)
    before, old = contents(dataset.store), dataset.record(0).object
    write_shard(dataset, 0, replace=True)
    assert not dataset.sealed
    dataset.seal()
    assert contents(dataset.store) == before  # the same bytes again change nothing
    with ShardWriter(dataset, 0, tmp_path, replace=True) as writer:
        for sample in dataset.samples(0):
            states = {name: states + 1 for name, states in made_states(sample, dataset.columns).items()}
            writer.add(CapturedSample(sample=sample, states=states))
        new = writer.close().object
    assert new != old and {info.key for info in dataset.store.list("shards/00000")} == {new}
    assert not dataset.sealed
    dataset.seal()
    assert dataset.manifest().shards[0].object == new == dataset.record(0).object


def redo(dataset: Dataset, shard: int, change: float) -> ShardWriter:
    """Begin a redo whose states differ from the present ones; `close` it."""
    writer = ShardWriter(dataset, shard, replace=True)
    for sample in dataset.samples(shard):
        states = {name: states + change for name, states in made_states(sample, dataset.columns).items()}
        writer.add(CapturedSample(sample=sample, states=states))
    return writer


def test_of_two_redos_the_first_counts(root: Store) -> None:
    dataset = made_dataset(root, made_spec("lossless"), made_samples(8))
    write_missing(dataset)
    stray = "shards/00000-0123456789abcdef.parquet"
    dataset.store.put_bytes(stray, b"another worker's, not committed yet")
    first, second, same = redo(dataset, 0, 1), redo(dataset, 0, 2), redo(dataset, 0, 1)
    won = first.close()
    dataset.seal()
    for late in (second, same):
        with pytest.raises(ShardAlreadyCommitted):
            late.close()
    assert dataset.record(0) == won
    assert {info.key for info in dataset.store.list("shards/00000")} == {won.object, stray}
    assert dataset.manifest().shards[0].object == won.object, "who loses breaks no seal"


def test_a_shard_that_is_dropped_during_its_redo(root: Store) -> None:
    dataset = made_dataset(root, made_spec("lossless"), made_samples(8))
    write_missing(dataset)
    writer = redo(dataset, 0, 1)
    dataset.drop(0)
    with pytest.raises(DatasetError, match="dropped by a repair"):
        writer.close()
    assert dataset.missing() == [0]
    write_missing(dataset)


def test_a_redo_removes_nothing_of_another_shard(root: Store) -> None:
    dataset = made_dataset(root, made_spec("lossless"), made_samples(8))
    write_missing(dataset)
    dataset.store.put_bytes("records/00000.json", dataset.store.get("records/00001.json"), overwrite=True)
    redo(dataset, 0, 1).close()
    dataset.seal()


def test_a_damaged_object_of_the_same_name_is_replaced(root: Store) -> None:
    dataset = made_dataset(root, made_spec(), made_samples(8))
    write_missing(dataset)
    record, good = dataset.record(0), contents(dataset.store)
    for damaged in (b"short", bytes(record.size)):
        dataset.store.put_bytes(record.object, damaged, overwrite=True)
        write_shard(dataset, 0, replace=True)
        dataset.seal()
        assert contents(dataset.store) == good


_MEMORY = """
import resource, sys, threading
import numpy as np, torch
from pathlib import Path
from dflash_core.records import CapturedSample, CaptureSpec, Sample
from storage.writer import ShardWriter, WriterConfig
from storage.objects import open_store
from storage.dataset import create_dataset
from tests.storage.made import TARGET, made_spec
torch.set_num_threads(1)
target = TARGET.model_copy(update={"hidden_size": 1024})
spec = made_spec("lossless", target=target, capture=CaptureSpec(tap_layer_ids=(1, 3)),
    shard_tokens=1_000_000, row_group_bytes=4 << 20, row_group_fill_bytes=2 << 20)
ones = np.ones(1000, np.int32)
samples = [Sample(sample_id=str(i), token_ids_T=ones, loss_mask_T=ones == 1) for i in range(24)]
dataset = create_dataset(open_store(sys.argv[1]), "made", spec, samples)
states = {c: torch.randn(1000, 1024).bfloat16() for c in dataset.columns}
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
with ShardWriter(dataset, 0, None, WriterConfig(threads=2, pending_bytes=8 << 20)) as writer:
    for sample in samples[:4]:
        writer.add(CapturedSample(sample=sample, states=states))
    before = peak()
    for sample in samples[4:]:
        writer.add(CapturedSample(sample=sample, states=states))
    writer.close()
print((peak() - before) // 1024)
"""


def test_memory_does_not_grow_with_the_shard(tmp_path: Path) -> None:
    """A shard of 100 MB of states through a room of 8 MiB: the warm peak grows by less than 40 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert int(done.stdout) < 40, done.stdout


def test_no_room_for_the_unpublished_file(tmp_path: Path) -> None:
    dataset = made_dataset(tmp_path, made_spec(), made_samples(20))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        with pytest.raises(UserError, match="give it room"):
            write_shard(dataset, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(dataset.store.list("shards/")) and dataset.missing()[0] == 0
    write_shard(dataset, 0)
