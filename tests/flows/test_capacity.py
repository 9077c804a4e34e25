"""The calculator: its arithmetic against sizes worked out by hand, its count of weights against a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dflash_core.target import describe_target, load_target
from dflash_core.target_identity import load_text_config
from flows.capacity import Rates, body_parameters, capacity, codec_ratio, gpu_count, validation_rows
from flows.cli import app
from flows.config import ExtractConfig, TrainConfig, dump_config

MakeExtract = Callable[..., ExtractConfig]
MakeTrain = Callable[..., TrainConfig]


def test_weights_are_those_that_a_capture_loads(extract_config: MakeExtract, tiny_target_dir: Path) -> None:
    config = extract_config().target
    _, text = load_text_config(config.path, None)
    target = load_target(config, "cpu")
    loaded = sum(p.numel() for layer in target.model.layers for p in layer.parameters())
    assert body_parameters(text, describe_target(config)[1]) == loaded
    whole = config.model_copy(update={"last_hidden": "before_final_norm"})
    assert body_parameters(text, describe_target(whole)[1]) > loaded


def test_the_arithmetic(extract_config: MakeExtract, train_config: MakeTrain) -> None:
    extract = extract_config(codec="lossless", workers={"slots": ["0", "1"]})
    train = train_config(gpus=["2", "3", "4"])
    rates = Rates(peak_tflops=1e-3, capture_share=0.5, training_share=0.25, ratio=2.0, network_gbit=8.0)
    body = body_parameters(load_text_config(extract.target.path, None)[1], describe_target(extract.target)[1])
    found = capacity(extract, train, 1e6, rates)
    assert found.bytes_per_token == 3 * 64 * 2 / 2
    assert found.stored_bytes == 1e6 * found.bytes_per_token
    assert found.extraction_tokens_per_s == pytest.approx(2 * 0.5e9 / (2 * body))
    assert found.extraction_hours == pytest.approx(1e6 / found.extraction_tokens_per_s / 3600)
    assert found.write_mb_per_s == pytest.approx(found.extraction_tokens_per_s * found.bytes_per_token / 1e6)
    fewer = train.drafter.model_copy(update={"tap_layer_ids": (1, 3)})
    narrow = capacity(extract, train.model_copy(update={"drafter": fewer}), 1e6, rates)
    assert narrow.stored_bytes == found.stored_bytes
    assert narrow.read_mb_per_s == pytest.approx(narrow.training_tokens_per_s * 2 * 64 * 2 / 2 / 1e6)
    alone = capacity(extract, train_config(gpus=["2"]), 1e6, rates)
    assert found.training_tokens_per_s == pytest.approx(3 * alone.training_tokens_per_s)
    assert found.training_hours == pytest.approx(3 * 1e6 / found.training_tokens_per_s / 3600)
    row_seconds = 3 * train.training.row_tokens / found.training_tokens_per_s
    every = train.training.model_copy(update={"validate_every": 7, "validation_rows": 5, "max_steps": 70})
    bounded = capacity(extract, train.model_copy(update={"training": every}), 1e6, rates)
    hours = 10 * 5 * row_seconds / 3 / 3600
    assert hours / 3 < bounded.validation_hours < hours / 2
    steps_s = 70 * train.training.rows_per_step * train.training.row_tokens / found.training_tokens_per_s
    assert bounded.training_hours == pytest.approx(steps_s / 3600)
    whole = train.training.model_copy(update={"validation_rows": None})
    unbounded = capacity(extract, train.model_copy(update={"training": whole}), 1e6, rates)
    rows = 1e6 / 512
    assert unbounded.validation_hours / bounded.validation_hours == pytest.approx(
        (3 * rows / 500 * 0.02 * rows) / (10 * 5)
    )


def test_hours_are_those_of_the_slowest_part(extract_config: MakeExtract, train_config: MakeTrain) -> None:
    extract, train = extract_config(), train_config(gpus=["2", "3"])
    fast = capacity(extract, train, 1e6, Rates(network_gbit=1e9))
    assert all("limited by the GPUs" in sentence for sentence in fast.bottlenecks)
    slow = capacity(extract, train, 1e6, Rates(network_gbit=8e-3))  # 1 MB/s
    assert all("limited by the network" in sentence for sentence in slow.bottlenecks)
    assert f"could use {fast.write_mb_per_s:.0%} of it" in slow.bottlenecks[0]
    assert slow.write_mb_per_s == slow.read_mb_per_s == pytest.approx(1.0)
    assert slow.extraction_tokens_per_s == pytest.approx(1e6 / slow.bytes_per_token)
    assert slow.extraction_hours == pytest.approx(slow.stored_bytes / 1e6 / 3600)
    # Nothing is kept between uses: every token of an epoch and of a validation comes over the network.
    assert slow.training_hours == pytest.approx(train.training.epochs * slow.extraction_hours)
    rows = validation_rows(train.training, 1e6)
    validated = rows * train.training.row_tokens * slow.bytes_per_token
    assert slow.validation_hours == pytest.approx(validated / 1e6 / 3600)
    # A forward asks for more of the network than a step: here it alone is held up.
    between = Rates(network_gbit=fast.read_mb_per_s * 8e-3 * 1.5)
    found = capacity(extract, train, 1e6, between)
    assert found.training_hours == fast.training_hours and found.validation_hours > fast.validation_hours


def test_sizes_of_codecs_are_those_that_were_measured() -> None:
    assert codec_ratio("tolerance=0.1") == 4.82 and codec_ratio("lossless") == 1.49
    assert 4.82 < codec_ratio("tolerance=0.15") < 6.76
    assert codec_ratio("tolerance=0.001") == 2.40


def test_gpus_are_those_asked_for_or_named_or_here() -> None:
    assert gpu_count(7, ["0", "1"]) == 7
    assert gpu_count(None, ["0", "1,2"]) == 2
    assert gpu_count(None, ["cpu"]) == gpu_count(None, []) == max(1, torch.cuda.device_count())


def test_the_command_needs_nothing_of_the_target_but_its_configuration(
    extract_config: MakeExtract, train_config: MakeTrain, tiny_target_dir: Path, tmp_path: Path
) -> None:
    shutil.copy(tiny_target_dir / "config.json", tmp_path)
    target = {"path": str(tmp_path), "num_taps": 3}
    paths = tmp_path / "extract.yaml", tmp_path / "train.yaml"
    paths[0].write_text(dump_config(extract_config(target=target, workers={})))
    paths[1].write_text(dump_config(train_config(gpus=["1"])))
    command = ["plan", "--extract", str(paths[0]), "--train", str(paths[1])]
    result = CliRunner().invoke(app, [*command, "--train-gpus", "3"])
    assert result.exit_code == 0 and "TB" in result.output and "limited by the" in result.output
    assert f"{gpu_count(None, [])} for extraction, 3 for training" in result.output
    for option, numbers in {
        "--tokens": ("-5", "0", "nan", "inf"),
        "--extract-gpus": ("-3", "0"),
        "--train-gpus": ("-3", "0"),
        "--network-gbit": ("-1", "0", "nan", "inf"),
    }.items():
        for number in numbers:
            refused = CliRunner().invoke(app, [*command, option, number])
            assert refused.exit_code == 2 and f"Invalid value for '{option}'" in refused.output
    values = json.loads(CliRunner().invoke(app, [*command, "--json", "--tokens", "1e6"]).output)
    assert values["stored_bytes"] == pytest.approx(1e6 * values["bytes_per_token"])
