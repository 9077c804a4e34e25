"""Large extractions as child runs on a real server: on one machine, and on the machines of a pool."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.config import ExtractConfig
from flows.extract_plan import plan_dataset
from flows.ranks import descendants
from storage.dataset import open_dataset
from tests.flows.test_extract import shard_files, spoil
from tests.flows.test_up import BIN, Up, command_of, starting, wait_for

pytestmark = pytest.mark.slow
MakeConfig = Callable[..., ExtractConfig]


def in_state(children: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [child for child in children if child["state_name"] == name]


@contextlib.contextmanager
def another_worker(up: Up, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A second worker for the pool, as another machine would bring."""
    command = [BIN / "prefect", "worker", "start", "--pool", "dflash", "--type", "process", "--limit", "2"]
    with (folder / "second.log").open("wb") as log:
        worker = subprocess.Popen(
            command, cwd=folder, env={**up.environment, "PREFECT_API_URL": up.api}, stdout=log, stderr=log
        )
    try:
        query = {"workers": {"status": {"any_": ["ONLINE"]}}}
        there = "/work_pools/dflash/workers/filter"
        wait_for("the second worker", lambda: len(up.ask.post(there, json=query).json()) == 2 or None)
        yield worker
    finally:
        worker.terminate()
        worker.wait(60)


def test_one_machine_does_its_children_itself_in_the_place_of_their_parent(
    extract_config: MakeConfig, tmp_path: Path
) -> None:
    config = extract_config(shard_tokens=100, shards_per_child=4, codec="lossless")
    dataset = plan_dataset(config)
    planned = len(dataset.plan.shards)
    with starting(tmp_path, "--limit", "1") as up:
        run = up.start(config, "to-be-killed")
        (worker,) = wait_for("the worker", lambda: up.workers() or None)
        os.kill(worker, signal.SIGSTOP)
        wait_for("the first child", lambda: in_state(up.children(run), "Running") or None)
        up.kill(run)
        os.kill(worker, signal.SIGKILL)
        assert len(dataset.missing()) == planned
        up.retry(run)
        rows = [row for row in up.table(run, "child-runs") if row["state"] == "Completed"]
        shown = [row for child in up.children(run) for row in up.table(child["id"], "shards")]
    assert open_dataset(dataset.uri).sealed
    assert [row["done"] for row in rows] == [4] * (planned // 4) + [planned % 4][: planned % 4]
    assert sum(row["tokens"] for row in rows) == dataset.plan.tokens and all(row["tokens/s"] for row in rows)
    assert sorted(row["shard"] for row in shown) == list(range(planned))
    assert {row["token_budget"] for row in shown} == {512}


@pytest.mark.long
def test_children_on_a_pool_outlive_their_parent_and_its_retry_waits_for_them(
    extract_config: MakeConfig, tmp_path: Path
) -> None:
    workers = {"slots": ["cpu"], "attempts": 1, "silence_timeout_s": 600}
    config = extract_config(shard_tokens=100, shards_per_child=5, codec="lossless", workers=workers)
    dataset = plan_dataset(config)
    planned = len(dataset.plan.shards)
    good = spoil(dataset, 1)
    with starting(tmp_path, "--limit", "2") as up, another_worker(up, tmp_path) as second:

        def capturing() -> list[int]:
            below = [*descendants(up.process.pid), *descendants(second.pid)]
            return [pid for pid in below if "-m flows.extract_worker" in command_of(pid)]

        run = up.start(config, "to-be-killed", only=list(range(planned)))
        held = wait_for("a worker", lambda: capturing() or None)[0]
        os.kill(held, signal.SIGSTOP)
        chunks = -(-planned // 5)
        wait_for("all children", lambda: len(up.children(run)) == chunks or None)
        up.kill(run)

        def goes_on() -> bool | None:
            if up.run(run)["state_type"] == "CRASHED":  # a busy worker may say so once more, after a retry
                up.prefect("flow-run", "retry", str(run))
            return "child runs of an earlier attempt go on" in up.log_of(run) or None

        wait_for("the retry", goes_on)
        os.kill(held, signal.SIGCONT)
        up.await_state(run, "FAILED")
        # Only the bad shard may be given to a second child, when its own has ended; it condemns no other.
        given = Counter(shard for child in up.children(run) for shard in child["parameters"]["shards"])
        assert given.keys() == set(range(planned))
        assert {shard for shard, times in given.items() if times > 1} <= {1}
        assert f"1 shards failed: 1; data set {dataset.uri}" in up.run(run)["state"]["message"]
        query = {"artifacts": {"flow_run_id": {"any_": [str(run)]}, "key": {"any_": ["failed-shards"]}}}
        (failures,) = up.ask.post("/artifacts/filter", json=query).json()
        assert "damaged" in failures["data"] and failures["data"].count("\n| ") == 2 + 1
        before = shard_files(dataset)
        assert len(before) == planned - 1

        dataset.store.put_bytes("samples/00001.parquet", good, overwrite=True)
        up.retry(run)
        assert f"{planned - 1} of them are not" in up.log_of(run)
    assert open_dataset(dataset.uri).sealed
    assert before.items() < shard_files(dataset).items()
