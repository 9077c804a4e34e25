"""On GPUs: an artifact with flex attention and Triton kernels, for wiped machines and for several ranks.

Run on a machine with a CUDA device: python -m pytest tests/gpu/test_compile_cache_gpu.py
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dflash_core.drafter import DrafterConfig
from dflash_core.training import TrainingConfig
from flows.build_cache import build_cache
from storage.compile_session import CompileCacheConfig

pytestmark = pytest.mark.gpu

DRAFTER = DrafterConfig(
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rope_theta=1e6,
    vocab_size=2048,
    block_size=16,
    mask_token_id=2047,
    tap_layer_ids=(1, 3),
    target_num_layers=6,
)
TRAINING = TrainingConfig.model_validate({"row_tokens": 1024, "anchors_per_row": 32})


@dataclass
class Built:
    """What one rank on the first GPU compiled and published."""

    cache: CompileCacheConfig
    summary: dict[str, Any]

    def start_wiped(self, gpus: Sequence[str]) -> dict[str, Any]:
        """Start ranks on these GPUs on a machine whose caches are wiped."""
        shutil.rmtree(self.cache.root)
        return build_cache(DRAFTER, TRAINING, self.cache, gpus=gpus)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("compile-cache")
    cache = CompileCacheConfig(uri=str(folder / "store"), local_root=str(folder / "root"))
    return Built(cache, build_cache(DRAFTER, TRAINING, cache, gpus=["0"]))


def test_a_wiped_machine_compiles_nothing(built: Built) -> None:
    cold = built.summary
    assert cold["state"] == "cold" and cold["version"] is not None and not cold["nothing_compiled"]
    warm = built.start_wiped(["0"])
    assert (warm["state"], warm["version"]) == ("restored", cold["version"])
    assert warm["nothing_compiled"], warm["compiled"]
    assert warm["first_optimizer_step_seconds"] < cold["first_optimizer_step_seconds"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_artifact_serves_all_ranks(built: Built) -> None:
    gpus = [str(number) for number in range(torch.cuda.device_count())]
    warm = built.start_wiped(gpus)
    assert (warm["state"], warm["version"]) == ("restored", built.summary["version"])
    assert warm["nothing_compiled"] and len(warm["compiled"]) == len(gpus), warm["compiled"]
