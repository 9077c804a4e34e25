"""Random targets of every family that is captured: dense, mixtures of experts, hybrid, multimodal wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from dflash_core.records import Sample
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer

NUM_LAYERS, WIDTH = 6, 64
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "initializer_range": 0.1,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_5_wrapper")
HYBRID = ("qwen3_5", "qwen3_5_moe", "qwen3_5_wrapper")


def family_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A whole random model (head included) with norm weights that are not all alike."""
    torch.manual_seed(0)
    if family in ("qwen2", "qwen3", "llama"):
        return tiny_model(family, dtype=dtype)
    model: Any
    if family == "qwen3_5_wrapper":
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
        vision |= {"out_hidden_size": WIDTH, "num_position_embeddings": 16}
        config = Qwen3_5Config(text_config={**_COMMON, **_LINEAR}, vision_config=vision)
        model = Qwen3_5ForConditionalGeneration(config)
    else:
        configs = {
            "gemma3": lambda: Gemma3TextConfig(**_COMMON),
            "qwen3_moe": lambda: Qwen3MoeConfig(**_COMMON, **_EXPERTS),
            "qwen3_5": lambda: Qwen3_5TextConfig(**_COMMON, **_LINEAR),
            "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(
                **_COMMON, **_LINEAR, **_EXPERTS, shared_expert_intermediate_size=32
            ),
        }
        model = AutoModelForCausalLM.from_config(configs[family]())
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).eval()


def write_family(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save model and tokenizer as `from_pretrained` reads them."""
    family_model(family, dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def random_samples(lengths: Sequence[int], seed: int = 0) -> list[Sample]:
    """Samples of random bytes, all supervised."""
    generator = np.random.default_rng(seed)
    return [
        Sample(
            sample_id=f"sample-{i}",
            token_ids_T=generator.integers(0, 256, length).astype(np.int32),
            loss_mask_T=np.ones(length, dtype=bool),
        )
        for i, length in enumerate(lengths)
    ]
