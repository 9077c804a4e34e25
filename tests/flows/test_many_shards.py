"""The benchmark of many shards in small: interrupted, continued with what is missing, fit to be looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.many_shards import ask, make_config, query_times, run
from flows.config import dump_config
from flows.extract_plan import plan_dataset

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]


@pytest.mark.long
def test_many_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings import PREFECT_API_URL

    monkeypatch.setattr("benchmarks.many_shards.LOOK_EVERY_S", 0.02)
    api = str(PREFECT_API_URL.value())
    config = make_config(tmp_path, shards=60, per_child=14)
    path = tmp_path / "extract.yaml"
    path.write_text(dump_config(config))
    dataset = plan_dataset(config)
    assert len(dataset.plan.shards) == 60
    first = run(path, dataset, api, tmp_path, until=10)
    missing = dataset.missing()
    assert first["new_shards"] == 60 - len(missing) and missing
    second = run(path, dataset, api, tmp_path, until=60)
    assert second["new_shards"] == len(missing) and dataset.sealed
    assert second["flow_peak_rss_mb"] < 1500

    parts = {"flows": {"name": {"any_": ["extract-shards"]}}, "sort": "START_TIME_DESC"}
    of_this = [
        part for part in ask(api, "/flow_runs/filter", parts) if dataset.uri in str(part["parameters"])
    ]
    of_second = of_this[: -(-len(missing) // 14)]
    assert sorted(shard for part in of_second for shard in part["parameters"]["shards"]) == missing
    assert set(query_times(api, of_second[0]["id"])) >= {"graph", "tasks", "logs", "artifacts"}
