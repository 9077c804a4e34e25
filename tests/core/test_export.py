"""An exported folder gives back exactly the drafter, and nothing else passes for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.configuration import UserError
from dflash_core.drafter import ContextCache, Drafter
from dflash_core.export import check_shape, export_drafter, load_exported
from tests.core.tiny_drafter import SPEC, tiny_drafter


def states(drafter: Drafter) -> torch.Tensor:
    config = drafter.config
    chance = torch.Generator().manual_seed(9)
    taps = torch.randn(17, 2 * config.hidden_size, generator=chance).to(drafter.compute_dtype)
    slots = torch.randn(config.block_size, config.hidden_size, generator=chance).to(drafter.compute_dtype)
    cache = ContextCache()
    drafter.extend(cache, taps)
    return drafter.draft(cache, slots)


def test_round_trip_is_exact(tmp_path: Path) -> None:
    drafter = tiny_drafter().to(torch.bfloat16)
    folder = export_drafter(drafter, tmp_path / "drafter", SPEC)
    again = load_exported(folder, target=SPEC)
    assert again.config == drafter.config
    assert torch.equal(states(again), states(drafter))
    assert states(again).float().std() > 0.1


def test_float32_masters_are_exported_within_bf16(tmp_path: Path) -> None:
    drafter = tiny_drafter()
    again = load_exported(export_drafter(drafter, tmp_path / "drafter", SPEC), dtype=torch.float32)
    drafter.compute_dtype = torch.float32
    wanted, got = states(drafter), states(again)
    assert float((wanted - got).norm() / wanted.norm()) < 0.02
    assert next(drafter.parameters()).dtype == torch.float32, "export must not change the drafter"


def test_config_holds_what_engines_read(tmp_path: Path) -> None:
    config = json.loads((export_drafter(tiny_drafter(), tmp_path / "d", SPEC) / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["block_size"] == config["dflash_config"]["block_size"] == 5
    assert config["dflash_config"]["target_layer_ids"] == [1, 4]
    assert config["dflash_config"]["mask_token_id"] == 95
    assert config["num_target_layers"] == 8
    assert config["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert config["use_sliding_window"] is True
    assert config["sliding_window"] == 6
    assert "is_causal" not in config


def test_tensor_names_have_no_prefix_and_no_embedding(tmp_path: Path) -> None:
    tensors = load_file(export_drafter(tiny_drafter(), tmp_path / "d", SPEC) / "model.safetensors")
    assert len(tensors) == 3 + 11 * 3
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.q_norm.weight"} <= set(
        tensors
    )
    assert not any("embed" in name or "head" in name for name in tensors)


def test_training_starts_from_a_drafter_of_the_same_shape_only(tmp_path: Path) -> None:
    drafter = tiny_drafter()
    folder = export_drafter(drafter, tmp_path / "d", SPEC)
    check_shape(folder, drafter.config)
    spelt_out = drafter.config.model_copy(update={"layer_types": drafter.config.types})
    check_shape(folder, spelt_out)
    other = drafter.config.model_copy(update={"block_size": 9, "sliding_window": 7})
    with pytest.raises(UserError, match=r"shape: block_size: 5 there, 9 here; sliding_window: 6 there"):
        check_shape(folder, other)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        if name == "dflash_config":
            config[name].update(value)
        else:
            config[name] = value
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures"),
        ({"attention_bias": True}, "attention_bias"),
        ({"is_causal": False}, "is_causal"),
        ({"dflash_config": {"causal": True}}, "causal"),
        ({"dflash_config": {"target_layer_ids": [2, 8]}}, "0..7"),
        ({"dflash_config": {"target_layer_ids": [1, 3, 4]}}, "fc.weight has shape"),
        ({"dflash_config": {"mask_token_id": None}, "mask_token_id": None}, "nothing gives mask_token_id"),
        ({"dflash_config": {"final_logit_softcapping": 30.0}}, "softcapping"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4}}, "yarn"),
        ({"hidden_size": 64}, "has shape"),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, "layers.2.*unknown"),
        ({"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}, "layers.3.*missing"),
        ({"dflash_pipeline": {"tap_convention": "layer id i is the input of layer i"}}, "convention"),
        ({"sliding_window": None}, "sliding_window"),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias is True and must be False"),
        ({"add_swa_attention_sink_bias": True}, "attention_sink_bias is True"),
        ({"dflash_config": {"attention_value_scale": 0.5}}, r"attention_value_scale is 0\.5"),
        ({"dflash_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state is False"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is .*fp8"),
        ({"logit_scale": 0.25}, "logit_scale"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style"),
        ({"projector_type": "domino"}, "projector_type"),
        ({"dflash_config": {"selector_rank": 8, "selector_top_k": 4}}, "selector_rank"),
    ],
)
def test_another_arithmetic_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = export_drafter(tiny_drafter(), tmp_path / "d", SPEC)
    change_config(folder, **changes)
    with pytest.raises(UserError, match=message):
        load_exported(folder)


def test_settings_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    folder = export_drafter(tiny_drafter(), tmp_path / "d", SPEC)
    nothing = {"attention_sink_bias": False, "attention_value_scale": None, "use_aux_hidden_state": True}
    change_config(folder, dflash_config=nothing, use_aux_hidden_state=False, quantization_config=None)
    assert torch.equal(states(load_exported(folder)), states(tiny_drafter().to(torch.bfloat16)))


def spoil_missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["fc.weight"], tensors["layers.1.mlp.up_proj.weight"]


def spoil_extra(tensors: dict[str, torch.Tensor]) -> None:
    tensors["embed_tokens.weight"] = torch.zeros(96, 32)


def spoil_prefix(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors["model." + name] = tensors.pop(name)


def spoil_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.0.self_attn.k_proj.weight"] = torch.zeros(32, 32)


def spoil_type(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"] = torch.ones(32, dtype=torch.int8)


@pytest.mark.parametrize(
    ("spoil", "messages"),
    [
        (spoil_missing, ["fc.weight is missing", "layers.1.mlp.up_proj.weight is missing"]),
        (spoil_extra, ["embed_tokens.weight is unknown"]),
        (spoil_prefix, ["fc.weight is missing", "model.fc.weight is unknown"]),
        (spoil_shape, ["layers.0.self_attn.k_proj.weight has shape [32, 32] instead of [16, 32]"]),
        (spoil_type, ["norm.weight has type I8"]),
    ],
)
def test_other_tensors_are_refused_all_at_once(tmp_path: Path, spoil: Any, messages: list[str]) -> None:
    folder = export_drafter(tiny_drafter(), tmp_path / "d", SPEC)
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError) as caught:
        load_exported(folder)
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize("cut", [0, 4, 200, -100])
def test_a_torn_file_is_refused(tmp_path: Path, cut: int) -> None:
    folder = export_drafter(tiny_drafter(), tmp_path / "d", SPEC)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:cut])
    with pytest.raises(UserError, match="cannot be read"):
        load_exported(folder)


def test_another_target_is_refused(tmp_path: Path) -> None:
    folder = export_drafter(tiny_drafter(), tmp_path / "d", SPEC)
    load_exported(folder, target=SPEC.model_copy(update={"name": "the same by another name"}))
    for changes, message in [
        ({"hidden_size": 64}, "hidden_size 32 against 64"),
        ({"rope_theta": 1e6}, "rope_theta"),
        ({"weights_sha256": "3" * 64}, "another target: weights"),
        ({"tokenizer_sha256": "3" * 64}, "another target: tokenizer"),
    ]:
        with pytest.raises(UserError, match=message):
            load_exported(folder, target=SPEC.model_copy(update=changes))
    folder_of_it = SPEC.model_copy(update={"name": "copy", "weights_sha256": "3" * 64})
    with pytest.raises(UserError, match=f"are two targets.* as it was given then, '{SPEC.name}'"):
        load_exported(folder, target=folder_of_it)
    with pytest.raises(UserError) as caught:
        load_exported(folder, target=folder_of_it.model_copy(update={"tokenizer_sha256": "3" * 64}))
    assert "two targets" not in str(caught.value)
    with pytest.raises(UserError, match="vocab_size"):
        export_drafter(tiny_drafter(), tmp_path / "e", SPEC.model_copy(update={"vocab_size": 97}))
    assert not (tmp_path / "e").exists()


def test_a_drafter_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    export_drafter(tiny_drafter(seed=0), folder, SPEC)
    export_drafter(tiny_drafter(seed=1), folder, SPEC)
    assert torch.equal(load_exported(folder).fc.weight, tiny_drafter(seed=1).fc.weight.to(torch.bfloat16))
    assert [path.name for path in tmp_path.iterdir()] == ["d"], "no scratch folder is left"
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not an exported drafter"):
        export_drafter(tiny_drafter(), tmp_path / "notes", SPEC)
    assert (tmp_path / "notes" / "thesis.txt").exists()


def test_values_that_are_not_finite_are_not_exported(tmp_path: Path) -> None:
    drafter = tiny_drafter()
    with torch.no_grad():
        drafter.norm.weight[3] = float("nan")
    with pytest.raises(UserError, match=r"norm\.weight"):
        export_drafter(drafter, tmp_path / "d", SPEC)
    assert not list(tmp_path.iterdir())
