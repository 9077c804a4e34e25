"""Rates, use of the device and waiting, from reports made by hand and formulas written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_core.distributed import World
from dflash_core.metrics import Summary
from dflash_core.step_clock import StepReport
from dflash_core.training import TrainingConfig
from flows.train_meter import TrainMeter
from tests.core.tiny_drafter import tiny_config

TRAINING = TrainingConfig(row_tokens=100, anchors_per_row=20, rows_per_step=3)
READ = Summary(
    loss=1.0,
    cross_entropy=1.0,
    accuracy=0.5,
    acceptance_length=2.0,
    acceptance_length_whole=2.0,
    slot_loss=[1.0],
    slot_accuracy=[0.5],
    slot_acceptance=[0.5],
    scored_slots=600,
    blocks=200,
    context_tokens=800,
)


def meter(size: int = 1, device: str = "cpu") -> TrainMeter:
    return TrainMeter(tiny_config(), TRAINING, World(rank=0, size=size, device=torch.device(device)))


def read(meter: TrainMeter, times: list[tuple[float, float]]) -> dict[str, Any]:
    for step_ms, gap_ms in times:
        meter.add(StepReport(optimizer_step=0, stop=False, halted_at=-1, step_ms=step_ms, gap_ms=gap_ms))
    return meter.values(READ, steps=4)


def test_rates_take_the_median_step_and_the_mean_wait() -> None:
    values = read(meter(), [(90.0, 0.0), (90.0, 40.0), (90.0, 0.0), (900.0, 0.0)])
    assert (values["step_ms"], values["data_wait_ms"]) == (90.0, 10.0)
    assert values["context_tokens_per_s"] == pytest.approx(800 / 4 / 0.1)
    assert values["draft_tokens_per_s"] == pytest.approx(200 * 5 / 4 / 0.1), "blocks in use alone"
    assert values["loss"] == 1.0 and "mfu" not in values and "memory_reserved_gib" not in values


def test_a_reading_counts_what_finished_since_the_last_one() -> None:
    ours = meter()
    read(ours, [(500.0, 9.0)])
    values = read(ours, [(90.0, 0.0)])
    assert (values["step_ms"], values["data_wait_ms"]) == (90.0, 0.0)
    assert "step_ms" not in read(ours, [])


def products_of_a_row() -> float:
    """2 x rows x inner x columns of each product in a pass; backward makes two more, the frozen head one,
    which only scored slots go through.
    """
    width, inner, heads, kv_heads, features, vocabulary = 32, 48, 4, 2, 8, 96
    queries, context, taps, layers = 20 * 5, 100, 2, 3
    total = 3 * 2 * context * (taps * width) * width
    for _ in range(layers):
        total += 3 * 2 * context * width * (2 * kv_heads * features)
        total += 3 * 2 * queries * width * (2 * kv_heads * features)
        total += 3 * 2 * queries * width * (heads * features) * 2
        total += 3 * 2 * queries * width * inner * 3
    scored = 600 / 4 / 3  # of four steps of three rows
    return total + 2 * 2 * scored * width * vocabulary


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_operations_are_those_of_the_rows_and_not_of_padding(ranks: int) -> None:
    """Two ranks take two rows each, of which one is empty; of six ranks three have nothing to do."""
    values = read(meter(ranks), [(90.0, 10.0)])
    assert values["tflops_per_device"] == pytest.approx(3 / ranks * products_of_a_row() / 0.1 / 1e12)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_mfu_is_the_share_of_what_the_device_can_do(
    monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    values = read(meter(device="cuda"), [(90.0, 10.0)])
    if peak is None:
        assert "mfu" not in values
    else:
        assert values["mfu"] == pytest.approx(products_of_a_row() * 3 / 0.1 / 1e12 / peak)
    assert values["memory_peak_gib"] >= 0.0 and values["memory_reserved_gib"] >= 0.0
