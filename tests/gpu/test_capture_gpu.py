"""Packed and compiled capture on a GPU, against transformers' own forward of one sample at a time.

Run on a machine with a CUDA device: python -m pytest tests/gpu/test_capture_gpu.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from dflash_core.parity import channel_scale, token_error
from dflash_core.records import CaptureSpec, TargetSpec
from dflash_core.target import Target, TargetConfig, captures, check_parity
from tests.core.tiny_targets import random_samples

pytestmark = pytest.mark.gpu

LENGTHS = (5, 700, 1, 333, 64, 128, 1500)
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 256,
}
LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
CONFIGS: dict[str, Any] = {
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE),
    "llama": lambda: transformers.LlamaConfig(**{**SHAPE, "num_attention_heads": 8, "head_dim": 64}),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**SHAPE, **LINEAR),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**{**SHAPE, "head_dim": 64}, **EXPERTS),
}


def random_target(family: str, **options: Any) -> Target:
    """A random target on the GPU with taps all along its depth."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModel.from_config(CONFIGS[family](), dtype=torch.bfloat16)
    model.norm = torch.nn.Identity()
    digest = "0" * 64
    spec = TargetSpec(
        name=family,
        weights_sha256=digest,
        tokenizer_sha256=digest,
        model_type=model.config.model_type,
        num_layers=SHAPE["num_hidden_layers"],
        hidden_size=SHAPE["hidden_size"],
        vocab_size=SHAPE["vocab_size"],
        rope_theta=1e7,
    )
    config = TargetConfig(path="random", **options)
    capture_spec = CaptureSpec(tap_layer_ids=(0, 3, 5, 7), weights_dtype=config.dtype)
    return Target(model.eval().requires_grad_(False), None, config, spec, capture_spec)


@pytest.mark.parametrize("options", [{}, {"compile_layers": False}, {"batching": "padded"}])
@pytest.mark.parametrize("family", CONFIGS)
def test_parity_on_the_gpu(family: str, options: dict[str, Any]) -> None:
    if options.get("batching") == "padded":
        options = {**options, "compile_layers": False}
    target = random_target(family, **options)
    assert (target.packed is None) == (options.get("batching") == "padded")
    errors = check_parity(target, random_samples(LENGTHS))
    assert max(errors.values()) < 0.04, errors


def test_eight_bit_products_stay_within_their_tolerance() -> None:
    target = random_target("qwen3_5", dtype="fp8")
    errors = check_parity(target, random_samples(LENGTHS))
    assert 0.005 < max(errors.values()) < 0.5, errors


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
def test_launching_ahead_changes_nothing(family: str) -> None:
    """Batches that are worked on while the next runs hold what they hold when nothing else runs."""
    target = random_target(family)
    samples = random_samples(LENGTHS * 6)
    taken = []
    for batch in captures(target, samples, 2048):  # nothing in here waits for the device
        for item in batch:
            taken.append((item.sample, {name: states.clone() for name, states in item.states.items()}))
    for (sample, copy), expected in zip(taken, samples, strict=True):
        assert sample is expected
        alone = target.capture([expected])[0].states
        for name, states_TD in copy.items():
            reference_TD = alone[name].float().cpu()
            assert token_error(states_TD.float().cpu(), reference_TD, channel_scale([reference_TD])) < 0.04
