"""Compiled code is called from the main thread of a rank and from nowhere else, whatever torch is installed.

torch keeps "somebody is tracing" in one flag for a whole process: where a compile in one thread meets a call
of compiled code in another, the call raises (benchmarks/thread_race.py shows it). Ranks that are processes, and
call compiled code in one thread each, cannot meet. So that is what is asserted here, of the real ranks.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.callback import callback_handler

from flows.ranks import run_ranks
from tests.flows.test_build_cache import DRAFTER, TRAINING

MAIN = "MainThread"


def watched(module: str, *arguments: str, ranks: int) -> list[dict[str, Any]]:
    """Run a rank module under the watch; return what each rank told of its threads."""
    told: list[dict[str, Any]] = []

    def keep(message: dict[str, Any]) -> None:
        if message["kind"] == "threads":
            told.append(message)

    run_ranks(
        "tests.flows.watched_rank", [module, *arguments], ranks=ranks, silence_timeout_s=300, on_message=keep
    )
    assert len(told) == ranks
    return told


def test_the_watch_sees_a_second_thread() -> None:
    (told,) = watched("tests.flows.faulty_rank", ranks=1)
    assert told["calls"] == {MAIN: 1, "second": 1}


def test_ranks_call_compiled_code_in_their_main_thread_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "build.json"
    values = {"drafter": DRAFTER.model_dump(mode="json"), "training": TRAINING.model_dump(mode="json")}
    file.write_text(json.dumps(values))
    compiles_here: Counter[str] = Counter()

    def note(_: object) -> None:
        compiles_here["any"] += 1

    callback_handler.register_start_callback(note)
    try:
        told = watched("flows.cache_rank", str(file), ranks=2)
    finally:
        callback_handler.remove_start_callback(note)
    for rank in told:
        assert set(rank["calls"]) == {MAIN} and rank["calls"][MAIN] > 3
        assert set(rank["compiles"]) == {MAIN} and set(rank["traces"]) == {MAIN}
    assert not compiles_here, "the launcher itself compiles nothing"
