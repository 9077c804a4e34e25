"""Reads an exported folder by the rules of each serving engine, and compares what they would run with our
drafter.

The rules were taken from the loaders named in docs/serving.md, with their commits; none of those engines is
imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dflash_core.configuration import UserError
from dflash_core.drafter import Drafter, DrafterConfig
from dflash_core.export import tensor_problems
from dflash_core.export_config import (
    CONFIG_FILE,
    LONGEST_TEXT,
    WEIGHTS_FILE,
    config_of,
    drafter_config_of,
    read_config,
)
from dflash_core.records import TargetSpec

SLIDING = "sliding_attention"
MASK_EMBEDDING_FILE = "mask_embedding.pt"
"""vLLM reads it, where a folder has one, and no other engine does."""
LAST_LAYER = {
    "SGLang": "captures what enters a layer, so never the output of the target's last layer",
    "z-lab": "reads the output of the target's last layer after the final norm",
}
"""Engines that cannot give a drafter the output of the target's last layer, and what they do."""


@dataclass(frozen=True, kw_only=True)
class EngineView:
    """What one engine makes of a folder."""

    engine: str
    tapped_outputs: tuple[int, ...]
    """Decoder layers of the target, counted from 0, whose outputs the engine feeds to `fc`."""
    mask_token_id: int | None
    block_size: int
    """Slots of a block: the committed token and the drafts (engine started as docs/serving.md says)."""
    layers: tuple[tuple[int | None, bool], ...]
    """(window, causal inside the block) of each draft layer."""
    rope_theta: float
    head_dim: int
    fc_inputs: int
    ignored_tensors: tuple[str, ...] = ()
    """Tensors in the file that the engine would pass over without a word."""
    missing_tensors: tuple[str, ...] = ()
    """Parameters of the engine's model that no tensor fills: they would stay as they were allocated."""
    notes: tuple[str, ...] = field(default=())
    """What whoever starts the engine must know."""


def check_export(folder: Path) -> list[EngineView]:
    """Read `folder` as vLLM, SGLang and z-lab's loader do. Raises UserError naming each disagreement."""
    raw = read_config(folder)
    config = drafter_config_of(raw, folder)
    views = _views(raw, _tensor_shapes(folder / WEIGHTS_FILE), str(folder / CONFIG_FILE))
    with torch.device("meta"):
        drafter = Drafter(config)
    problems = [f"strict loader: {problem}" for problem in tensor_problems(drafter, folder / WEIGHTS_FILE)]
    if (folder / MASK_EMBEDDING_FILE).exists():
        problems.append(f"vLLM: takes the mask token's embedding from {MASK_EMBEDDING_FILE}")
    problems += _all_disagreements(views, config)
    if problems:
        raise UserError(f"{folder} would not be served as it was trained: {'; '.join(problems)}")
    return views


def check_drafter(config: DrafterConfig, target: TargetSpec) -> None:
    """Say before a training what `check_export` would say of its export. Raises UserError."""
    with torch.device("meta"):
        tensors = {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}
    views = _views(config_of(config, target, LONGEST_TEXT), tensors, f"the exported {CONFIG_FILE}")
    if problems := _all_disagreements(views, config):
        raise UserError(f"this drafter would not be served as it is trained: {'; '.join(problems)}")


def _views(raw: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], source: str) -> list[EngineView]:
    """Read config.json's content as engines see it: through transformers' class, which fills in defaults and
    drops what it thinks unused. Raises UserError, naming `source`, when that class does not take it.
    """
    from transformers import Qwen3Config

    try:
        parsed = Qwen3Config.from_dict(dict(raw))
    except Exception as error:
        words = " ".join(str(error).split())
        raise UserError(f"{source} is refused by transformers' Qwen3Config: {words}") from error
    return [read(parsed, tensors) for read in (vllm_view, sglang_view, zlab_view)]


def _all_disagreements(views: list[EngineView], config: DrafterConfig) -> list[str]:
    return [f"{view.engine}: {problem}" for view in views for problem in _disagreements(view, config)]


def vllm_view(config: Any, tensors: Mapping[str, tuple[int, ...]]) -> EngineView:
    """Read as vLLM's qwen3_dflash.py and eagle3_utils.py do."""
    dflash = getattr(config, "dflash_config", None) or {}
    # vLLM adds one to ids from dflash_config and then captures the output of layer key - 1.
    keys = getattr(config, "eagle_aux_hidden_state_layer_ids", None) or [
        i + 1 for i in dflash.get("target_layer_ids") or []
    ]
    types = getattr(config, "layer_types", None) or []
    layers = []
    for i in range(config.num_hidden_layers):
        use_window = bool(dflash.get("use_swa", False))
        by_type = bool(types) and not (use_window and SLIDING not in types)
        sliding = types[i] == SLIDING if by_type else use_window
        window = dflash.get("swa_window_size", config.sliding_window) if sliding else None
        causal = next(
            (bool(x) for x in (getattr(config, "is_causal", None), dflash.get("causal")) if x is not None),
            bool(types) and types[i] == SLIDING,
        )
        layers.append((window, causal))
    mixed = any(window != layers[0][0] for window, _ in layers)
    block = _block_size(config)
    notes = [
        f"num_speculative_tokens must be {block - 1}: one of the block's {block} slots is the committed token"
    ]
    if mixed:
        notes.append("mixed sliding and full layers: start with VLLM_USE_V2_MODEL_RUNNER=1")
    if not all(causal for _, causal in layers):
        notes.append("needs an attention backend with non-causal support, e.g. FLASH_ATTN or FLEX_ATTENTION")
    mask = dflash.get("mask_token_id", getattr(config, "mask_token_id", None))
    return _view("vLLM", config, tensors, [key - 1 for key in keys], mask, layers, notes)


