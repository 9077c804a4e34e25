"""A target that is compiled starts from an artifact as training does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.config import ExtractConfig
from flows.extract_plan import plan_dataset
from flows.extract_steps import ShardRunner, open_pool, wanted_shards
from flows.launch import Message
from storage.compile_cache import list_versions
from storage.objects import open_store

MakeConfig = Callable[..., ExtractConfig]


def table_of_last_run(key: str = "compile-cache") -> dict[str, str]:
    """What the newest artifact of this key says."""
    from prefect.artifacts import Artifact

    found: Any = Artifact.get(key)
    return {row["what"]: row["value"] for row in json.loads(found.data)}


@pytest.mark.slow
@pytest.mark.usefixtures("prefect")
def test_a_wiped_machine_compiles_nothing(
    extract_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.extract import extract_hidden_states

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = extract_config(limit=6)
    compiled = {"batching": "packed", "compile_layers": True, "num_taps": 1}
    caches = {"uri": str(tmp_path / "caches"), "local_root": str(tmp_path / "root")}
    config = extract_config(
        limit=6,
        target=config.target.model_dump() | compiled,
        cache=caches,
        workers=config.workers.model_dump() | {"silence_timeout_s": 600},
    )
    assert extract_hidden_states(config, return_state=True).is_completed()
    cold = table_of_last_run()
    assert cold["state"] == "cold" and cold["nothing_compiled"] == "False"
    assert cold["compiling_threads"] == "['MainThread']", "a shard is finished in another one"
    versions, _ = list_versions(open_store(caches["uri"]))
    assert {version.name for version in versions if version.current} == {cold["version"]}

    shutil.rmtree(caches["local_root"])
    # Other chats, another data set: the same graphs, whatever the number of tokens.
    other = config.model_copy(update={"limit": 12, "codec": "lossless"})
    assert extract_hidden_states(other, return_state=True).is_completed()
    warm = table_of_last_run()
    assert (warm["state"], warm["version"]) == ("restored", cold["version"])
    assert warm["nothing_compiled"] == "True", warm["compiled"]
    assert warm["compiling_threads"] == "['MainThread']", "which traces at every start"
    assert float(warm["seconds_saved"]) > 0
    assert list_versions(open_store(caches["uri"]))[0] == versions


def test_an_uncompiled_target_asks_for_no_artifact(extract_config: MakeConfig, tmp_path: Path) -> None:
    config = extract_config(cache={"uri": str(tmp_path / "caches"), "local_root": str(tmp_path / "root")})
    dataset = plan_dataset(config)
    told: list[Message] = []
    with open_pool(config, dataset) as pool:
        runner = ShardRunner(pool, redo=False)
        runner.prepare(told.append)
        runner.attempt(wanted_shards(dataset)[0], told.append)
    assert pool.cache is None and not (tmp_path / "caches").exists() and not (tmp_path / "root").exists()
    assert "compile_report" not in {message["kind"] for message in told}
