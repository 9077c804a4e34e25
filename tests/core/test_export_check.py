"""The checker sees a folder as the engines do: sound ones pass, and each silent mistake is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dflash_core.configuration import UserError
from dflash_core.drafter import Drafter
from dflash_core.export import export_drafter, load_exported
from dflash_core.export_check import check_drafter, check_export
from flows.cli import app
from tests.core.test_export import change_config
from tests.core.tiny_drafter import SPEC, tiny_config, tiny_drafter


def test_all_engines_see_the_drafter_as_it_was_trained(tmp_path: Path) -> None:
    views = check_export(export_drafter(tiny_drafter(), tmp_path / "d", SPEC))
    assert [view.engine for view in views] == ["vLLM", "SGLang", "z-lab"]
    for view in views:
        assert view.tapped_outputs == (1, 4)
        assert view.layers == ((6, True), (6, True), (None, False))
        assert view.mask_token_id == 95
        assert not view.ignored_tensors
        assert not view.missing_tensors
    assert any("VLLM_USE_V2_MODEL_RUNNER" in note for note in views[0].notes)


def test_full_layers_need_no_other_runner(tmp_path: Path) -> None:
    full = tiny_drafter(layer_types=None, sliding_window=None)
    views = check_export(export_drafter(full, tmp_path / "d", SPEC))
    assert views[0].layers == ((None, False),) * 3
    assert not any("V2" in note for note in views[0].notes)
    assert any("non-causal" in note for note in views[0].notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Qwen3Config forgets the window unless told that it is used.
        ({"use_sliding_window": False}, "vLLM: .*layers.*SGLang: .*layers.*z-lab: .*layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4]}, r"vLLM: tapped layers \(0, 3\) instead of \(1, 4\)"),
        ({"dflash_config": {"swa_window_size": 12}}, r"vLLM: .*\(12, True\)"),
        ({"dflash_config": {"swa_window_size": [12]}}, r"vLLM: .*\(\[12\], True\)"),
        (
            {"num_key_value_heads": 0, "hidden_size": -1},
            "hidden_size is -1 .*; num_key_value_heads is 0 and must",
        ),
        ({"dflash_config": {"target_layer_ids": [1, 7]}}, "SGLang: .* last layer; z-lab: .* final norm$"),
        (
            {"num_target_layers": None, "dflash_config": {"target_layer_ids": [1, 7]}},
            "SGLang: .* last layer; z-lab: .* final norm$",
        ),
        # Whichever number were believed, one of these two would hide the tap of the target's last layer.
        (
            {"num_target_layers": 9, "dflash_config": {"target_layer_ids": [1, 7]}},
            "num_target_layers is 9 at the top level, .* and 8 in dflash_config, .*: set both",
        ),
        (
            {"dflash_config": {"target_layer_ids": [1, 7], "num_target_layers": 9}},
            "num_target_layers is 8 at the top level, .* and 9 in dflash_config, .*: set both",
        ),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias is True"),
        ({"dflash_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_silent_misreadings_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = export_drafter(tiny_drafter(), tmp_path / "d", SPEC)
    change_config(folder, **changes)
    with pytest.raises(UserError, match=message):
        check_export(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dflash_pipeline", "ours", "is 'ours' and must be an object"),
        ("eagle_config", ["x"], r"is \['x'\] and must be an object"),
        ("rope_parameters", "default", "is 'default' and must be an object"),
        ("rope_scaling", 2, "is 2 and must be an object"),
        ("layer_types", 3, "is 3 and must be a list of str"),
        ("eagle_aux_hidden_state_layer_ids", 3, "is 3 and must be a list of int"),
        ("eagle_aux_hidden_state_layer_ids", ["1"], r"is \['1'\] and must be a list of int"),
        ("num_hidden_layers", "3", ".* expected int, got str"),
        ("max_position_embeddings", None, ".* expected int, got NoneType"),
        ("dtype", "foo", "is 'foo' and must name a type of torch's"),
        ("torch_dtype", "nn", "is 'nn' and must name a type of torch's"),
    ],
)
def test_what_nobody_could_read_is_one_error(tmp_path: Path, key: str, value: Any, message: str) -> None:
    folder = export_drafter(tiny_drafter(), tmp_path / "d", SPEC)
    change_config(folder, **{key: value})
    with pytest.raises(
        UserError, match=rf"^{re.escape(str(folder))}/config\.json.*\b{key}\b.* {message}"
    ) as caught:
        check_export(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [[1, 4], "x"])
def test_a_dflash_config_that_is_no_object_is_refused(tmp_path: Path, value: Any) -> None:
    folder = export_drafter(tiny_drafter(), tmp_path / "d", SPEC)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "dflash_config": value}))
    with pytest.raises(UserError, match=r"config\.json: dflash_config is .* and must be an object$"):
        check_export(folder)


def test_null_is_as_good_as_absent(tmp_path: Path) -> None:
    folder = export_drafter(tiny_drafter(), tmp_path / "d", SPEC)
    names = ("dflash_pipeline", "eagle_config", "rope_scaling", "eagle_aux_hidden_state_layer_ids", "dtype")
    change_config(folder, **dict.fromkeys(names))
    assert len(check_export(folder)) == 3
    load_exported(folder, target=SPEC)


def test_another_embedding_of_the_mask_token_is_named(tmp_path: Path) -> None:
    folder = export_drafter(tiny_drafter(), tmp_path / "d", SPEC)
    torch.save(torch.zeros(32), folder / "mask_embedding.pt")
    with pytest.raises(UserError, match=r"vLLM: takes the mask token's embedding from mask_embedding\.pt$"):
        check_export(folder)


def test_a_drafter_is_checked_before_it_is_trained(tmp_path: Path) -> None:
    check_drafter(tiny_config(), SPEC)
    last = tiny_config(tap_layer_ids=(1, 7))
    with pytest.raises(UserError) as before:
        check_drafter(last, SPEC)
    with pytest.raises(UserError) as after:
        check_export(export_drafter(Drafter(last), tmp_path / "d", SPEC))
    assert str(before.value).split(": ", 1)[1] == str(after.value).split(": ", 1)[1]


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    folder = export_drafter(tiny_drafter(), tmp_path / "d", SPEC)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        check_export(folder)


def test_the_command_says_what_it_found(tmp_path: Path) -> None:
    folder = export_drafter(tiny_drafter(), tmp_path / "d", SPEC)
    sound = CliRunner().invoke(app, ["check", str(folder)])
    assert sound.exit_code == 0, sound.output
    lines = sound.stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        f"{engine}: as it was trained" for engine in ("vLLM", "SGLang", "z-lab")
    ]
    assert any("num_speculative_tokens must be 4:" in line for line in lines)
    assert any("num-draft-tokens must be 5," in line for line in lines)
    change_config(folder, use_sliding_window=False)
    wrong = CliRunner().invoke(app, ["check", str(folder)])
    assert wrong.exit_code == 2 and not wrong.stdout
    assert wrong.stderr.startswith(f"error: {folder} would not be served as it was trained: vLLM: ")
    nothing = CliRunner().invoke(app, ["check", str(tmp_path / "nowhere")])
    assert nothing.exit_code == 2 and "is no exported drafter" in nothing.stderr


def test_a_tensor_that_engines_pass_over_is_named(tmp_path: Path) -> None:
    folder = export_drafter(tiny_drafter(), tmp_path / "d", SPEC)
    tensors = load_file(folder / "model.safetensors")
    tensors["rotary_emb.inv_freq"] = torch.ones(4)
    tensors["layers.0.mlp.up.weight"] = tensors.pop("layers.0.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError) as caught:
        check_export(folder)
    assert "SGLang: passes over layers.0.mlp.up.weight, rotary_emb.inv_freq" in str(caught.value)
    assert "SGLang: finds no layers.0.mlp.up_proj.weight of the right shape" in str(caught.value)
