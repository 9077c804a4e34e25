"""Two runs of one host and GPU: the second waits, says for whom, and gets it once the first is all gone."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flows.devices import hold_devices, visible_gpus
from tests.flows.test_launch import TOY as TOY_WORKER
from tests.flows.test_launch import alive, wait_until_gone
from tests.flows.test_ranks import TOY as TOY_RANK

HOLDER = """
import sys
from pathlib import Path
from flows.devices import hold_devices

with hold_devices(["1,2"], Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
TRAINING = f"""
import sys
from pathlib import Path
from flows.devices import hold_devices
from flows.ranks import run_ranks

def told(message):
    if message["kind"] == "hello":
        print(message["pid"], flush=True)

with hold_devices(["1"], Path(sys.argv[1])):
    run_ranks({TOY_RANK!r}, ["stubborn"], ranks=1, shutdown_s=4, on_message=told)
"""
EXTRACTION = f"""
import sys
from pathlib import Path
from flows.devices import hold_devices
from flows.launch import WorkerPool

pool = WorkerPool(["1"], {TOY_WORKER!r}, {{}})
with hold_devices(["1"], Path(sys.argv[1])), pool:
    print(pool.run({{"name": 0}})[0]["pid"], flush=True)
    pool.run({{"name": 1, "seconds": 3600}})
"""


def test_a_gpu_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with hold_devices(["0", "cpu"], tmp_path):
        pass  # another GPU, and the CPU, are free
    got = threading.Event()

    def take() -> None:
        with hold_devices(["2"], tmp_path):
            got.set()

    waiting = threading.Thread(target=take)
    with caplog.at_level(logging.WARNING):
        waiting.start()
        while f"GPU 2 is used by process {holder.pid}, or" not in caplog.text:
            assert not got.wait(0.05)
        assert not got.wait(0.5)
    holder.kill()
    assert got.wait(60)
    waiting.join()
    holder.wait()


def begin(script: str, folder: Path) -> tuple[subprocess.Popen[str], int]:
    """Start a run; return it, and the id of a process that works for it."""
    run = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    return run, int(run.stdout.readline())


def test_a_gpu_is_waited_for_until_the_ranks_of_a_killed_run_have_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, rank = begin(TRAINING, tmp_path)
    run.kill()
    run.wait()
    assert alive(rank)  # it does not hear SIGTERM, as if it wrote its last checkpoint
    with hold_devices(["1"], tmp_path):
        assert not alive(rank)
    assert f"GPU 1 is used by process {run.pid}, or by what is left of its run" in caplog.text


def test_a_gpu_is_waited_for_until_the_workers_of_a_killed_run_have_ended(tmp_path: Path) -> None:
    run, worker = begin(EXTRACTION, tmp_path)
    os.kill(worker, signal.SIGSTOP)
    run.kill()
    run.wait()
    with (tmp_path / "gpu-1.lock").open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.kill(worker, signal.SIGCONT)
    with hold_devices(["1"], tmp_path):
        wait_until_gone(worker)


def test_numbers_count_within_what_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus("0,3") == ["0", "3"] and visible_gpus("cpu") == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert visible_gpus("0,1") == ["4", "6"] and visible_gpus("6") == ["6"]
