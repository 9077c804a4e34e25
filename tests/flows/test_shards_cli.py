"""`dflash shards` on real data sets: sound, incomplete and damaged ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dflash_core.configuration import UserError
from flows.shards_cli import app
from storage.dataset import Dataset, open_dataset
from tests.storage.made import (
    TARGET,
    contents,
    made_dataset,
    made_samples,
    made_spec,
    write_missing,
    write_shard,
)
from tests.storage.seaweed import SeaweedServer


def call(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def call_json(*arguments: str, code: int = 0) -> Any:
    return json.loads(call(*arguments, "--json", code=code))


@pytest.fixture(params=["local", "s3"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Dataset:
    uri = str(tmp_path / "store") if request.param == "local" else request.getfixturevalue("s3_uri")
    made = made_dataset(uri, made_spec(), made_samples(15))
    write_missing(made)
    assert len(made.plan.shards) >= 4
    return open_dataset(made.uri)


def flip(dataset: Dataset, key: str, position: int) -> None:
    data = bytearray(dataset.store.get(key))
    data[position] ^= 16
    dataset.store.put_bytes(key, bytes(data), overwrite=True)


def test_list_and_show(dataset: Dataset) -> None:
    rows = call_json("list", dataset.uri)
    assert [row["shard"] for row in rows] == list(range(len(dataset.plan.shards)))
    assert sum(row["tokens"] for row in rows) == dataset.plan.tokens
    facts = call_json("show", dataset.uri)
    manifest = dataset.manifest()
    assert facts["sealed"] and facts["missing"] == [] and facts["bytes"] == manifest.bytes
    assert {
        name: layer["relative_error"] for name, layer in facts["layers"].items()
    } == manifest.relative_error
    assert sum(facts["lengths"].values()) == dataset.plan.samples
    assert facts["spec"]["capture"]["tap_layer_ids"] == [1, 3, 5]
    assert "tolerance=0.1" in call("show", dataset.uri) and "committed" in call("list", dataset.uri)


def test_show_where_nothing_is_captured_yet(tmp_path: Path) -> None:
    dataset = made_dataset(tmp_path, made_spec(), made_samples(5))
    text = call("show", dataset.uri)
    assert "size         nothing is captured yet" in text and "None" not in text


def test_list_of_a_store_with_several(tmp_path: Path) -> None:
    first = made_dataset(tmp_path, made_spec(), made_samples(5))
    made_dataset(tmp_path, made_spec("lossless"), made_samples(5))
    unfinished = made_dataset(tmp_path, made_spec("fp8"), made_samples(5))
    unfinished.store.delete("plan.json")
    write_missing(first)
    (tmp_path / "compile-cache" / "v1").mkdir(parents=True)
    damaged = made_dataset(tmp_path, made_spec("tolerance=0.2"), made_samples(5))
    damaged.store.put_bytes("plan.json", b'{"torn', overwrite=True)
    headless = made_dataset(tmp_path, made_spec("tolerance=0.3"), made_samples(5))
    headless.store.delete("dataset.json")
    rows = call_json("list", str(tmp_path))
    sound = [row for row in rows if "problem" not in row]
    assert {(row["codec"], row["sealed"]) for row in sound} == {("tolerance=0.1", True), ("lossless", False)}
    problems = {row["data_set"]: row["problem"] for row in rows if "problem" in row}
    words = {
        unfinished: "no plan",
        damaged: "plan.json is damaged: remove it",
        headless: "dataset.json is gone",
    }
    assert problems.keys() == {dataset.uri.rpartition("/")[2] for dataset in words}
    assert all(found in problems[dataset.uri.rpartition("/")[2]] for dataset, found in words.items())
    listed = call("list", str(tmp_path))
    assert all(f"! {name}: {problem}\n" in listed for name, problem in problems.items())
    with pytest.raises(UserError, match="several"):
        call("show", str(tmp_path))


def test_list_of_a_store_with_one_that_is_finished_or_damaged(tmp_path: Path) -> None:
    dataset = made_dataset(tmp_path, made_spec(), made_samples(5))
    unfinished = made_dataset(tmp_path, made_spec("fp8"), made_samples(5))
    unfinished.store.delete("plan.json")
    shards = call_json("list", dataset.uri)
    assert "shard" in shards[0] and call_json("list", str(tmp_path)) == shards
    assert call_json("show", str(tmp_path))["uri"] == dataset.uri

    dataset.store.put_bytes("plan.json", b'{"torn', overwrite=True)
    rows = call_json("list", str(tmp_path))
    assert len(rows) == 2 and all("problem" in row for row in rows)
    shutil.rmtree(unfinished.uri.removeprefix("file://"))
    (row,) = call_json("list", str(tmp_path))
    assert row["problem"].startswith(f"{dataset.uri}/plan.json is damaged")
    dataset.store.put_bytes("dataset.json", b"{}", overwrite=True)
    (row,) = call_json("list", str(tmp_path))
    assert row["problem"].startswith(f"{dataset.uri}/dataset.json cannot be understood")


def test_names_are_listed_whole_however_narrow_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    target = TARGET.model_copy(update={"name": "a-target-with-a-name-longer-than-forty-columns"})
    made = [
        made_dataset(tmp_path, made_spec(codec, target=target), made_samples(5))
        for codec in ("fp8", "lossless")
    ]
    listed = call("list", str(tmp_path))
    for dataset in made:
        (line,) = [line for line in listed.splitlines() if dataset.uri.rpartition("/")[2] in line]
        assert target.name in line


def test_a_sound_one_is_verified(dataset: Dataset) -> None:
    for look in ("sizes", "bytes", "cells"):
        verdict = call_json("verify", dataset.uri, "--look", look)
        assert verdict["good"] == len(dataset.plan.shards) and verdict["sealed"]
        assert not verdict["missing"] and not verdict["corrupt"] and not verdict["orphans"]
    assert "sealed" in call("verify", dataset.uri)
    assert "nothing to extract" in call("repair", dataset.uri)


def test_damage_is_found_and_mended(dataset: Dataset) -> None:
    """A flipped byte in a cell, a footer and a record, a cut, a swapped and a lost object, one by one."""
    good, store = contents(dataset.store), dataset.store
    records = dataset.records()
    objects = {shard: record.object for shard, record in records.items()}
    middle = records[0].row_groups[1].chunks[2]

    def swap() -> None:
        store.put_bytes(objects[0], good[objects[1]], overwrite=True)

    damages = {
        "layer_003 of rows": lambda: flip(dataset, objects[0], middle[0] + middle[1] // 2),
        "outside of its rows": lambda: flip(dataset, objects[0], records[0].size - 20),
        "bytes, not": lambda: store.put_bytes(objects[0], good[objects[0]][:-1], overwrite=True),
        "shard 0": swap,
        "no such object": lambda: store.delete(objects[0]),
        "is not the one that was sealed": lambda: flip(dataset, "records/00000.json", 100),
    }
    for message, damage in damages.items():
        damage()
        verdict = call_json("verify", dataset.uri, code=1)
        assert list(verdict["corrupt"]) == ["0"] and message in verdict["corrupt"]["0"], verdict
        assert verdict["good"] == len(objects) - 1
        assert call_json("repair", dataset.uri, "--dry-run")["dropped"] == [0]
        assert call_json("verify", dataset.uri, code=1)["corrupt"] == verdict["corrupt"]
        repaired = call("repair", dataset.uri)
        assert "writes just shards 0" in repaired and "dflash shards repair" not in repaired
        again = open_dataset(dataset.uri)
        assert not again.sealed and again.missing() == [0]
        assert call_json("verify", dataset.uri, code=1)["missing"] == [0]
        write_missing(again)
        assert contents(store) == good


def test_scales_are_put_back(dataset: Dataset) -> None:
    """Damaged scales make no shard corrupt: each carries a copy."""
    good = contents(dataset.store)
    for damage in (
        lambda: flip(dataset, "scales.safetensors", -3),
        lambda: dataset.store.delete("scales.safetensors"),
    ):
        damage()
        with pytest.raises(UserError, match="every shard carries a copy"):
            call("verify", dataset.uri)
        assert call_json("repair", dataset.uri)["dropped"] == []
        assert contents(dataset.store) == good


def test_damaged_inputs_are_written_again(dataset: Dataset) -> None:
    good = contents(dataset.store)
    flip(dataset, "samples/00001.parquet", 50)
    dataset.store.delete("index.parquet")
    damaged = ["samples/00001.parquet", "index.parquet"]
    assert call_json("verify", dataset.uri, code=1)["inputs"] == damaged
    assert call_json("repair", dataset.uri)["inputs"] == damaged
    root = dataset.uri.rpartition("/")[0]
    again = made_dataset(root, made_spec(), made_samples(15))
    assert again.missing() == []
    again.seal()
    assert contents(dataset.store) == good


def test_leftovers_are_removed_when_old(dataset: Dataset) -> None:
    dataset.store.put_bytes("shards/00000-0123456789abcdef.parquet", b"left by a worker that lost")
    assert call_json("verify", dataset.uri)["orphans"] == ["shards/00000-0123456789abcdef.parquet"]
    assert call_json("repair", dataset.uri)["removed"] == []
    removed = call_json("repair", dataset.uri, "--leftovers", "0")["removed"]
    assert removed == ["shards/00000-0123456789abcdef.parquet"] and dataset.sealed
    assert call_json("verify", dataset.uri)["orphans"] == []


def test_unfinished_uploads_are_listed_and_aborted(dataset: Dataset, s3: SeaweedServer) -> None:
    """What a worker leaves that was killed while it published a shard."""
    key, good = "shards/00000-0123456789abcdef.parquet", contents(dataset.store)
    if dataset.uri.startswith("s3:"):
        bucket, _, prefix = dataset.uri.removeprefix("s3://").partition("/")
        s3.client().create_multipart_upload(Bucket=bucket, Key=f"{prefix}/{key}")
    else:
        folder = Path(dataset.uri.removeprefix("file://")) / "shards"
        (folder / ".tmp-123-0a1b2c3d-00000-0123456789abcdef.parquet").write_bytes(b"half")
    verdict = call_json("verify", dataset.uri)
    assert verdict["unfinished_uploads"] == [key] and verdict["orphans"] == []
    assert "0 objects, 1 unfinished uploads" in call("verify", dataset.uri)
    assert call_json("repair", dataset.uri)["removed"] == [], "it may belong to a living worker"
    assert call_json("repair", dataset.uri, "--leftovers", "0", "--dry-run")["removed"] == [key]
    assert call_json("verify", dataset.uri)["unfinished_uploads"] == [key]
    assert call_json("repair", dataset.uri, "--leftovers", "0")["removed"] == [key]
    assert call_json("verify", dataset.uri)["unfinished_uploads"] == []
    assert contents(dataset.store) == good


def test_an_unfinished_one_says_what_lacks(tmp_path: Path) -> None:
    dataset = made_dataset(tmp_path, made_spec(), made_samples(15))
    write_shard(dataset, 1)
    rest = [shard.shard for shard in dataset.plan.shards if shard.shard != 1]
    assert call_json("show", dataset.uri)["missing"] == rest
    assert call_json("verify", dataset.uri, code=1)["missing"] == rest
    assert call_json("repair", dataset.uri)["dropped"] == []
