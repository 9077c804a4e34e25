"""The life of a compile artifact with real kernels of the real trainer: built, wiped, restored, proved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dflash_core.compile_graphs import training_graphs
from dflash_core.configuration import UserError
from dflash_core.distributed import World
from dflash_core.drafter import DrafterConfig
from dflash_core.training import TrainingConfig
from flows import cache_cli
from flows.build_cache import build_cache, build_for_training
from flows.cache_rank import random_tensors
from flows.config import TrainConfig, dump_config
from flows.launch import ignore
from flows.ranks import rank_environment
from flows.train_steps import TrainingLog, open_training_data, train
from storage.checkpoints import Checkpoints
from storage.compile_archive import mismatches, package
from storage.compile_cache import list_versions, place_of, publish, read_current
from storage.compile_session import CompileCacheConfig, CompileSession
from storage.objects import open_store

DRAFTER = DrafterConfig(
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rope_theta=1e4,
    vocab_size=64,
    block_size=4,
    mask_token_id=63,
    tap_layer_ids=(1,),
    target_num_layers=4,
)
TRAINING = TrainingConfig.model_validate(
    {
        "row_tokens": 32,
        "anchors_per_row": 4,
        "compile": True,
        "compute_dtype": "float32",
        "loss": {"gamma": 2.0},
    }
)


@pytest.mark.slow
def test_built_once_and_training_compiles_nothing(
    train_config: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The life of an artifact from its build to its removal."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    layers = train_config().drafter.model_dump() | {"num_layers": 1}
    shape = {"row_tokens": 256, "anchors_per_row": 16, "compute_dtype": "float32", "compile": True}
    cache = {"uri": str(tmp_path / "store"), "local_root": str(tmp_path / "root")}
    config = train_config(drafter=layers, training=shape, cache=cache)
    (tmp_path / "train.yaml").write_text(dump_config(config))
    cold = json.loads(dflash_cache("build", "--config", str(tmp_path / "train.yaml")))
    assert cold["state"] == "cold" and cold["version"] is not None and not cold["nothing_compiled"]
    (words,) = cold["compiled"].values()
    assert any("backward" in word for word in words) and any("new kernel file" in word for word in words)
    store = open_store(tmp_path / "store")
    (made,) = list_versions(store)[0]
    assert made.manifest.created_by == f"build for {config.output}"

    shutil.rmtree(tmp_path / "root")
    # Real rows, several of them a step, validation, another seed: values in the tensors of the same graphs.
    run = {"rows_per_step": 2, "max_steps": 3, "validation_fraction": 0.3, "validate_every": 2, "seed": 5}
    config = train_config(drafter=layers, training=shape | run, cache={**cache, "pin_as": "this-run"})
    dataset, drafter = open_training_data(config)
    folder, log = Path(config.output), TrainingLog()
    folder.mkdir()
    train(config, dataset, drafter, folder, log, ignore)
    assert log.fraction == 1.0
    warm = log.cache
    assert warm is not None
    assert (warm["state"], warm["version"]) == ("restored", cold["version"]), warm["notes"]
    assert warm["nothing_compiled"], warm["compiled"]
    assert warm["seconds_saved"] > 0 and warm["slowest_start"]["first step"] > 0
    versions, rejected = list_versions(store)
    assert not rejected and [version.pins for version in versions] == [("this-run",)]
    checkpoints = Checkpoints(open_store(config.output), {}, keep=1)
    note = checkpoints.record(checkpoints.steps()[-1]).notes["compile_cache"]
    assert note == {"fingerprint": warm["fingerprint"], "version": cold["version"], "start": "restored"}

    # A flipped bit in the store: nothing of it is used, until another version takes its place.
    (tmp_path / "root").rename(tmp_path / "kept")
    archive = f"{made.folder}/{made.manifest.archive_name}"
    data = bytearray(store.get(archive))
    data[len(data) // 2] ^= 1
    store.put_bytes(archive, bytes(data), overwrite=True)
    assert f"{made.name}: rejected: " in dflash_cache("verify", str(tmp_path / "store"), code=1)

    def start() -> CompileSession:
        graphs, variables = training_graphs(drafter, config.training), rank_environment((), 1)
        return CompileSession.open(
            store, graphs, CompileCacheConfig.model_validate(cache), variables=variables
        )

    with start() as session:
        assert session.state == "cold" and session.version is None and not list(session.folder.iterdir())
        assert session.notes == ["rejected: the archive's sha256 is not the one in its manifest"]
        assert session.fingerprint.id == cold["fingerprint"]
        shutil.copytree(tmp_path / "kept" / session.folder.name, session.folder, dirs_exist_ok=True)
        (session.folder / "more.so").write_bytes(b"so that it is another version of the same kernels")
        with package(session.folder, session.fingerprint, created_by="after the damage") as packed:
            current = read_current(store, place_of(session.fingerprint))
            second = publish(store, packed, replacing=current)
    assert second is not None
    # The pin keeps the damaged one.
    assert dflash_cache("prune", str(tmp_path / "store"), "--versions", "1") == "0 objects removed\n"
    dflash_cache("unpin", str(tmp_path / "store"), "--as", "this-run")
    assert "2 objects removed" in dflash_cache("prune", str(tmp_path / "store"), "--versions", "1")
    assert [version.name for version in list_versions(store)[0]] == [second.name]
    assert not (tmp_path / "store" / archive).exists()
    shutil.rmtree(tmp_path / "root")
    with start() as session:
        assert (session.state, session.notes) == ("restored", [f"restored version {second.name}"])
        assert mismatches(session.folder, second.manifest.members) == []


def dflash_cache(*arguments: str, code: int = 0) -> str:
    """Run `dflash cache`; return what it prints."""
    result = CliRunner().invoke(cache_cli.app, arguments)
    assert result.exit_code == code, result.output
    return result.stdout


def test_what_cannot_be_built_is_refused(train_config: Callable[..., TrainConfig]) -> None:
    with pytest.raises(UserError, match="cache: null"):
        build_for_training(train_config(cache=None))
    with pytest.raises(UserError, match=r"cache\.uri"):
        build_cache(DRAFTER, TRAINING, CompileCacheConfig())
    alone = World(rank=0, size=1, device=torch.device("cpu"))
    for compiled in (False, None):
        with pytest.raises(UserError, match="compiles nothing"):
            random_tensors(DRAFTER, TRAINING.model_copy(update={"compile": compiled}), alone)
