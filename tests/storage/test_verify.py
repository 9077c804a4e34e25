"""Verification condemns only what is corrupt, and repair removes only what nothing names."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dflash_core.configuration import UserError
from flows.shards_cli import app
from storage.dataset import Dataset, open_dataset
from storage.verify import damaged_inputs, named_now, verify_dataset
from tests.storage.made import contents, made_dataset, made_samples, made_spec, write_missing


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    made = made_dataset(tmp_path / "store", made_spec(), made_samples(15))
    write_missing(made)
    return open_dataset(made.uri)


def repair(dataset: Dataset) -> dict[str, Any]:
    arguments = ["repair", dataset.uri, "--look", "cells", "--json"]
    found = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("lost", [True, False])
def test_a_damaged_input_condemns_no_shard(dataset: Dataset, lost: bool) -> None:
    good, key = contents(dataset.store), "samples/00001.parquet"
    if lost:
        dataset.store.delete(key)
    else:
        dataset.store.put_bytes(key, good[key][:-9], overwrite=True)
    findings = {finding.shard: finding for finding in verify_dataset(dataset, "cells")}
    assert findings[1].state == "unchecked" and "compared with its input" in findings[1].problem
    assert {finding.state for shard, finding in findings.items() if shard != 1} == {"good"}
    found = repair(dataset)
    assert found["dropped"] == [] and found["inputs"] == [key]
    again = made_dataset(dataset.uri.rpartition("/")[0], made_spec(), made_samples(15))
    again.seal()
    assert contents(dataset.store) == good


def test_a_damaged_seal_is_written_anew_by_the_extraction_alone(dataset: Dataset) -> None:
    good = contents(dataset.store)
    plan = hashlib.sha256(good["plan.json"]).hexdigest()
    for seal in (b'{"torn', good["manifest.json"].replace(plan.encode(), b"0" * 64)):
        dataset.store.put_bytes("manifest.json", seal, overwrite=True)
        for command in ("verify", "repair"):
            with pytest.raises(
                UserError,
                match=r"manifest\.json (is damaged|belongs to another plan).*: run the extraction again",
            ):
                CliRunner().invoke(app, [command, dataset.uri], catch_exceptions=False)
        open_dataset(dataset.uri).seal()
        assert contents(dataset.store) == good


def test_the_shortest_look_reads_no_input(dataset: Dataset) -> None:
    changed, lost = "samples/00000.parquet", "samples/00001.parquet"
    dataset.store.put_bytes(changed, b"of no use", overwrite=True)
    dataset.store.delete(lost)
    dataset.store.delete("index.parquet")
    assert damaged_inputs(dataset, "sizes") == [lost, "index.parquet"]
    assert damaged_inputs(dataset, "bytes") == [changed, lost, "index.parquet"]
    looks = {
        look: json.loads(CliRunner().invoke(app, ["verify", dataset.uri, "--look", look, "--json"]).stdout)
        for look in ("sizes", "bytes")
    }
    assert {look: len(verdict["inputs"]) for look, verdict in looks.items()} == {"sizes": 2, "bytes": 3}


def test_an_object_that_is_named_again_is_kept(dataset: Dataset) -> None:
    named = dataset.record(0).object
    assert named_now(dataset, named) and not named_now(dataset, "shards/00000-0123456789abcdef.parquet")
    assert not named_now(dataset, "shards/99999-0123456789abcdef.parquet")
    dataset.store.put_bytes("records/00000.json", b"torn", overwrite=True)
    assert named_now(dataset, named)
