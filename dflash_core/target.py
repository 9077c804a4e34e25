"""The frozen target: loads it as far as it is needed, and gives its hidden states at the tapped layers."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from dflash_core.capture import TapRecorder, TargetOutOfMemory, batches, forward_packed, forward_padded
from dflash_core.capture_ahead import captures
from dflash_core.configuration import Config, UserError
from dflash_core.load_progress import tell_while_reading
from dflash_core.packed_body import NotPackable, PackedBody, packed_batches
from dflash_core.parity import ParityError, check_parity
from dflash_core.records import LAST_HIDDEN, CapturedSample, CaptureSpec, Sample, TargetSpec, tap_column
from dflash_core.target_identity import (
    TargetName,
    check_tap_ids,
    default_tap_ids,
    load_text_config,
    load_tokenizer,
    mask_token_id,
    target_spec,
)
from dflash_core.target_weights import load_embedding_and_head

__all__ = [
    "ParityError",
    "Target",
    "TargetConfig",
    "TargetOutOfMemory",
    "batches",
    "captures",
    "check_parity",
    "default_tap_ids",
    "describe_capture",
    "describe_target",
    "load_embedding_and_head",
    "load_target",
    "load_tokenizer",
    "mask_token_id",
    "packed_batches",
]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "fp8": torch.bfloat16}


class TargetConfig(Config):
    """Which target, and what to take from it."""

    path: TargetName
    """Folder, or name on the Hugging Face hub."""
    revision: str | None = None
    """Hub revision; a data set remembers the commit it resolved to."""
    tap_layer_ids: tuple[int, ...] | None = None
    """Layers to tap, ascending, counted from 0 (output of decoder layer i); None: `default_tap_ids`. Leave
    out the last one: a drafter that reads it cannot be served by all engines, so none is trained."""
    num_taps: int = Field(default=5, ge=1)
    """How many taps the default rule gives."""
    last_hidden: Literal["no", "before_final_norm", "after_final_norm"] = "no"
    """Also capture the last hidden state; then every layer is run."""
    dtype: Literal["bfloat16", "float32", "fp8"] = "bfloat16"
    """Arithmetic of the target. "fp8": 8-bit matrix products, packed targets only; faster, and the error
    that it adds is what the parity gate reports. Part of a data set's identity."""
    mask_token: int | str | None = None
    """Token that fills the masked slots; needed where the target has no default for it."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers."""
    device_map: str | dict[str, int] | None = None
    """transformers' device_map for a target that fits no single GPU ("auto"); each worker needs several."""
    batching: Literal["auto", "packed", "padded"] = "auto"
    """How documents share a forward: one behind the other without padding (the fast way, for the model
    types in packed_body.py), or as padded rows through transformers' own forward. "auto": packed on a GPU
    where the model allows it."""
    compile_layers: bool | None = None
    """Fuse the arithmetic between matrix products with torch.compile; None: on a GPU. Compiled targets must
    be used from the main thread of a process of their own."""
    batch_tokens: int = Field(default=16384, ge=1)
    """Tokens of a batch, padding included."""


class Target:
    """A loaded target that captures hidden states. Build it with `load_target`."""

    def __init__(
        self, model: Any, tokenizer: Any, config: TargetConfig, spec: TargetSpec, capture_spec: CaptureSpec
    ) -> None:
        """`model` is a transformers text body: embed_tokens, layers, norm; no head. Raise UserError."""
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.spec, self.capture_spec = spec, capture_spec
        self.device = model.embed_tokens.weight.device
        self.report = _warnings(model)
        """Sentences that the user must hear, e.g. that flash-linear-attention is missing."""
        on_gpu = self.device.type == "cuda"
        compiled = on_gpu if config.compile_layers is None else config.compile_layers
        self.recorder = TapRecorder(model, capture_spec)
        """Hooks of the padded forward."""
        self.packed = self._packed_body(compiled) if _wants_packing(config, on_gpu) else None
        """The fast forward, or None when transformers' own is used."""
        if compiled and self.packed is None:
            for layer in model.layers:
                layer.forward = torch.compile(layer.forward, dynamic=True)

    def batches(self, samples: Sequence[Sample], token_budget: int | None = None) -> Iterator[list[Sample]]:
        """Yield batches for `capture` that fill the budget best; None: the configured one."""
        budget = token_budget or self.config.batch_tokens
        return batches(samples, budget) if self.packed is None else packed_batches(samples, budget)

    def capture(self, batch: Sequence[Sample]) -> list[CapturedSample]:
        """Run one batch; one bf16 [T, D] tensor a column and sample, in the order of the batch.

        The tensors are views into the batch's outputs on the target's device. Raise TargetOutOfMemory.
        """
        columns = self.capture_spec.columns
        try:
            return [
                CapturedSample(
                    sample=sample,
                    states={name: taps[name].to(self.device, torch.bfloat16) for name in columns},
                )
                for sample, taps in zip(batch, self.capture_exact(batch), strict=True)
            ]
        except torch.OutOfMemoryError as error:
            raise TargetOutOfMemory(f"no room for the states of {len(batch)} samples: {error}") from None

    def capture_exact(self, batch: Sequence[Sample]) -> list[dict[str, torch.Tensor]]:
        """Like `capture`, in the target's own arithmetic (float32 stays float32): for the parity gate."""
        if self.packed is None:
            return forward_padded(self.model, self.recorder, batch, self.device)
        return forward_packed(self.packed, batch, self.device)

    def reference(self, sample: Sample) -> dict[str, torch.Tensor]:
        """States [T, D] of one sample from a plain uncompiled forward with output_hidden_states."""
        ids_BT = torch.tensor(sample.token_ids_T, dtype=torch.int64, device=self.device)[None]
        norm = self.model.norm
        # The last entry of hidden_states would be normed, and tell nothing of the last layer's output.
        self.model.norm = nn.Identity()
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                output = self.model(input_ids=ids_BT, use_cache=False, output_hidden_states=True)
                last_BTD = output.hidden_states[-1]
                last_BTD = norm(last_BTD) if self.capture_spec.last_hidden == "after_final_norm" else last_BTD
        finally:
            self.model.norm = norm
            self.recorder.take()
        columns = {tap_column(i): output.hidden_states[i + 1][0] for i in self.capture_spec.tap_layer_ids}
        return columns if self.capture_spec.last_hidden == "no" else {**columns, LAST_HIDDEN: last_BTD[0]}

    def _packed_body(self, compiled: bool) -> PackedBody | None:
        try:
            return PackedBody(self.model, self.capture_spec, compiled=compiled)
        except NotPackable as error:
            if self.config.batching == "packed" or self.config.dtype == "fp8":
                raise UserError(f"packed batches cannot run {self.spec.name}: {error}") from None
            self.report.append(f"Padded batches are used, which is slower: {error}.")
            return None


