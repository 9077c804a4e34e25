"""A small random drafter, and the description of the target that it is for."""

from __future__ import annotations

from typing import Any

from dflash_core.drafter import Drafter, DrafterConfig
from dflash_core.records import TargetSpec

SPEC = TargetSpec(
    name="tiny",
    weights_sha256="1" * 64,
    tokenizer_sha256="2" * 64,
    model_type="qwen3",
    num_layers=8,
    hidden_size=32,
    vocab_size=96,
    rope_theta=10000.0,
    mask_token_id=95,
)


def tiny_config(**changes: Any) -> DrafterConfig:
    """Three layers, the first two sliding over 6 tokens, four heads of 8, blocks of 5."""
    values: dict[str, Any] = {
        "hidden_size": SPEC.hidden_size,
        "intermediate_size": 48,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rope_theta": SPEC.rope_theta,
        "vocab_size": SPEC.vocab_size,
        "block_size": 5,
        "mask_token_id": 95,
        "tap_layer_ids": (1, 4),
        "target_num_layers": SPEC.num_layers,
        "layer_types": ("sliding_attention", "sliding_attention", "full_attention"),
        "sliding_window": 6,
    }
    return DrafterConfig(**{**values, **changes})


def tiny_drafter(seed: int = 0, **changes: Any) -> Drafter:
    """Weights large enough that every part of the arithmetic shows in the output."""
    drafter = Drafter(tiny_config(**changes))
    drafter.init_weights(seed, std=0.3)
    return drafter
