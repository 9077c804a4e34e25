"""`dflash plan`: storage, hours, network and the bottleneck of a project, from sizes and measured rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from dflash_core.configuration import Config
from dflash_core.drafter import DrafterConfig
from dflash_core.metrics import row_flops
from dflash_core.records import CaptureSpec
from dflash_core.training import TrainingConfig
from flows.config import ExtractConfig, TrainConfig

GIGA, HOUR = 1e9, 3600.0


class Rates(Config):
    """What a machine does in a second. Defaults: one NVIDIA H200, measured by this project's benchmarks."""

    peak_tflops: float = 989.0
    """Dense bf16 products a GPU could do (data sheet)."""
    capture_share: float = 0.58
    """Share that extraction reaches: 12,082 tokens/s, shards written, for Qwen3.6-27B up to layer 61
    (23.6e9 weights)."""
    training_share: float = 0.62
    """Share that a training step reaches: 0.65 at width 5120 (822 ms for a row of 49152 tokens and 1008
    blocks of 32), 0.59 at width 4096 (483 ms for one of 12288 tokens and 2048 blocks of 16)."""
    ratio: float | None = None
    """Size of bf16 states over size on disk; None: what the codec reached on real text (docs/codec.md)."""
    network_gbit: float = Field(default=25.0, gt=0)
    """Between the store and all GPUs of a stage together."""


RATIOS = {"lossless": 1.49, "fp8": 2.35}
TOLERANCE_RATIOS = (
    (0.01, 2.40),
    (0.026, 2.91),
    (0.05, 3.57),
    (0.1, 4.82),
    (0.2, 6.76),
    (0.3, 9.15),
    (0.5, 13.9),
)
"""Measured sizes (benchmarks/codec.py)."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a project needs; hours and rates are those of the slower of GPUs and network."""

    extraction_gpus: int
    training_gpus: int
    bytes_per_token: float
    stored_bytes: float
    extraction_hours: float
    extraction_tokens_per_s: float
    write_mb_per_s: float
    """All GPUs together."""
    training_hours: float
    """Optimizer steps alone."""
    validation_hours: float
    """All validations together."""
    training_tokens_per_s: float
    read_mb_per_s: float
    """All GPUs together."""
    checkpoint_bytes: float
    bottlenecks: tuple[str, ...]
    """Sentences."""


def capacity(
    extract: ExtractConfig,
    train: TrainConfig,
    tokens: float,
    rates: Rates,
    extraction_gpus: int | None = None,
    training_gpus: int | None = None,
) -> Capacity:
    """Work it out for a data set of so many tokens. Of the target only its config.json is read.

    GPUs are as `gpu_count` says. Raises UserError.
    """
    from dflash_core.target import describe_capture
    from dflash_core.target_identity import load_text_config, target_shape

    _, text = load_text_config(extract.target.path, extract.target.revision)
    any_mask_token = {"mask_token_id": 0}
    target = target_shape(extract.target.path, text).model_copy(update=any_mask_token)
    capture = describe_capture(extract.target, target.num_layers)
    drafter = train.drafter.for_target(target, capture)
    ratio = rates.ratio or codec_ratio(extract.codec)
    column_bytes = target.hidden_size * 2 / ratio
    stored = column_bytes * len(capture.columns)
    wanted = column_bytes * (len(drafter.tap_layer_ids) + (train.training.loss.kl_weight > 0))
    workers = gpu_count(extraction_gpus, extract.workers.slots)
    ranks = gpu_count(training_gpus, train.gpus)
    body = body_parameters(text, capture)
    network = rates.network_gbit * GIGA / 8
    capture_rate = workers * rates.capture_share * rates.peak_tflops * 1e12 / (2 * body)
    training = train.training
    flops = row_flops(drafter, training.row_tokens, training.anchors_per_row * drafter.block_size)
    row_seconds = flops / (rates.training_share * rates.peak_tflops * 1e12)
    train_rate = ranks * training.row_tokens / row_seconds
    validation_rate = train_rate / forward_share(drafter, training)
    limits = bottlenecks(capture_rate * stored, train_rate * wanted, network)
    capture_rate = min(capture_rate, network / stored)
    train_rate, validation_rate = (min(rate, network / wanted) for rate in (train_rate, validation_rate))
    validated = validation_rows(training, tokens) * training.row_tokens
    return Capacity(
        extraction_gpus=workers,
        training_gpus=ranks,
        bytes_per_token=stored,
        stored_bytes=tokens * stored,
        extraction_hours=tokens / capture_rate / HOUR,
        extraction_tokens_per_s=capture_rate,
        write_mb_per_s=capture_rate * stored / 1e6,
        training_hours=optimizer_steps(training, tokens)
        * (training.rows_per_step * training.row_tokens / train_rate / HOUR),
        validation_hours=validated / validation_rate / HOUR,
        training_tokens_per_s=train_rate,
        read_mb_per_s=train_rate * wanted / 1e6,
        checkpoint_bytes=12.0 * drafter_parameters(drafter),
        bottlenecks=limits,
    )


