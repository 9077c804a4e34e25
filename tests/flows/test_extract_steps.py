"""The steps before the shards outlive the death of a process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.config import ExtractConfig
from flows.extract_steps import write_responses
from flows.launch import ignore, python_module


def test_responses_go_on_when_their_process_is_killed(
    extract_config: Callable[..., ExtractConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    responses = {
        "output": str(tmp_path / "responses"),
        "generation": {"max_new_tokens": 2},
        "part_records": 2,
        "batch_size": 2,
    }
    one_part = json.dumps({"kind": "progress", "done": 2})
    killed = [*python_module("tests.flows.signalled"), "SIGKILL", one_part, str(tmp_path / "killed")]
    monkeypatch.setattr("flows.extract_steps.python_module", lambda name: [*killed, name])
    write_responses(extract_config(responses=responses, limit=4), ignore)
    assert (tmp_path / "killed").exists()
    parts = sorted((tmp_path / "responses").glob("part-*.jsonl"))
    assert [len(part.read_text().splitlines()) for part in parts] == [2, 2]
