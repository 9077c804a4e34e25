"""The checker sees a folder as the engines do: sound ones pass, and each silent mistake is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.configuration import UserError
from dflash_core.export import export_drafter
from dflash_core.export_check import check_export
from tests.core.test_export import change_config
from tests.core.tiny_drafter import SPEC, tiny_drafter


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
    ],
)
def test_silent_misreadings_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = export_drafter(tiny_drafter(), tmp_path / "d", SPEC)
    change_config(folder, **changes)
    with pytest.raises(UserError, match=message):
        check_export(folder)


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
