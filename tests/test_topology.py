"""The benchmark of both stages on one host in small, spread over two commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fleet, topology
from dflash_core.records import Sample


def short_chats(tokens: int, seed: int) -> list[Sample]:
    """Random chats of 128 tokens, so many tokens in all."""
    draw = np.random.default_rng(seed)
    return [
        Sample(
            sample_id=f"chat-{i}",
            token_ids_T=draw.integers(0, 256, 128).astype(np.int32),
            loss_mask_T=np.ones(128, bool),
        )
        for i in range(tokens // 128)
    ]


@pytest.mark.long
@pytest.mark.slow
def test_topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "chats", short_chats)
    sizes = ["--shards-per-gpu", "6", "--shard-tokens", "256", "--batch-tokens", "512", "--steps", "5"]

    def run(phases: str, *more: str) -> int:
        where = ["--shape", "tiny", "--extract", "cpu", "--train", "cpu", "--folder", str(tmp_path)]
        return topology.main([*where, *sizes, "--phases", phases, *more])

    assert run("train,hours") == 2  # there is nothing to train from, or to compute from
    assert run("extract") == 0
    shutil.copytree(tmp_path / "extract", tmp_path / "kill")  # as an interrupted command leaves it
    assert run("kill,train,hours") == 0
    found = json.loads((tmp_path / "findings.json").read_text())["found"]
    assert not [name for name in found if "failed" in name]
    assert found["kill: objects"] == {"identical": True, "count": 8}
    assert found["kill"]["workers_started"] == 2
    assert found["kill"]["longest_between_shards"] > 2 * found["kill"]["seconds_between_shards"]
    assert found["extract"]["tokens"] == found["kill"]["tokens"] == 6 * 256
    assert 0 < found["extract"]["steady_tokens_per_second"] < 100_000
    assert found["hours"]["offline_hours"] > found["hours"]["extraction_hours"] > 0
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.count("-") == 0) == [
        "extract",
        "findings.json",
    ]
    with pytest.raises(SystemExit, match="another shard_tokens"):
        run("extract", "--shard-tokens", "512")
