"""`dflash cache` on a small store: what it prints, what it refuses, what it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_core.compile_graphs import extraction_graphs, training_graphs
from dflash_core.configuration import UserError
from dflash_core.drafter import DrafterConfig
from flows.cache_cli import app
from flows.config import ExtractConfig, TrainConfig, dump_config
from flows.ranks import rank_environment
from storage.compile_archive import package
from storage.compile_cache import Version, place_of, publish, read_current
from storage.compile_session import CompileCacheConfig, CompileSession
from storage.objects import Store, open_store
from tests.storage.tiny_cache import FILES, fingerprint, write_cache

DRAFTER = {
    "block_size": 4,
    "num_layers": 1,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
}
TARGET_SHAPE = {
    "hidden_size": 16,
    "rope_theta": 1e4,
    "vocab_size": 64,
    "mask_token_id": 63,
    "tap_layer_ids": (1,),
    "target_num_layers": 4,
}
TRAINING = {
    "dataset": "data",
    "target": "target",
    "output": "output",
    "drafter": DRAFTER,
    "gpus": ["cpu"],
    "cpu_ranks": 2,
}
EXTRACTION = {
    "name": "tiny",
    "store": "data",
    "chats": ["chats.jsonl"],
    "target": {"path": "target", "num_taps": 1},
    "workers": {"slots": ["cpu"]},
}


def publish_one(store: Store, root: Path, **changes: str) -> Version:
    ours = fingerprint(root, **changes)
    write_cache(ours.cache_dir)
    with package(ours.cache_dir, ours, created_by="test", cold_seconds=90) as packed:
        version = publish(store, packed, replacing=read_current(store, place_of(ours)))
    assert version is not None
    return version


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def two(uri: str, tmp_path: Path) -> tuple[Version, Version]:
    """Two versions, of different torch builds, in the usual place below the data sets."""
    store = open_store(uri).child("compile-cache")
    return (
        publish_one(store, tmp_path / "here", torch="2.11.0+cu128", cuda="12.8"),
        publish_one(store, tmp_path / "here"),
    )


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_list(two: tuple[Version, Version], uri: str, tmp_path: Path) -> None:
    lines = run("list", uri).splitlines()
    assert [line.split()[:2] for line in lines] == [["*", two[1].name], ["*", two[0].name]]
    assert "torch2.11.0-cu12.8-triton3.6.0" in lines[1]
    described = json.loads(run("list", f"{uri}/compile-cache", "--json"))
    assert [entry["version"] for entry in described] == [two[1].name, two[0].name]
    for command in ("list", "verify", "prune"):
        with pytest.raises(UserError, match=r"no compile cache in .*empty"):
            run(command, str(tmp_path / "empty"))


def test_show(two: tuple[Version, Version], uri: str) -> None:
    shown = json.loads(run("show", uri, two[0].name[:10], "--members"))
    assert shown["fingerprint"]["environment"]["torch"] == "2.11.0+cu128"
    assert {member["name"] for member in shown["members"]} == set(FILES)
    with pytest.raises(UserError, match="no version is called"):
        run("show", uri, "feed")


def test_diff(two: tuple[Version, Version], uri: str) -> None:
    assert run("diff", uri, two[0].name, two[1].name).splitlines() == [
        "torch 2.11.0+cu128, here 2.11.0+cu130",
        "cuda 12.8, here 13.0",
    ]
    assert "it fits" in run("diff", uri, two[0].name, two[0].name)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["training", "extraction"])
def test_what_a_run_made_fits_the_same_run_on_the_same_machine(stage: str, uri: str, tmp_path: Path) -> None:
    cache = CompileCacheConfig(local_root=str(tmp_path / "root"))
    variables = {"CUDA_VISIBLE_DEVICES": ""}
    config: TrainConfig | ExtractConfig
    if stage == "training":
        config = TrainConfig.model_validate(TRAINING | {"cache": cache})
        drafter = DrafterConfig.model_validate(DRAFTER | TARGET_SHAPE)
        graphs, variables = training_graphs(drafter, config.training), rank_environment((), config.cpu_ranks)
    else:
        config = ExtractConfig.model_validate(EXTRACTION | {"cache": cache})
        graphs = extraction_graphs(config.target, {"model_type": "qwen3", "hidden_size": 16})
    store = open_store(uri)
    with CompileSession.open(store, graphs, cache, variables=variables) as session:
        write_cache(session.folder)
        with package(session.folder, session.fingerprint, created_by="test") as packed:
            place = place_of(session.fingerprint)
            version = publish(store, packed, replacing=read_current(store, place))
    assert version is not None
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config))
    assert run("diff", uri, version.name, "--config", str(file)) == "no difference: it fits\n"
    default = CompileCacheConfig().root
    assert f"local root {cache.root}, here {default}" in run("diff", uri, version.name).splitlines()
    with pytest.raises(UserError, match="either a second version or --config"):
        run("diff", uri, version.name, version.name, "--config", str(file))
    file.write_text(dump_config(config.model_copy(update={"cache": None})))
    with pytest.raises(UserError, match=r"run\.yaml has cache: null"):
        run("diff", uri, version.name, "--config", str(file))


def test_verify(two: tuple[Version, Version], uri: str) -> None:
    assert run("verify", uri).count("are right") == 2
    store = open_store(uri).child("compile-cache")
    key = f"{two[0].folder}/{two[0].manifest.archive_name}"
    store.put_bytes(key, store.get(key)[:-1] + b"!", overwrite=True)
    output = run("verify", uri, code=1)
    assert f"{two[0].name}: rejected: the archive's sha256" in output and output.count("are right") == 1
    assert "are right" in run("verify", uri, two[1].name)


def test_pin_and_prune(two: tuple[Version, Version], uri: str) -> None:
    for name in ("run 7", "run/7", "", "-7"):
        with pytest.raises(UserError, match=f"'{name}' is no name of a pin: take letters"):
            run("pin", uri, two[0].name, "--as", name)
    run("pin", uri, two[0].name, "--as", "run-7")
    assert "pinned by run-7" in run("list", uri)
    assert "0 objects" in run("prune", uri, "--fingerprints", "1")
    for name in ("run/7", "nosuch"):
        with pytest.raises(UserError, match=f"pinned as '{name}'; pins: run-7"):
            run("unpin", uri, "--as", name)
    run("unpin", uri, "--as", "run-7")
    # Both are fingerprints of one graph set and GPU: of these the older one goes.
    assert "3 objects would go" in run("prune", uri, "--fingerprints", "1", "--dry-run")
    assert "3 objects removed" in run("prune", uri, "--fingerprints", "1")
    assert len(run("list", uri).splitlines()) == 1
