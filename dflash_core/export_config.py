"""config.json of an exported drafter: written with the keys that engines read, read back without guessing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from dflash_core.configuration import UserError
from dflash_core.drafter import DrafterConfig
from dflash_core.records import TAP_CONVENTION, TargetSpec

ARCHITECTURE = "DFlashDraftModel"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
LONGEST_TEXT = 262144
"""Tokens up to which engines draft, where nobody says otherwise."""
PROVENANCE_KEY = "dflash_pipeline"
"""Our own entry in config.json: the tap convention in words and the target. Engines ignore it."""
OBJECTS = ("dflash_config", "eagle_config", "rope_parameters", "rope_scaling", PROVENANCE_KEY)
"""Keys of config.json that hold further keys, where they hold anything."""
LISTS = {"layer_types": str, "eagle_aux_hidden_state_layer_ids": int}
"""Keys of config.json that hold a list, where they hold anything, and of what."""
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
"""Keys of config.json that no drafter can have at zero or below."""


def config_of(config: DrafterConfig, target: TargetSpec, max_position_embeddings: int) -> dict[str, Any]:
    """Give config.json the keys that vLLM, SGLang and z-lab's loader read (docs/serving.md)."""
    sliding = "sliding_attention" in config.types
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "layer_types": list(config.types),
        # Qwen3Config drops the window unless this says that it is used.
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window if sliding else None,
        "max_window_layers": config.num_layers,
        "block_size": config.block_size,
        "num_target_layers": config.target_num_layers,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "num_target_layers": config.target_num_layers,
            "target_layer_ids": list(config.tap_layer_ids),
        },
        PROVENANCE_KEY: {"tap_convention": config.tap_convention, "target": target.model_dump(mode="json")},
    }


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of an exported folder. Raises UserError when it is missing or not a drafter's."""
    path = folder / CONFIG_FILE
    if not path.is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise UserError(f"{folder} is no exported drafter: it must hold {CONFIG_FILE} and {WEIGHTS_FILE}")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    architectures = raw.get("architectures") if isinstance(raw, dict) else None
    if architectures != [ARCHITECTURE]:
        raise UserError(f"{path} has architectures {architectures}; a drafter has [{ARCHITECTURE!r}]")
    if problems := _wrong_kinds(raw):
        raise UserError(f"{path}: {'; '.join(problems)}")
    return raw


def _wrong_kinds(raw: Mapping[str, Any]) -> list[str]:
    """Entries that nobody could read on from; null is as good as absent."""
    given = {name: value for name, value in raw.items() if value is not None}
    problems = [
        f"{name} is {given[name]!r} and must be an object"
        for name in OBJECTS
        if name in given and not isinstance(given[name], dict)
    ]
    for name, kind in LISTS.items():
        entries = given.get(name, [])
        if not isinstance(entries, list) or not all(type(entry) is kind for entry in entries):
            problems.append(f"{name} is {entries!r} and must be a list of {kind.__name__}")
    for name in ("dtype", "torch_dtype"):
        value = given.get(name, "bfloat16")
        if not isinstance(value, str) or not isinstance(getattr(torch, value, None), torch.dtype):
            problems.append(f"{name} is {value!r} and must name a type of torch's, e.g. 'bfloat16'")
    return problems