def sglang_view(config: Any, tensors: Mapping[str, tuple[int, ...]]) -> EngineView:
    """Read as SGLang's models/dflash.py and speculative/dflash_utils.py do."""
    dflash = getattr(config, "dflash_config", None) or {}
    ids = dflash.get("target_layer_ids", getattr(config, "target_layer_ids", None))
    if ids is None:
        ids = _default_ids(int(config.num_target_layers), config.num_hidden_layers)
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = [(config.sliding_window, True) if kind == SLIDING else (None, False) for kind in types]
    mask = dflash.get("mask_token_id", getattr(config, "mask_token_id", None))
    notes = [f"--speculative-num-draft-tokens must be {_block_size(config)}, or be left out"]
    return _view("SGLang", config, tensors, ids, mask, layers, notes)


def zlab_view(config: Any, tensors: Mapping[str, tuple[int, ...]]) -> EngineView:
    """Read as `DFlashDraftModel` of z-lab's dflash 0.1.0 does."""
    dflash = getattr(config, "dflash_config", None) or {}
    ids = dflash.get("target_layer_ids", getattr(config, "target_layer_ids", None))
    if ids is None:
        ids = _default_ids(int(config.num_target_layers), config.num_hidden_layers)
    forced = getattr(config, "is_causal", None)
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = [
        (
            config.sliding_window if kind == SLIDING else None,
            kind == SLIDING if forced is None else bool(forced),
        )
        for kind in types
    ]
    mask = dflash.get("mask_token_id", getattr(config, "mask_token_id", None))
    return _view("z-lab", config, tensors, ids, mask, layers, [])


def _block_size(config: Any) -> int:
    dflash = getattr(config, "dflash_config", None) or {}
    return int(dflash.get("block_size", getattr(config, "block_size", 16)))


def _view(
    engine: str,
    config: Any,
    tensors: Mapping[str, tuple[int, ...]],
    ids: Any,
    mask: int | None,
    layers: list[tuple[int | None, bool]],
    notes: list[str],
) -> EngineView:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    wanted = _wanted_shapes(config, head_dim, len(ids))
    rope = getattr(config, "rope_parameters", None) or {}
    return EngineView(
        engine=engine,
        tapped_outputs=tuple(int(i) for i in ids),
        mask_token_id=mask,
        block_size=_block_size(config),
        layers=tuple(layers),
        rope_theta=float(rope.get("rope_theta", getattr(config, "rope_theta", None) or 1e6)),
        head_dim=head_dim,
        fc_inputs=len(ids) * config.hidden_size,
        ignored_tensors=tuple(sorted(name for name in tensors if name not in wanted)),
        missing_tensors=tuple(sorted(name for name, shape in wanted.items() if tensors.get(name) != shape)),
        notes=tuple(notes),
    )


def _disagreements(view: EngineView, config: DrafterConfig) -> list[str]:
    """Where an engine would compute something else than was trained."""
    layers = tuple((config.window_of(i), config.types[i] == SLIDING) for i in range(config.num_layers))
    pairs = {
        "tapped layers": (view.tapped_outputs, config.tap_layer_ids),
        "mask_token_id": (view.mask_token_id, config.mask_token_id),
        "block_size": (view.block_size, config.block_size),
        "(window, causal) of the layers": (view.layers, layers),
        "rope_theta": (view.rope_theta, config.rope_theta),
        "head_dim": (view.head_dim, config.head_dim),
        "inputs of fc": (view.fc_inputs, len(config.tap_layer_ids) * config.hidden_size),
    }
    problems = [
        f"{name} {theirs} instead of {ours}" for name, (theirs, ours) in pairs.items() if theirs != ours
    ]
    if view.engine in LAST_LAYER and config.target_num_layers - 1 in view.tapped_outputs:
        problems.append(LAST_LAYER[view.engine])
    if view.ignored_tensors:
        problems.append(f"passes over {', '.join(view.ignored_tensors)}")
    if view.missing_tensors:
        problems.append(f"finds no {', '.join(view.missing_tensors)} of the right shape")
    return problems


def _wanted_shapes(config: Any, head_dim: int, taps: int) -> dict[str, tuple[int, ...]]:
    """Tensors that all three loaders ask for; vLLM and SGLang fuse q, k, v and gate, up while loading."""
    width, wide = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    layer = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (heads, width),
        "self_attn.k_proj": (kv_heads, width),
        "self_attn.v_proj": (kv_heads, width),
        "self_attn.o_proj": (width, heads),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "mlp.gate_proj": (wide, width),
        "mlp.up_proj": (wide, width),
        "mlp.down_proj": (width, wide),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"layers.{i}.{name}.weight": shape
        for i in range(config.num_hidden_layers)
        for name, shape in layer.items()
    }
    return {
        **shapes,
        "fc.weight": (width, taps * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }


def _tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error})") from error


def _default_ids(target_layers: int, draft_layers: int) -> list[int]:
    """The rule that loaders fall back to when no ids are named: one tap a draft layer."""
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]