def _wants_packing(config: TargetConfig, on_gpu: bool) -> bool:
    if config.batching == "packed" and config.device_map is not None:
        raise UserError('batching "packed" runs on one device; drop device_map, or use batching "padded"')
    if config.dtype == "fp8":
        if config.batching == "padded" or config.device_map is not None:
            raise UserError('dtype "fp8" needs packed batches on one device: drop batching and device_map')
        return True
    return config.batching == "packed" or (config.batching == "auto" and on_gpu and not config.device_map)


def load_target(
    config: TargetConfig, device: str | torch.device, alive: Callable[[], None] | None = None
) -> Target:
    """Load the text model as far as the last tap (or whole, with `last_hidden`).

    Layers behind the last tap are never read from disk, nor is the head, nor the vision part of a
    multimodal target. `alive` is called every few seconds while files are read, on another thread. Raise
    UserError when the target cannot be read or lacks weights.
    """
    spec, capture_spec = describe_target(config)
    _, text = load_text_config(config.path, config.revision)
    text = copy.deepcopy(text)
    if config.last_hidden == "no":
        text.num_hidden_layers = capture_spec.tap_layer_ids[-1] + 1
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[: text.num_hidden_layers]
    with tell_while_reading(alive) if alive else nullcontext():
        model = _load_body(config, text, torch.device(device))
    if config.last_hidden != "after_final_norm":
        # The norm would be run for nothing, and would make the last entry of hidden_states differ.
        model.norm = nn.Identity()
    tokenizer = load_tokenizer(config.path, config.revision)
    return Target(model.eval().requires_grad_(False), tokenizer, config, spec, capture_spec)


def describe_target(config: TargetConfig) -> tuple[TargetSpec, CaptureSpec]:
    """Identity of a target and of its capture, from its files alone; no weights are loaded."""
    spec = target_spec(config.path, config.revision, config.mask_token)
    return spec, describe_capture(config, spec.num_layers)


def describe_capture(config: TargetConfig, num_layers: int) -> CaptureSpec:
    """What is captured of a target with so many layers. Raise UserError when it lacks the taps."""
    if config.tap_layer_ids is None:
        ids = default_tap_ids(num_layers, config.num_taps)
    else:
        ids = check_tap_ids(config.tap_layer_ids, num_layers)
    return CaptureSpec(tap_layer_ids=ids, last_hidden=config.last_hidden, weights_dtype=config.dtype)


def _load_body(config: TargetConfig, text: Any, device: torch.device) -> Any:
    from transformers import AutoModel

    try:
        with _quiet_transformers():
            model, loading = AutoModel.from_pretrained(
                config.path,
                revision=config.revision,
                config=text,
                dtype=_DTYPES[config.dtype],
                attn_implementation=config.attention,
                device_map=_placement(config, device),
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"cannot load the target {config.path!r}: {error}") from None
    missing = sorted(loading["missing_keys"]) + sorted(str(key) for key in loading["mismatched_keys"])
    if missing:
        raise UserError(
            f"{config.path!r} lacks weights of its text model, e.g. {missing[:3]} ({len(missing)} in all); "
            "the checkpoint is incomplete or of a kind that this version of transformers does not know"
        )
    for part in ("embed_tokens", "layers", "norm"):
        if not hasattr(model, part):
            raise UserError(f"model type {text.model_type!r} has no {part!r}: it cannot be tapped")
    if type(model.get_input_embeddings()) is not nn.Embedding:
        raise UserError(
            f"model type {text.model_type!r} does more than look up its input embeddings (scales them, for "
            "example); drafters borrow the plain rows, so it cannot be a target"
        )
    return model if config.device_map is not None else model.to(device)


def _placement(config: TargetConfig, device: torch.device) -> Any:
    """Straight to the GPU where accelerate allows it: a large target need not fit the host's memory."""
    if config.device_map is not None or device.type == "cpu":
        return config.device_map
    return {"": device} if importlib.util.find_spec("accelerate") else None


def _warnings(model: Any) -> list[str]:
    hybrid = "linear_attention" in (getattr(model.config, "layer_types", None) or ())
    if hybrid and importlib.util.find_spec("fla") is None:
        return [
            "This target has linear-attention layers and flash-linear-attention is not installed: "
            "transformers' reference implementation is used, which takes ten times as long on a GPU. "
            "Install it with: pip install -e '.[gpu]'"
        ]
    return []


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence the load report: skipped layers and vision weights are left out on purpose."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