def optimizer_steps(training: TrainingConfig, tokens: float) -> float:
    """Return how many optimizer steps a run takes on a data set of so many tokens."""
    rows = tokens / training.row_tokens
    return min(training.epochs * rows / training.rows_per_step, training.max_steps or math.inf)


def validation_rows(training: TrainingConfig, tokens: float) -> float:
    """Return how many rows all validations of a run look at, for a data set of so many tokens."""
    rows, steps = tokens / training.row_tokens, optimizer_steps(training, tokens)
    each = min(training.validation_fraction * rows, training.validation_rows or math.inf)
    return steps / training.validate_every * each


def forward_share(drafter: DrafterConfig, training: TrainingConfig) -> float:
    """Return the share of a row's products (`row_flops`) that its forward has: a third, but half of the
    head's.
    """
    queries = training.anchors_per_row * drafter.block_size
    head = 4.0 * drafter.vocab_size * drafter.hidden_size * queries
    return 1 / 3 + head / row_flops(drafter, training.row_tokens, queries) / 6


def gpu_count(asked: int | None, named: Sequence[str]) -> int:
    """Return how many GPUs (or groups that work as one) to reckon with.

    Those that are asked for, else those that the configuration names, else those of this machine, else one.
    """
    import torch

    return asked or len([slot for slot in named if slot != "cpu"]) or torch.cuda.device_count() or 1


def codec_ratio(codec: str) -> float:
    """Return how much smaller than bf16 a codec was on real text, interpolated between tolerances."""
    if codec in RATIOS:
        return RATIOS[codec]
    tolerance = float(codec.partition("=")[2])
    below = [pair for pair in TOLERANCE_RATIOS if pair[0] <= tolerance] or [TOLERANCE_RATIOS[0]]
    above = [pair for pair in TOLERANCE_RATIOS if pair[0] >= tolerance] or [TOLERANCE_RATIOS[-1]]
    (low, low_ratio), (high, high_ratio) = below[-1], above[0]
    if high == low:
        return low_ratio
    return low_ratio + (high_ratio - low_ratio) * (tolerance - low) / (high - low)


def body_parameters(text: Any, capture: CaptureSpec) -> float:
    """Count the weights that a token meets up to the last tap; of experts, those that are chosen.

    `text` is the target's text configuration.
    """
    import torch
    from transformers import AutoModel

    layers = text.num_hidden_layers if capture.last_hidden != "no" else max(capture.tap_layer_ids) + 1
    with torch.device("meta"):
        model = AutoModel.from_config(text)
    experts = getattr(text, "num_experts", None) or 1
    chosen = (getattr(text, "num_experts_per_tok", None) or 1) / experts
    total = 0.0
    for layer in model.layers[:layers]:
        for name, parameter in layer.named_parameters():
            is_expert = ".experts." in f".{name}." and parameter.ndim >= 2
            total += parameter.numel() * (chosen if is_expert else 1.0)
    return total


def drafter_parameters(drafter: DrafterConfig) -> float:
    """Count the weights of a drafter's products (norms left out)."""
    width, head = drafter.hidden_size, drafter.head_dim
    attention = 2 * width * head * (drafter.num_heads + drafter.num_kv_heads)
    layer = attention + 3 * width * drafter.intermediate_size
    return float(drafter.num_layers * layer + len(drafter.tap_layer_ids) * width * width)


def bottlenecks(write: float, read: float, network: float) -> tuple[str, ...]:
    """Say what limits each stage; rates in bytes a second, `write` and `read` those that the GPUs ask for."""
    sentences = []
    for stage, rate in (("extraction", write), ("training", read)):
        share = rate / network
        if share > 1:
            sentences.append(f"{stage} is limited by the network: its GPUs could use {share:.0%} of it")
        else:
            sentences.append(f"{stage} is limited by the GPUs: it needs {share:.0%} of the network")
    return tuple(sentences)


def table(values: Capacity, tokens: float) -> list[tuple[str, str]]:
    """Return names and values for people."""
    return [
        ("tokens", f"{tokens:,.0f}"),
        ("GPUs", f"{values.extraction_gpus} for extraction, {values.training_gpus} for training"),
        ("bytes a token", f"{values.bytes_per_token:,.0f}"),
        ("storage", f"{values.stored_bytes / 1e12:,.2f} TB"),
        ("extraction", f"{values.extraction_hours:,.1f} h at {values.extraction_tokens_per_s:,.0f} tokens/s"),
        ("written", f"{values.write_mb_per_s:,.0f} MB/s ({values.write_mb_per_s * 8e-3:.1f} Gbit/s)"),
        ("training", f"{values.training_hours:,.1f} h at {values.training_tokens_per_s:,.0f} tokens/s"),
        ("validation", f"{values.validation_hours:,.1f} h"),
        ("read", f"{values.read_mb_per_s:,.0f} MB/s ({values.read_mb_per_s * 8e-3:.1f} Gbit/s)"),
        ("a checkpoint", f"{values.checkpoint_bytes / 1e9:,.1f} GB"),
        *(("", sentence) for sentence in values.bottlenecks),
    ]


def as_json(values: Capacity) -> dict[str, Any]:
    """Return the values for programs."""
    return {name: getattr(values, name) for name in Capacity.__dataclass_fields__}
