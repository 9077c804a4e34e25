"""Capture against a plain forward of the whole model, for every family; identity, gates and refusals."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_core.capture import forward_padded
from dflash_core.configuration import UserError
from dflash_core.records import LAST_HIDDEN, Sample, tap_column
from dflash_core.target import (
    ParityError,
    Target,
    TargetConfig,
    TargetOutOfMemory,
    batches,
    captures,
    check_parity,
    default_tap_ids,
    describe_target,
    load_embedding_and_head,
    load_target,
    mask_token_id,
    packed_batches,
)
from tests.core.tiny_targets import (
    FAMILIES,
    HYBRID,
    NUM_LAYERS,
    WIDTH,
    family_model,
    random_samples,
    write_family,
)
from tests.tiny import MASK_TOKEN_ID, VOCAB_SIZE

LENGTHS = (5, 70, 1, 33)
TAPS = (1, 3, 4)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_family(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


def load(folder: Path, **options: Any) -> Target:
    settings = {"path": str(folder), "dtype": "float32", "tap_layer_ids": TAPS, **options}
    return load_target(TargetConfig.model_validate(settings), "cpu")


@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_batched_capture_equals_the_whole_model_alone(
    folders: dict[str, Path], family: str, batching: str
) -> None:
    """Taps are hidden_states[i + 1] of the full model, run on one sample; padding is cut."""
    target = load(folders[family], batching=batching)
    assert len(target.model.layers) == TAPS[-1] + 1
    assert (target.packed is not None) == (batching == "packed")
    samples = random_samples(LENGTHS)
    whole = family_model(family)
    for sample, captured in zip(samples, target.capture(samples), strict=True):
        assert captured.sample is sample
        assert list(captured.states) == [tap_column(i) for i in TAPS]
        ids = torch.from_numpy(sample.token_ids_T).long()[None]
        with torch.no_grad():
            expected = whole(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        for tap in TAPS:
            states_TD = captured.states[tap_column(tap)]
            assert states_TD.dtype == torch.bfloat16 and states_TD.shape == (sample.num_tokens, WIDTH)
            torch.testing.assert_close(
                states_TD.float(), expected[tap + 1][0], rtol=1e-2, atol=1e-2 * expected[tap + 1].std().item()
            )


@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_leaks_between_the_samples_of_a_batch(
    folders: dict[str, Path], family: str, batching: str
) -> None:
    """Changing one sample of a batch leaves every other as it was; changing its last token, its own past."""
    target = load(folders[family], batching=batching)
    samples = random_samples(LENGTHS)
    changed = random_samples(LENGTHS)
    changed[1].token_ids_T[:] = 65
    changed[3].token_ids_T[-1] = (samples[3].token_ids_T[-1] + 1) % 256
    before, after = target.capture_exact(samples), target.capture_exact(changed)
    for column in target.capture_spec.columns:
        for i in (0, 2):
            torch.testing.assert_close(after[i][column], before[i][column], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after[3][column][:-1], before[3][column][:-1], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(after[3][column][-1], before[3][column][-1], rtol=1e-2, atol=1e-2)
        assert not torch.allclose(after[1][column], before[1][column], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_parity(folders: dict[str, Path], family: str) -> None:
    for batching in ("padded", "packed"):
        target = load(folders[family], dtype="bfloat16", batching=batching)
        errors = check_parity(target, random_samples(LENGTHS))
        assert set(errors) == set(target.capture_spec.columns)
        assert max(errors.values()) < 0.04


@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_last_hidden_before_and_after_the_final_norm(
    folders: dict[str, Path], family: str, batching: str
) -> None:
    whole = family_model(family)
    sample = random_samples([9])[0]
    ids = torch.from_numpy(sample.token_ids_T).long()[None]
    raw: list[torch.Tensor] = []
    whole.model.layers[-1].register_forward_hook(lambda _m, _i, output: raw.append(output))
    with torch.no_grad():
        normed = whole.model(input_ids=ids, use_cache=False).last_hidden_state[0]
    for last_hidden, expected in (("before_final_norm", raw[0][0]), ("after_final_norm", normed)):
        # The last layer is tapped as well: its tap is never normed.
        target = load(
            folders[family], last_hidden=last_hidden, tap_layer_ids=(0, NUM_LAYERS - 1), batching=batching
        )
        states = target.capture_exact([sample])[0]
        assert list(target.capture_spec.columns)[-1] == LAST_HIDDEN
        torch.testing.assert_close(states[LAST_HIDDEN], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states[tap_column(NUM_LAYERS - 1)], raw[0][0], rtol=1e-4, atol=1e-4)
        check_parity(target, random_samples(LENGTHS))


class _Shift(nn.Module):
    """Stands for an implementation that goes wrong in one layer."""

    def __init__(self, layer: nn.Module, fault: str) -> None:
        super().__init__()
        self.layer, self.fault = layer, fault

    def forward(self, hidden_states: torch.Tensor, **rest: Any) -> torch.Tensor:
        output = self.layer(hidden_states, **rest)
        if hidden_states.shape[0] == 1:
            return output
        if self.fault == "zero":
            output[1, 2] = 0
        elif self.fault == "nan":
            output[1, 2, 3] = float("nan")
        else:
            output = output.roll(1, dims=1)
        return output


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("shift", "layer_003 of sample 'sample-.*differs from a plain forward"),
        ("zero", "layer_003 of sample 'sample-3'.*all zeros at token 2"),
        ("nan", "layer_003 of sample 'sample-3'.*not finite"),
    ],
)
def test_the_parity_gate_names_layer_and_sample(folders: dict[str, Path], fault: str, message: str) -> None:
    target = load(folders["qwen3"], batching="padded")
    target.recorder.remove()
    target.model.layers[3] = _Shift(target.model.layers[3], fault)
    target = Target(target.model, target.tokenizer, target.config, target.spec, target.capture_spec)
    with pytest.raises(ParityError, match=message):
        check_parity(target, random_samples(LENGTHS))


def test_a_neighbouring_layer_is_far_outside_the_tolerance(folders: dict[str, Path]) -> None:
    target = load(folders["qwen3_5"], batching="padded", dtype="bfloat16")
    hooked = dict(target.recorder.outputs)
    assert not hooked
    target.recorder.remove()
    off = target.capture_spec.model_copy(update={"tap_layer_ids": (0, 2, 3)})
    target.recorder.__init__(target.model, off)  # type: ignore[misc]

    def renamed(batch: Sequence[Sample]) -> list[dict[str, torch.Tensor]]:
        states = forward_padded(target.model, target.recorder, batch, target.device)
        return [{tap_column(tap + 1): one[tap_column(tap)] for tap in off.tap_layer_ids} for one in states]

    target.capture_exact = renamed  # type: ignore[method-assign]
    with pytest.raises(ParityError, match="differs from a plain forward"):
        check_parity(target, random_samples(LENGTHS))


@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_the_parity_gate_keeps_to_the_configured_batches(folders: dict[str, Path], batching: str) -> None:
    target = load(folders["qwen3"], batching=batching, batch_tokens=64)
    real, sizes = target.capture_exact, []

    def counted(batch: Sequence[Sample]) -> list[dict[str, torch.Tensor]]:
        sizes.append(sum(sample.num_tokens for sample in batch))
        return real(batch)

    target.capture_exact = counted  # type: ignore[method-assign]
    check_parity(target, random_samples((30, 31, 32, 9, 8)))
    assert sum(sizes) == 110 and max(sizes) <= 64


def test_hybrid_targets_warn_without_the_fast_kernels(folders: dict[str, Path]) -> None:
    pytest.importorskip("transformers")
    for family in ("qwen3", *HYBRID):
        report = load(folders[family]).report
        assert bool(report) == (family in HYBRID)
        assert not report or "flash-linear-attention" in report[0]


def test_default_tap_ids_follow_the_rule() -> None:
    assert default_tap_ids(28) == (1, 7, 13, 19, 25)
    assert default_tap_ids(36) == (1, 9, 17, 25, 33)
    assert default_tap_ids(64) == (1, 16, 31, 46, 61)
    assert default_tap_ids(30) == (1, 8, 14, 20, 27)
    assert default_tap_ids(28, 1) == (14,)
    with pytest.raises(UserError, match="num_taps"):
        default_tap_ids(6)


@pytest.mark.parametrize("ids", [(), (3, 1), (1, 1), (-1, 2), (1, NUM_LAYERS)])
def test_wrong_tap_ids_are_refused(folders: dict[str, Path], ids: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="counted from 0"):
        describe_target(TargetConfig(path=str(folders["qwen3"]), tap_layer_ids=ids))


def test_identity_follows_weights_and_tokenizer(folders: dict[str, Path], tmp_path: Path) -> None:
    config = TargetConfig(path=str(folders["qwen3"]), tap_layer_ids=TAPS)
    spec, capture_spec = describe_target(config)
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (NUM_LAYERS, WIDTH, VOCAB_SIZE)
    assert spec.model_type == "qwen3" and spec.mask_token_id is None
    assert capture_spec.tap_layer_ids == TAPS and capture_spec.weights_dtype == "bfloat16"

    copy = tmp_path / "copy"
    shutil.copytree(folders["qwen3"], copy)
    moved, _ = describe_target(config.model_copy(update={"path": str(copy)}))
    assert moved == spec.model_copy(update={"name": "copy"})

    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    changed, _ = describe_target(config.model_copy(update={"path": str(copy)}))
    assert changed.weights_sha256 != spec.weights_sha256
    assert changed.tokenizer_sha256 == spec.tokenizer_sha256

    template = copy / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    again, _ = describe_target(config.model_copy(update={"path": str(copy)}))
    assert again.tokenizer_sha256 != spec.tokenizer_sha256


def test_the_wrapper_is_the_text_model(folders: dict[str, Path]) -> None:
    spec, _ = describe_target(TargetConfig(path=str(folders["qwen3_5_wrapper"]), tap_layer_ids=TAPS))
    assert spec.model_type == "qwen3_5_text" and spec.num_layers == NUM_LAYERS
    assert spec.rope_theta == 10000.0


def test_mask_tokens_are_named_or_refused(folders: dict[str, Path]) -> None:
    target = load(folders["llama"], mask_token=MASK_TOKEN_ID)
    assert target.spec.mask_token_id == MASK_TOKEN_ID
    assert load(folders["llama"], mask_token="<|endoftext|>").spec.mask_token_id == 258
    bare, _ = describe_target(TargetConfig(path=str(folders["llama"]), tap_layer_ids=TAPS))
    with pytest.raises(UserError, match=r"no default mask token.*ids 259 to 319 are unused"):
        mask_token_id(None, bare, target.tokenizer)
    for wrong in ("nonsense token", VOCAB_SIZE, -1):
        with pytest.raises(UserError, match="mask_token"):
            mask_token_id(wrong, bare, target.tokenizer)
    qwen = bare.model_copy(update={"mask_token_id": 151669})
    assert mask_token_id(None, qwen, target.tokenizer) == 151669


@pytest.mark.parametrize("family", ["llama", "qwen3_5_wrapper"])
def test_embedding_and_head_are_read_alone(folders: dict[str, Path], family: str) -> None:
    embedding_VD, head_VD = load_embedding_and_head(str(folders[family]))
    whole = family_model(family)
    for found, module in (
        (embedding_VD, whole.get_input_embeddings()),
        (head_VD, whole.get_output_embeddings()),
    ):
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, module.weight.data.to(torch.bfloat16))


def test_a_tied_head_is_the_embedding(folders: dict[str, Path], tmp_path: Path) -> None:
    model = family_model("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    embedding_VD, head_VD = load_embedding_and_head(str(tmp_path))
    assert embedding_VD is head_VD
    assert torch.equal(embedding_VD, model.get_input_embeddings().weight.data.to(torch.bfloat16))


def test_a_head_of_its_own_counts_though_the_configuration_says_tied(tmp_path: Path) -> None:
    model = family_model("llama")
    model.save_pretrained(tmp_path)
    model.config.tie_word_embeddings = True
    model.config.save_pretrained(tmp_path)
    embedding_VD, head_VD = load_embedding_and_head(str(tmp_path))
    assert not torch.equal(embedding_VD, head_VD)
    assert torch.equal(head_VD, model.get_output_embeddings().weight.data.to(torch.bfloat16))


def test_incomplete_or_absent_targets_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        describe_target(TargetConfig(path=str(tmp_path / "nowhere")))
    broken = tmp_path / "broken"
    shutil.copytree(folders["qwen3"], broken)
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks weights.*layers\.2\.mlp\.up_proj"):
        load(broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no weights"):
        load(broken)


def test_a_target_that_scales_its_embeddings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'gemma3_text' does more than look up"):
        load(write_family("gemma3", tmp_path))


def test_batches_fill_the_budget_and_lose_nothing() -> None:
    samples = random_samples(np.random.default_rng(0).integers(1, 200, 100).tolist())
    ids = sorted(sample.sample_id for sample in samples)
    padded = list(batches(samples, 500))
    assert sorted(sample.sample_id for batch in padded for sample in batch) == ids
    assert all(len(batch) * max(s.num_tokens for s in batch) <= 500 for batch in padded)
    longest = [batch[0].num_tokens for batch in padded]
    assert longest == sorted(longest, reverse=True)

    packed = list(packed_batches(samples, 500))
    assert [sample.sample_id for batch in packed for sample in batch] == [s.sample_id for s in samples]
    sizes = [sum(sample.num_tokens for sample in batch) for batch in packed]
    assert max(sizes) <= 500 and np.mean(sizes) > 350
    assert [len(batch) for batch in packed_batches(random_samples([700, 20]), 500)] == [1, 1]


def test_a_smaller_budget_follows_when_memory_runs_out(folders: dict[str, Path]) -> None:
    """The device's refusal stands in a wrapped layer: everything above it is real."""
    target = load(folders["qwen3"], batching="padded")
    layer = target.model.layers[0]
    refused: list[weakref.ref[torch.Tensor]] = []

    def small_device(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[0] * inputs[0].shape[1] > 64:
            refused.append(weakref.ref(inputs[0]))
            raise torch.OutOfMemoryError("CUDA out of memory")

    layer.register_forward_pre_hook(small_device)
    samples = random_samples((30, 31, 32, 9, 8, 7, 3))
    told: list[int] = []

    def on_smaller(budget: int) -> None:
        assert not any(activation() is not None for activation in refused), "they would fill the memory"
        told.append(budget)

    seen = [item for batch in captures(target, samples, 200, on_smaller) for item in batch]
    assert sorted(item.sample.sample_id for item in seen) == sorted(s.sample_id for s in samples)
    assert told and told == sorted(told, reverse=True) and told[-1] <= 96
    with pytest.raises(TargetOutOfMemory, match="no room"):
        list(captures(target, random_samples([65]), 200))


def test_no_room_beside_the_forward_is_out_of_memory_too(folders: dict[str, Path]) -> None:
    class NoRoomForCopies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.bfloat16:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return func(*args, **(kwargs or {}))

    target = load(folders["qwen3"])
    with NoRoomForCopies(), pytest.raises(TargetOutOfMemory, match="no room for the states of 2 samples"):
        target.capture(random_samples([5, 9]))


def test_unknown_models_fall_back_to_padded_rows(folders: dict[str, Path]) -> None:
    target = load(folders["qwen3"])
    target.model.config.layer_types = ["sliding_attention"] * len(target.model.layers)
    config = target.config.model_copy(update={"batching": "packed"})
    with pytest.raises(UserError, match="sliding"):
        Target(target.model, None, config, target.spec, target.capture_spec)
    with pytest.raises(UserError, match="device_map"):
        load(folders["qwen3"], batching="packed", device_map="auto")


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_eight_bit_products_add_an_error_that_is_reported(folders: dict[str, Path], family: str) -> None:
    exact = load(folders[family], dtype="bfloat16", batching="packed")
    coarse = load(folders[family], dtype="fp8")
    assert coarse.capture_spec.weights_dtype == "fp8" and coarse.packed is not None
    samples = random_samples(LENGTHS)
    error = max(check_parity(coarse, samples).values())
    assert max(check_parity(exact, samples).values()) < error < 0.5
    with pytest.raises(UserError, match="fp8"):
        load(folders[family], dtype="fp8", batching="padded")


@pytest.mark.slow
def test_compiled_arithmetic_equals_uncompiled(folders: dict[str, Path]) -> None:
    samples, more = random_samples((3, 120)), random_samples((40, 100, 200))
    target = load(folders["qwen3_5"], batching="packed", compile_layers=True, tap_layer_ids=(0, 3))
    for batch in (samples, more):
        assert max(check_parity(target, batch).values()) < 1e-3
