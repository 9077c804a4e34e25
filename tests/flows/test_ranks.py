"""Ranks under torchrun: their messages, their errors, and that none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dflash_core.compile_watch import CompileReport
from dflash_core.configuration import UserError
from flows.ranks import RanksFailed, run_ranks
from tests.flows.test_launch import wait_until_gone
from tests.flows.toy_rank import compile_report

TOY = "tests.flows.toy_rank"


def hellos(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted((m for m in messages if m["kind"] == "hello"), key=lambda m: m["rank"])


def test_ranks_speak_and_end() -> None:
    heard: list[dict[str, Any]] = []
    run_ranks(TOY, ["fine"], ranks=2, on_message=heard.append)
    assert [(m["rank"], m["world"]) for m in hellos(heard)] == [(0, "2"), (1, "2")]


def test_long_messages_arrive_whole_from_ranks_that_share_a_pipe() -> None:
    heard: list[dict[str, Any]] = []
    run_ranks(TOY, ["reports"], ranks=4, on_message=heard.append)
    reports = [m for m in heard if m["kind"] == "compile_report"]
    assert len(json.dumps(reports[0])) > 30_000
    for report in map(CompileReport.model_validate, reports):
        assert report == compile_report(report.rank)
    assert Counter(m["rank"] for m in reports) == dict.fromkeys(range(4), 100)
    assert {m["kind"] for m in heard} == {"hello", "compile_report"}


def test_the_callers_environment_counts() -> None:
    heard: list[dict[str, Any]] = []
    run_ranks(TOY, ["fine"], ranks=1, environment={"OMP_NUM_THREADS": "77"}, on_message=heard.append)
    assert hellos(heard)[0]["threads"] == "77"


def test_the_first_ranks_error_is_the_error_and_ends_the_others() -> None:
    heard: list[dict[str, Any]] = []
    with pytest.raises(RanksFailed, match=r"(?s)rank 1: RuntimeError: it broke.*Traceback"):
        run_ranks(TOY, ["error"], ranks=2, on_message=heard.append)
    for message in hellos(heard):
        wait_until_gone(message["pid"])
    with pytest.raises(UserError, match=r"^mend this$"):
        run_ranks(TOY, ["user"], ranks=2)
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(TOY, ["kill"], ranks=2)


def test_silent_ranks_are_ended() -> None:
    heard: list[dict[str, Any]] = []
    with pytest.raises(RanksFailed, match="no rank said anything for 4 s"):
        run_ranks(TOY, ["hang"], ranks=1, silence_timeout_s=4, on_message=heard.append)
    wait_until_gone(hellos(heard)[0]["pid"])


@pytest.mark.parametrize("shutdown_s", [4, 600])
def test_a_rank_that_does_not_end_when_another_has_failed_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shutdown_s: int
) -> None:
    """However long ranks may take that are asked to stop."""
    monkeypatch.setattr("flows.ranks.FAILURE_S", 4)
    failed, told = 0.0, []

    def on_message(message: dict[str, Any]) -> None:
        nonlocal failed
        failed = failed or (time.monotonic() if message["kind"] == "error" else 0.0)
        if message["kind"] in ("hello", "log"):
            told.append(message)

    arguments = ["stubborn", str(tmp_path / "deaf")]
    with pytest.raises(RanksFailed, match="does not hear"):
        run_ranks(TOY, arguments, ranks=2, shutdown_s=shutdown_s, on_message=on_message)
    assert 4 <= time.monotonic() - failed < 20  # torchrun's own patience is 30 s
    assert [m["text"] for m in told if m["kind"] == "log"] == [
        "rank 1 has failed: RuntimeError: the other one does not hear"
    ]
    for message in hellos(told):
        wait_until_gone(message["pid"])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_their_parent(how: signal.Signals) -> None:
    script = f"""
from flows.ranks import run_ranks
run_ranks({TOY!r}, ["hang"], ranks=2, on_message=lambda m: print(m.get("pid", ""), flush=True))
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids: list[int] = []
    while len(pids) < 2:
        if line := parent.stdout.readline().strip():
            pids.append(int(line))
    parent.send_signal(how)
    parent.wait(20)
    for pid in pids:
        wait_until_gone(pid)


def test_a_rank_whose_torchrun_was_killed_before_it_was_one_ends() -> None:
    heard: list[dict[str, Any]] = []

    def on_message(message: dict[str, Any]) -> None:
        heard.append(message)
        if message["kind"] == "hello":
            os.kill(message["parent"], signal.SIGKILL)

    with pytest.raises(RanksFailed, match=r"(?s)exit code -9.*torchrun ended while this rank started"):
        run_ranks("tests.flows.late_rank", [], ranks=1, on_message=on_message)
    wait_until_gone(hellos(heard)[0]["pid"])
    assert "trained" not in {message["kind"] for message in heard}


def test_what_ranks_must_not_lose_is_written_though_nobody_listens_any_more(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    script = f"""
from flows.ranks import run_ranks
def told(message):
    print(message.get("pid", ""), flush=True)

run_ranks({TOY!r}, ["saving", {str(saved)!r}], ranks=1, on_message=told)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_until_gone(pid, 60)
    assert saved.exists()


def test_gpus_and_ranks_must_agree() -> None:
    with pytest.raises(UserError, match="3 ranks need 3 GPUs"):
        run_ranks(TOY, [], ranks=3, gpus=["0", "1"])
