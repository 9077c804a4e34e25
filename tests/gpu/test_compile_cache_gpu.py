"""On GPUs: an artifact with flex attention and Triton kernels, for wiped machines and for several ranks.

Run on a machine with a CUDA device: python -m pytest tests/gpu/test_compile_cache_gpu.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

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


def test_one_artifact_serves_wiped_machines_and_all_ranks(tmp_path: Path) -> None:
    cache = CompileCacheConfig(uri=str(tmp_path / "store"), local_root=str(tmp_path / "root"))
    cold = build_cache(DRAFTER, TRAINING, cache, gpus=["0"])
    assert cold["state"] == "cold" and cold["version"] is not None and not cold["nothing_compiled"]
    gpus = [str(number) for number in range(torch.cuda.device_count())]
    for used in [gpus[:1]] + [gpus] * (len(gpus) > 1):
        shutil.rmtree(tmp_path / "root")
        warm = build_cache(DRAFTER, TRAINING, cache, gpus=used)
        assert (warm["state"], warm["version"]) == ("restored", cold["version"])
        assert warm["nothing_compiled"], warm["compiled"]
        assert len(warm["compiled"]) == len(used)
