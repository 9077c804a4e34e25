"""Two runs of one host and one GPU: the second waits, says for whom, and gets it when the first is gone."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flows.devices import hold_devices
from flows.launch import visible_gpus

HOLDER = """
import sys
from pathlib import Path
from flows.devices import hold_devices

with hold_devices(["1,2"], Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
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
        assert not got.wait(0.5)
    assert f"GPU 2 is used by process {holder.pid}; waiting" in caplog.text
    holder.kill()
    assert got.wait(5)
    waiting.join()
    holder.wait()


def test_numbers_count_within_what_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus("0,3") == ["0", "3"] and visible_gpus("cpu") == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert visible_gpus("0,1") == ["4", "6"] and visible_gpus("6") == ["6"]
