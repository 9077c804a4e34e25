"""The life of a compile artifact with real kernels of the real trainer: built, wiped, restored, proved."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dflash_core.configuration import UserError
from dflash_core.distributed import World
from dflash_core.drafter import DrafterConfig
from dflash_core.training import TrainingConfig
from flows.build_cache import build_cache, build_for_training
from flows.cache_rank import random_tensors
from flows.config import TrainConfig
from flows.launch import ignore
from flows.train_steps import TrainingLog, open_training_data, train
from storage.compile_cache import list_versions
from storage.compile_session import CompileCacheConfig
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
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shape = {"row_tokens": 256, "anchors_per_row": 16, "compute_dtype": "float32", "compile": True}
    cache = {"uri": str(tmp_path / "store"), "local_root": str(tmp_path / "root")}
    config = train_config(training=shape, cache=cache)
    cold = build_for_training(config)
    assert cold["state"] == "cold" and cold["version"] is not None and not cold["nothing_compiled"]
    (words,) = cold["compiled"].values()
    assert any("backward" in word for word in words) and any("new kernel file" in word for word in words)
    (made,) = list_versions(open_store(tmp_path / "store"))[0]
    assert made.manifest.created_by == f"build for {config.output}"

    shutil.rmtree(tmp_path / "root")
    # Real rows, several of them a step, validation, another seed: values in the tensors of the same graphs.
    run = {"rows_per_step": 2, "max_steps": 3, "validation_fraction": 0.3, "validate_every": 2, "seed": 5}
    config = train_config(training=shape | run, cache={**cache, "pin_as": "this-run"})
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
    versions, rejected = list_versions(open_store(tmp_path / "store"))
    assert not rejected and [version.pins for version in versions] == [("this-run",)]


def test_what_cannot_be_built_is_refused(train_config: Callable[..., TrainConfig]) -> None:
    with pytest.raises(UserError, match="cache: null"):
        build_for_training(train_config(cache=None))
    with pytest.raises(UserError, match=r"cache\.uri"):
        build_cache(DRAFTER, TRAINING, CompileCacheConfig())
    alone = World(rank=0, size=1, device=torch.device("cpu"))
    for compiled in (False, None):
        with pytest.raises(UserError, match="compiles nothing"):
            random_tensors(DRAFTER, TRAINING.model_copy(update={"compile": compiled}), alone)
