"""The life of a compile artifact with real kernels of the real trainer: built, wiped, restored, proved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from dflash_core.configuration import UserError
from dflash_core.distributed import World
from dflash_core.drafter import DrafterConfig
from dflash_core.training import TrainingConfig
from flows.build_cache import build_cache
from flows.cache_rank import random_tensors
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
def test_built_once_and_never_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cache = CompileCacheConfig(uri=str(tmp_path / "store"), local_root=str(tmp_path / "root"))
    cold = build_cache(DRAFTER, TRAINING, cache)
    assert cold["state"] == "cold" and cold["version"] is not None and not cold["nothing_compiled"]
    (words,) = cold["compiled"].values()
    assert any("backward" in word for word in words) and any("new kernel file" in word for word in words)

    shutil.rmtree(tmp_path / "root")
    # Other values in the tensors, the same graphs: the artifact serves them too.
    other = DRAFTER.model_copy(update={"rope_theta": 1e6, "mask_token_id": 7, "tap_layer_ids": (2,)})
    warm = build_cache(other, TRAINING.model_copy(update={"seed": 5, "epochs": 1}), cache)
    assert warm["state"] == "restored" and warm["version"] == cold["version"]
    assert warm["nothing_compiled"], warm["compiled"]
    assert warm["seconds_saved"] > 0
    versions, rejected = list_versions(open_store(tmp_path / "store"))
    assert len(versions) == 1 and not rejected, "a start that compiled nothing publishes nothing"


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(UserError, match=r"cache\.uri"):
        build_cache(DRAFTER, TRAINING, CompileCacheConfig())
    alone = World(rank=0, size=1, device=torch.device("cpu"))
    for compiled in (False, None):
        with pytest.raises(UserError, match="compiles nothing"):
            random_tensors(DRAFTER, TRAINING.model_copy(update={"compile": compiled}), alone)
