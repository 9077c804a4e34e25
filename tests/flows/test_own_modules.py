"""Children import what their parent did, not what lies in the current folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.launch import WorkerPool
from flows.ranks import run_ranks
from tests.flows.test_launch import TOY as TOY_WORKER
from tests.flows.test_ranks import TOY as TOY_RANK


def test_a_package_of_that_name_in_the_current_folder_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flows", "storage", "dflash_core"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('another package')")
    monkeypatch.chdir(tmp_path)
    with WorkerPool(["cpu"], TOY_WORKER, {}) as workers:
        assert workers.run({"name": "first"})[0]["name"] == "first"
    heard: list[str] = []
    run_ranks(TOY_RANK, ["fine"], ranks=1, on_message=lambda message: heard.append(message["kind"]))
    assert "hello" in heard