def drafter_config_of(raw: Mapping[str, Any], folder: Path) -> DrafterConfig:
    """Translate config.json into our own configuration. Raises UserError listing all that does not fit."""
    problems = _foreign_settings(raw)
    dflash = raw.get("dflash_config") or {}
    rope = raw.get("rope_parameters") or {}
    convention = (raw.get(PROVENANCE_KEY) or {}).get("tap_convention", TAP_CONVENTION)
    outer, inner = raw.get("num_target_layers"), dflash.get("num_target_layers")
    values: dict[str, Any] = {
        "hidden_size": raw.get("hidden_size"),
        "intermediate_size": raw.get("intermediate_size"),
        "num_layers": raw.get("num_hidden_layers"),
        "num_heads": raw.get("num_attention_heads"),
        "num_kv_heads": raw.get("num_key_value_heads"),
        "head_dim": raw.get("head_dim"),
        "rms_norm_eps": raw.get("rms_norm_eps"),
        "rope_theta": rope.get("rope_theta", raw.get("rope_theta")),
        "vocab_size": raw.get("vocab_size"),
        "block_size": dflash.get("block_size", raw.get("block_size")),
        "mask_token_id": dflash.get("mask_token_id", raw.get("mask_token_id")),
        "tap_layer_ids": dflash.get("target_layer_ids"),
        "target_num_layers": inner if outer is None else outer,
    }
    problems += [f"nothing gives {name}" for name, value in values.items() if value is None]
    problems += [
        f"{name} is {raw[name]} and must be positive"
        for name in SIZES
        if isinstance(raw.get(name), int) and raw[name] < 1
    ]
    if None not in (outer, inner) and outer != inner:
        problems.append(
            f"num_target_layers is {outer!r} at the top level, which z-lab's loader reads, and {inner!r} in "
            "dflash_config, which SGLang reads: set both to the target's number of layers"
        )
    if convention != TAP_CONVENTION:
        problems.append(f"tap convention {convention!r} is not {TAP_CONVENTION!r}")
    if problems:
        raise UserError(f"{folder / CONFIG_FILE}: {'; '.join(problems)}")
    if layer_types := raw.get("layer_types"):
        values["layer_types"] = tuple(layer_types)
    if "sliding_attention" in (layer_types or ()):
        values["sliding_window"] = raw.get("sliding_window")
    try:
        return DrafterConfig(**values)
    except (ValidationError, UserError) as error:
        raise UserError(f"{folder / CONFIG_FILE}: {error}") from error


def _foreign_settings(raw: Mapping[str, Any]) -> list[str]:
    """Settings of config.json that change the arithmetic and that our drafter does not have."""
    dflash = raw.get("dflash_config") or {}
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    for_vllm = {**raw, **(raw.get("eagle_config") or {}), **dflash}  # of a name found twice it takes the last
    plain = {
        "model_type": (raw.get("model_type"), "qwen3"),
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(raw.get("attention_bias")), False),
        "rope type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        "partial_rotary_factor": (
            rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)),
            1.0,
        ),
        "is_neox_style": (raw.get("is_neox_style", True), True),
        "rope_is_neox_style": (raw.get("rope_is_neox_style", True), True),
        # Causality follows the layer types (causal in sliding layers); these would override it in an engine.
        "is_causal": (raw.get("is_causal"), None),
        "dflash_config.causal": (dflash.get("causal"), None),
        "dflash_config.use_swa": (bool(dflash.get("use_swa")), False),
        "draft_vocab_size": (raw.get("draft_vocab_size") or raw.get("vocab_size"), raw.get("vocab_size")),
        "target_hidden_size": (
            raw.get("target_hidden_size") or raw.get("hidden_size"),
            raw.get("hidden_size"),
        ),
        "quantization_config": (raw.get("quantization_config") or None, None),
        "logit_scale": (raw.get("logit_scale", 1.0), 1.0),
        "use_aux_hidden_state": (bool(for_vllm.get("use_aux_hidden_state", True)), True),
        "attention_sink_bias": (
            bool(dflash.get("attention_sink_bias", raw.get("add_swa_attention_sink_bias"))),
            False,
        ),
        "dflash_config.attention_value_scale": (dflash.get("attention_value_scale") or 1.0, 1.0),
        "dflash_config.output_multiplier": (dflash.get("output_multiplier", 1.0), 1.0),
        "dflash_config.final_logit_softcapping": (dflash.get("final_logit_softcapping") or 0, 0),
        "dflash_config.conv_kernel_size": (dflash.get("conv_kernel_size") or 0, 0),
        "dflash_config.selector_rank": (dflash.get("selector_rank") or 0, 0),
        "projector_type": (dflash.get("projector_type", raw.get("projector_type")), None),
        "dflash_config.sample_from_anchor": (bool(dflash.get("sample_from_anchor")), False),
    }
    return [f"{name} is {got!r} and must be {want!r}" for name, (got, want) in plain.items() if got != want]
