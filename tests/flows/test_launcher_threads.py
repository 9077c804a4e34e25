"""Compiled code is called from the main thread of a rank and from nowhere else, whatever torch is installed.

torch keeps "somebody is tracing" in one flag for a whole process: where a compile in one thread meets a call
of compiled code in another, the call raises (benchmarks/thread_race.py shows it). Ranks that are processes,
and call compiled code in one thread each, cannot meet. So that is what is asserted here, of the real ranks.

Ranks that compile also say whether they are on the fast path: that too is asserted of real ones.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._dynamo.callback import callback_handler

from dflash_core.fast_path import WARM_STEPS, WINDOW
from flows.launch import Message, python_module
from flows.ranks import RanksFailed, run_ranks
from flows.train_worker import TrainJob
from storage.checkpoints import Checkpoints
from storage.dataset import Dataset
from storage.objects import open_store
from tests.flows.test_train_worker import dataset, make_job, metrics, target, write_job

__all__ = ["dataset", "target"]
MAIN = "MainThread"


GUARD = "size mismatch at index 0. expected 3, actual 4"
QUIET = {"compile": True, "log_every": 99, "checkpoint_every": 99, "validation_fraction": 0.0}
"""Nothing lies between the steps of a run but the rows of the next one."""


@pytest.fixture(autouse=True)
def one_thread_of_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_the_watch_sees_a_second_thread() -> None:
    command = [*python_module("tests.flows.watched_rank"), "tests.flows.faulty_rank"]
    environment = {**os.environ, "RANK": "0", "PYTHONUNBUFFERED": "1"}
    ran = subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE, timeout=120)
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["calls"] == {MAIN: 1, "second": 1}


@pytest.fixture
def compiles_here() -> Iterator[Counter[str]]:
    """Count what this process, the launcher, compiles."""
    counted: Counter[str] = Counter()

    def note(_: object) -> None:
        counted["any"] += 1

    callback_handler.register_start_callback(note)
    yield counted
    callback_handler.remove_start_callback(note)


def test_ranks_that_train(dataset: Dataset, target: str, tmp_path: Path, compiles_here: Counter[str]) -> None:
    """With the reader's threads, checkpoints written in the background, validation, and two ranks."""
    job = make_job(dataset, target, tmp_path, compile=True, max_steps=4, checkpoint_every=2, validate_every=2)
    told: list[Message] = []

    def keep(message: Message) -> None:
        if message["kind"] == "threads":
            told.append(message)

    arguments = ["flows.train_worker", write_job(job)]
    run_ranks("tests.flows.watched_rank", arguments, ranks=2, silence_timeout_s=300, on_message=keep)
    assert len(told) == 2
    for rank in told:
        assert set(rank["calls"]) == {MAIN} and rank["calls"][MAIN] > 20
        assert set(rank["compiles"]) == {MAIN} and set(rank["traces"]) == {MAIN}
    assert len(metrics(job)) >= 6, "the run went to its end"
    assert not compiles_here, "the launcher itself compiles nothing"


def test_metrics_name_what_takes_another_rank_off_the_fast_path(
    dataset: Dataset, target: str, tmp_path: Path
) -> None:
    job = make_job(dataset, target, tmp_path, compile=True, on_recompile="warn", max_steps=12, log_every=12)
    told: list[Message] = []
    run_ranks("tests.flows.recompiling_rank", [write_job(job)], ranks=2, on_message=told.append)
    recompiled = [m for m in told if m["kind"] == "off_fast_path" and GUARD in str(m["reasons"])]
    assert [m["rank"] for m in recompiled] == [1]
    assert [row["off_fast_path/recompile"] for row in metrics(job) if "loss" in row] == [1]


def test_a_recompile_ends_the_run_with_its_guard(dataset: Dataset, target: str, tmp_path: Path) -> None:
    job = make_job(dataset, target, tmp_path, compile=True)
    with pytest.raises(RanksFailed, match=f"(?s)recompile.*{GUARD}"):
        run_ranks("tests.flows.recompiling_rank", [write_job(job)], ranks=2)
    assert Checkpoints(open_store(job.config.output), {}, keep=9).steps() == []
    assert not Path(job.export).exists()


def test_a_run_says_that_it_is_on_the_fast_path(dataset: Dataset, target: str, tmp_path: Path) -> None:
    job = make_job(dataset, target, tmp_path, **QUIET, epochs=40, max_steps=30)
    wide = job.drafter.model_copy(update={"intermediate_size": 1 << 15})  # steps long beside their rows
    told = told_by_starved(job.model_copy(update={"drafter": wide}), 0.0)
    (fast,) = [m for m in told if m["kind"] == "fast_path"]
    assert WARM_STEPS + WINDOW < fast["step"] <= 30
    (line,) = [m["text"] for m in told if "on the fast path" in m.get("text", "")]
    assert line.startswith(
        f"on the fast path at step {fast['step']}: {fast['step_ms']:.1f} ms a step, no rec"
    )
    assert line.endswith("no benchmark of these shapes is known (training.expected_step_ms)")


@pytest.mark.parametrize(
    ("rows_per_step", "often", "named_at"),
    [
        # As soon as five steps after warm-up have been reported; most of the waiting lies within the step.
        (8, {}, 10),
        (1, {"log_every": 1}, 9),  # a reading after each step settles it
    ],
)
def test_a_run_starved_of_data_is_named_and_not_on_the_fast_path(
    dataset: Dataset, target: str, tmp_path: Path, rows_per_step: int, often: dict[str, int], named_at: int
) -> None:
    settings = QUIET | {"epochs": 60, "max_steps": 14, "rows_per_step": rows_per_step} | often
    job = make_job(dataset, target, tmp_path, **settings)
    told = told_by_starved(job, 0.2 / rows_per_step)
    kinds = [m["kind"] for m in told]
    named = [m for m in told if m["kind"] == "off_fast_path" and "for data" in str(m["reasons"])]
    assert named[0]["step"] == named_at
    assert "fast_path" not in kinds
    row = [row for row in metrics(job) if "loss" in row][-1]
    assert row["off_fast_path/data_wait"] == 1 and row["signs_off_fast_path"] >= 1
    assert row["data_wait_ms"] > 150


def told_by_starved(job: TrainJob, seconds: float) -> list[Message]:
    told: list[Message] = []
    arguments = [str(seconds), write_job(job)]
    run_ranks("tests.flows.starved_rank", arguments, ranks=1, on_message=told.append)
    return told
