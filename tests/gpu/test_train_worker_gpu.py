"""The main loop of a rank on a GPU: stopped and continued as whole, on the fast path, and it says how fast.

python -m pytest tests/gpu/test_train_worker_gpu.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flows.train_meter import PEAK_TFLOPS
from storage.dataset import Dataset
from tests.flows.test_train_worker import assert_same_course, dataset, metrics, target, whole_and_stopped

pytestmark = pytest.mark.gpu
__all__ = ["dataset", "target"]


def test_a_run_is_on_the_fast_path_and_goes_on_after_a_stop(
    dataset: Dataset, target: str, tmp_path: Path
) -> None:
    values = {"compute_dtype": "bfloat16", "rows_per_step": 64}  # a step is long beside what lies between two
    told, whole, stopped = whole_and_stopped(dataset, target, tmp_path, gpus=["0"], **values)
    assert_same_course(whole, stopped, noise=2e-2)
    (fast,) = [message for message in told if message["kind"] == "fast_path"]
    assert fast["step_ms"] > 0
    assert any("attention fused in every layer" in message.get("text", "") for message in told)
    rows = [row for row in metrics(whole) if "loss" in row]
    assert not any(row["off_fast_path/recompile"] for row in rows)
    assert 0 < rows[-1]["memory_peak_gib"] <= rows[-1]["memory_reserved_gib"]
    if any(card in torch.cuda.get_device_name() for card in PEAK_TFLOPS):
        assert 0 < rows[-1]["mfu"] < 1
