"""A data set is created once, committed shard by shard, sealed when whole, and refuses what is not its."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_core.records import CaptureSpec, Sample
from storage.dataset import (
    DatasetError,
    ShardAlreadyCommitted,
    ShardCorrupt,
    create_dataset,
    open_dataset,
)
from storage.objects import Store, open_store
from tests.storage.made import contents, made_dataset, made_samples, made_spec, write_missing, write_shard


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(
        str(tmp_path / "store") if request.param == "local" else request.getfixturevalue("s3_uri")
    )


def test_plan_covers_every_sample_once(root: Store) -> None:
    samples = made_samples(60)
    dataset = open_dataset(made_dataset(root, made_spec(), samples).uri)
    read = [sample for shard in dataset.plan.shards for sample in dataset.samples(shard.shard)]
    assert (
        [s.sample_id for s in read] == [s.sample_id for s in samples] == dataset.index.sample_ids.to_pylist()
    )
    for a, b in zip(read, samples, strict=True):
        assert (a.token_ids_T == b.token_ids_T).all() and (a.loss_mask_T == b.loss_mask_T).all()
        assert a.token_ids_T.dtype == np.int32 and a.loss_mask_T.dtype == np.bool_
    index, plan = dataset.index, dataset.plan
    assert len(plan.shards) > 10 and len(index) == plan.samples == 60
    assert index.tokens_N.tolist() == [s.num_tokens for s in samples]
    assert index.supervised_N.tolist() == [int(s.loss_mask_T.sum()) for s in samples]
    assert plan.tokens == index.tokens_N.sum() and plan.supervised == index.supervised_N.sum()
    for shard in plan.shards:
        assert shard.tokens == index.tokens_N[index.shard_N == shard.shard].sum()
        assert shard.tokens <= 80 or shard.samples == 1


def test_created_twice_is_the_same(root: Store) -> None:
    samples = made_samples(30)
    first = create_dataset(root, "made", made_spec(), samples)
    before = contents(root)

    def not_read() -> Iterator[Sample]:
        raise AssertionError("a finished data set must not read its input again")
        yield

    assert create_dataset(root, "made", made_spec(), not_read()).uri == first.uri
    assert contents(root) == before


def test_a_stopped_creation_is_finished(root: Store) -> None:
    samples = made_samples(100)

    def broken() -> Iterator[Sample]:
        yield from samples[:70]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create_dataset(root, "made", made_spec(), broken())
    folder = root.folders()[0]
    with pytest.raises(DatasetError, match="creation did not finish"):
        open_dataset(f"{root.uri}/{folder}")
    assert len(list(root.list(f"{folder}/samples/"))) > 5
    create_dataset(root, "made", made_spec(), samples)
    after = contents(root.child(folder))
    whole = open_store(f"{root.uri}-undisturbed")
    create_dataset(whole, "made", made_spec(), samples)
    assert contents(whole.child(folder)) == after


@pytest.mark.parametrize("read", [0, 50, 100])
def test_a_data_set_removed_while_it_is_planned_can_be_planned_again(root: Store, read: int) -> None:
    samples = made_samples(100)

    def removed() -> Iterator[Sample]:
        yield from samples[:read]
        for info in list(root.list("")):
            root.delete(info.key)
        yield from samples[read:]

    with pytest.raises(DatasetError, match=r"dataset\.json: .* somebody removed .* run the same command"):
        create_dataset(root, "made", made_spec(), removed())
    with pytest.raises(DatasetError, match="no data set whose creation finished"):
        open_dataset(root.uri)
    create_dataset(root, "made", made_spec(), samples)
    whole = open_store(f"{root.uri}-undisturbed")
    create_dataset(whole, "made", made_spec(), samples)
    assert contents(root) == contents(whole)


def test_a_folder_removed_again_and_again_while_it_is_planned_is_one_clear_error(tmp_path: Path) -> None:
    def removed() -> Iterator[Sample]:
        for sample in made_samples(200):
            shutil.rmtree(tmp_path, ignore_errors=True)
            yield sample

    with pytest.raises(DatasetError, match=r"no such object: somebody removed .* run the same command"):
        create_dataset(open_store(tmp_path), "made", made_spec(), removed())


def test_other_samples_under_the_same_fingerprint_are_noticed(root: Store) -> None:
    samples = made_samples(40)
    with pytest.raises(AttributeError):
        create_dataset(root, "made", made_spec(), [*samples[:30], None])  # type: ignore[list-item]
    with pytest.raises(DatasetError, match="other samples"):
        create_dataset(root, "made", made_spec(), made_samples(40, seed=1))


def test_creation_on_damaged_samples_is_one_clear_error(tmp_path: Path) -> None:
    dataset = made_dataset(tmp_path, made_spec(), made_samples(10))
    key = "samples/00000.parquet"
    dataset.store.put_bytes(key, dataset.store.get(key)[:-9], overwrite=True)
    dataset.store.delete("plan.json")
    with pytest.raises(DatasetError, match=r"samples/00000\.parquet is damaged or was written from other"):
        made_dataset(tmp_path, made_spec(), made_samples(10))


def test_ids_twice(tmp_path: Path) -> None:
    samples = made_samples(10)
    with pytest.raises(DatasetError, match="chat-000003"):
        create_dataset(open_store(tmp_path / "a"), "made", made_spec(), [*samples, samples[3]])
    spec = made_spec(duplicate_ids="drop")
    dataset = create_dataset(open_store(tmp_path / "b"), "made", spec, [*samples, *samples[2:5]])
    assert dataset.plan.samples == 10 and dataset.plan.duplicates_dropped == 3


def test_another_chat_under_a_known_id_is_told(tmp_path: Path) -> None:
    samples = [replace(sample, where=f"a:{i}") for i, sample in enumerate(made_samples(10))]
    others = [replace(sample, where=f"b:{i}") for i, sample in enumerate(made_samples(10, seed=1))]
    told: list[tuple[str, str]] = []
    spec, root = made_spec(duplicate_ids="drop"), open_store(tmp_path / "a")
    dataset = create_dataset(
        *(root, "made", spec, [*samples, samples[3], *others[:2]]),
        clash=lambda sample, first: told.append((sample.where, first)),
    )
    assert told == [("b:0", "a:0"), ("b:1", "a:1")]
    assert dataset.plan.samples == 10 and dataset.plan.duplicates_dropped == 1
    with pytest.raises(
        DatasetError, match=r"two different samples have the id 'chat-000002' \(a:2 and b:2\)"
    ):
        create_dataset(open_store(tmp_path / "b"), "made", spec, [*samples, others[2]])


def test_an_id_that_is_no_text(tmp_path: Path) -> None:
    (sample,) = made_samples(1)
    bad = Sample(sample_id="\ud800", token_ids_T=sample.token_ids_T, loss_mask_T=sample.loss_mask_T)
    with pytest.raises(DatasetError, match="not Unicode"):
        create_dataset(open_store(tmp_path), "made", made_spec(), [bad])


def test_samples_that_cannot_be_used_leave_nothing(root: Store) -> None:
    with pytest.raises(DatasetError, match="empty"):
        create_dataset(root, "made", made_spec(), [])
    samples = made_samples(40)
    with pytest.raises(DatasetError, match="two samples"):
        create_dataset(root, "made", made_spec(), [*samples, samples[0]])
    assert not list(root.list(""))


def test_not_even_folders_are_left_of_what_cannot_be_used(tmp_path: Path) -> None:
    samples = made_samples(40)
    kept = tmp_path / "kept"
    kept.mkdir()
    for folder in (tmp_path / "a" / "b", kept):
        with pytest.raises(DatasetError, match="two samples"):
            create_dataset(open_store(folder), "made", made_spec(), [*samples, samples[0]])
    assert [*tmp_path.rglob("*")] == [kept], "what was there stays"
    made_dataset(kept, made_spec(), samples)
    before = contents(open_store(kept))
    with pytest.raises(DatasetError, match="two samples"):
        create_dataset(open_store(kept), "other", made_spec(), [*samples, samples[0]])
    assert contents(open_store(kept)) == before and len([*kept.iterdir()]) == 1


def test_a_planner_that_fails_takes_nothing_of_another(root: Store) -> None:
    samples = made_samples(40)

    def overtaken() -> Iterator[Sample]:
        made_dataset(root, made_spec(), samples)
        yield from samples[:1]
        raise DatasetError("these chats cannot be used")

    with pytest.raises(DatasetError, match="cannot be used"):
        create_dataset(root, "made", made_spec(), overtaken())
    write_missing(open_dataset(root.uri))


def test_a_refused_stream_takes_nothing_of_what_was_there(root: Store) -> None:
    samples = made_samples(40)
    with pytest.raises(AttributeError):
        create_dataset(root, "made", made_spec(), [*samples[:30], None])  # type: ignore[list-item]
    before = contents(root)
    with pytest.raises(DatasetError, match="two samples"):
        create_dataset(root, "made", made_spec(), [samples[0], samples[0]])
    assert contents(root) == before


def test_another_configuration_is_refused_by_name(root: Store) -> None:
    dataset = made_dataset(root, made_spec(), made_samples(10))
    other = made_spec(capture=CaptureSpec(tap_layer_ids=(1, 2)), chat={"max_tokens": 50})
    with pytest.raises(DatasetError) as caught:
        open_dataset(dataset.uri, expected=other)
    text = str(caught.value)
    assert "capture.tap_layer_ids" in text and "chat.max_tokens: 50 here, 100 in the data set" in text
    assert "codec" not in text and "target.name" not in text
    assert open_dataset(dataset.uri, expected=made_spec("tolerance=0.10")).fingerprint == dataset.fingerprint


def test_open_finds_the_only_one(root: Store) -> None:
    with pytest.raises(DatasetError, match="no data set"):
        open_dataset(root.uri)
    first = made_dataset(root, made_spec(), made_samples(5))
    unfinished = made_dataset(root, made_spec("fp8"), made_samples(5))
    unfinished.store.delete("plan.json")
    assert open_dataset(root.uri).uri == first.uri
    made_dataset(root, made_spec("lossless"), made_samples(5))
    with pytest.raises(DatasetError, match="several"):
        open_dataset(root.uri)


def test_scales_are_published_once(root: Store) -> None:
    dataset = create_dataset(root, "made", made_spec(), made_samples(10))
    assert dataset.scales() is None
    first = {column: torch.full((32,), 1.5) for column in dataset.columns}
    other = {column: torch.full((32,), 2.5) for column in dataset.columns}
    assert dataset.publish_scales(first)["layer_001"][0] == 1.5
    late = open_dataset(dataset.uri)
    assert late.publish_scales(other)["layer_003"][0] == 1.5
    for bad in (torch.zeros(32), torch.full((32,), torch.inf), torch.ones(31), torch.ones(32).double()):
        with pytest.raises(DatasetError, match="layer_001"):
            late.publish_scales(first | {"layer_001": bad})


def test_sealed_when_whole(root: Store, tmp_path: Path) -> None:
    dataset = made_dataset(root, made_spec(), made_samples(12))
    shards = [shard.shard for shard in dataset.plan.shards]
    assert dataset.missing() == shards and not dataset.sealed
    with pytest.raises(DatasetError, match="not complete"):
        dataset.manifest()
    for shard in shards[1:]:
        write_shard(dataset, shard, tmp_path)
    assert dataset.missing() == [0] and len(shards) > 2
    with pytest.raises(DatasetError, match=f"lacks 1 of {len(shards)} shards: 0"):
        dataset.seal()
    write_missing(dataset, tmp_path)
    assert dataset.sealed and dataset.manifest() == dataset.seal() == open_dataset(dataset.uri).manifest()
    manifest, records = dataset.manifest(), dataset.records()
    assert manifest.tokens == dataset.plan.tokens == sum(record.tokens for record in records.values())
    assert manifest.bytes == sum(root.head(f"{root.folders()[0]}/{r.object}").size for r in records.values())
    assert all(0.05 < error < 0.12 for error in manifest.relative_error.values())


def test_a_record_that_is_not_ours_is_refused(root: Store) -> None:
    dataset = made_dataset(root, made_spec(), made_samples(12))
    other = made_dataset(root, made_spec(shard_tokens=60), made_samples(12))
    write_missing(dataset)
    write_missing(other)
    record = dataset.record(0)
    with pytest.raises(DatasetError, match="another data set"):
        other.commit(record)
    dataset.store.put_bytes("manifest.json", other.store.get("manifest.json"), overwrite=True)
    with pytest.raises(DatasetError, match="another data set"):
        dataset.manifest()
    dataset.seal()
    dataset.manifest()
    dataset.store.put_bytes("records/00001.json", dataset.store.get("records/00002.json"), overwrite=True)
    with pytest.raises(ShardCorrupt, match=r"00001\.json is not the one that was sealed"):
        dataset.record(1)
    with pytest.raises(ShardCorrupt, match="shards repair"):
        open_dataset(dataset.uri).record(1)


def test_seal_looks_at_the_objects(root: Store) -> None:
    dataset = made_dataset(root, made_spec(), made_samples(20))
    write_missing(dataset)
    dataset.unseal()
    dataset.store.delete(dataset.record(1).object)
    with pytest.raises(ShardCorrupt, match=r"shard 1 .* is gone"):
        dataset.seal()


def test_damaged_plan_objects_are_noticed(root: Store) -> None:
    dataset = made_dataset(root, made_spec(), made_samples(20))
    for key in ("samples/00000.parquet", "index.parquet"):
        data = bytearray(dataset.store.get(key))
        data[len(data) // 2] ^= 1
        dataset.store.put_bytes(key, bytes(data), overwrite=True)
    fresh = open_dataset(dataset.uri)
    with pytest.raises(DatasetError, match=r"samples/00000\.parquet is damaged"):
        fresh.samples(0)
    with pytest.raises(DatasetError, match=r"index\.parquet is damaged"):
        _ = fresh.index
    for key in ("samples/00000.parquet", "index.parquet"):
        dataset.store.delete(key)
    with pytest.raises(DatasetError, match=r"no samples/00000\.parquet; `dflash shards repair"):
        fresh.samples(0)
    with pytest.raises(DatasetError, match=r"no index\.parquet; `dflash shards repair"):
        _ = fresh.index
    dataset.store.put_bytes("plan.json", b'{"torn', overwrite=True)
    with pytest.raises(DatasetError, match=r"plan\.json is damaged: remove it and run the extraction again"):
        open_dataset(dataset.uri)


def test_no_credentials_in_what_is_stored(s3_uri: str) -> None:
    dataset = made_dataset(s3_uri, made_spec(), made_samples(20))
    write_missing(dataset)
    for key, data in contents(dataset.store).items():
        assert b"test-secret-key" not in data and b"test-access-key" not in data, key


def test_spec_of_a_newer_version_is_explained(tmp_path: Path) -> None:
    dataset = made_dataset(tmp_path, made_spec(), made_samples(5))
    text = json.loads(dataset.store.get("dataset.json"))
    text["spec"]["colour"] = "red"
    dataset.store.put_bytes("dataset.json", json.dumps(text).encode(), overwrite=True)
    with pytest.raises(DatasetError, match="colour"):
        open_dataset(dataset.uri)


def test_another_version_of_the_format_is_refused(tmp_path: Path) -> None:
    dataset = made_dataset(tmp_path, made_spec(), made_samples(5))
    write_shard(dataset, 0)
    for key, part in (("records/00000.json", None), ("dataset.json", "spec")):
        content = json.loads(dataset.store.get(key))
        (content[part] if part else content)["format_version"] = 2
        dataset.store.put_bytes(key, json.dumps(content).encode(), overwrite=True)
    with pytest.raises(
        ShardCorrupt, match="format version 2: this version of the software reads and writes 1"
    ):
        dataset.record(0)
    with pytest.raises(DatasetError, match="format version 2: this version"):
        open_dataset(dataset.uri)


def test_committing_twice(root: Store) -> None:
    dataset = made_dataset(root, made_spec(), made_samples(20))
    write_shard(dataset, 0)
    record = dataset.record(0)
    with pytest.raises(ShardAlreadyCommitted):
        dataset.commit(record)
    assert dataset.store.head(record.object).size == record.size
