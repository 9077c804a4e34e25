"""On a GPU: a target whose kernels were compiled elsewhere is captured without compiling anything.

Run it on a machine with a CUDA device: python -m pytest tests/gpu/test_extract_cache_gpu.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.config import ExtractConfig
from flows.extract_plan import plan_dataset
from flows.extract_steps import ShardRunner, finish_dataset, open_pool, wanted_shards
from flows.launch import ignore
from tests.tiny import MASK_TOKEN_ID

pytestmark = pytest.mark.gpu


def configuration(folder: Path, target: Path, chats: int) -> ExtractConfig:
    """An extraction of so many chats, on the first GPU, in packed batches of different lengths."""
    path = folder / f"chats-{chats}.jsonl"
    with path.open("w") as file:
        for i in range(chats):
            turns = [("user", f"question {i}"), ("assistant", "word " * (3 + 7 * i % 25))]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"id": f"chat-{i}", "messages": messages}) + "\n")
    return ExtractConfig.model_validate(
        {
            "store": str(folder / "store"),
            "chats": [str(path)],
            "target": {"path": str(target), "num_taps": 3, "batch_tokens": 512, "mask_token": MASK_TOKEN_ID},
            "shard_tokens": 600,
            "workers": {"slots": ["0"]},
            "cache": {"uri": str(folder / "caches"), "local_root": str(folder / "root")},
        }
    )


def capture(config: ExtractConfig) -> dict[str, Any]:
    """Capture all shards; return the summary of the compile cache."""
    dataset = plan_dataset(config)
    with open_pool(config, dataset) as pool:
        runner = ShardRunner(pool, redo=False)
        runner.prepare(ignore)
        for shard in wanted_shards(dataset):
            runner.attempt(shard, ignore)
    finish_dataset(dataset)
    assert pool.cache is not None
    return pool.cache


def test_a_wiped_machine_compiles_nothing(tmp_path: Path, tiny_target_dir: Path) -> None:
    cold = capture(configuration(tmp_path, tiny_target_dir, 6))
    assert cold["state"] == "cold" and cold["version"] is not None and not cold["nothing_compiled"]
    shutil.rmtree(tmp_path / "root")
    warm = capture(configuration(tmp_path, tiny_target_dir, 18))
    assert (warm["state"], warm["version"]) == ("restored", cold["version"])
    assert warm["nothing_compiled"], warm["compiled"]
