"""The frozen target: loads it as far as it is needed, and gives its hidden states at the tapped layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from dflash_core.configuration import Config
from dflash_core.records import CapturedSample, CaptureSpec, Sample, TargetSpec


class TargetConfig(Config):
    """Which target, and what to take from it."""

    path: str
    """Folder, or name on the Hugging Face hub."""
    revision: str | None = None
    """Hub revision; a data set remembers the commit it resolved to."""
    tap_layer_ids: tuple[int, ...] | None = None
    """Layers to tap, ascending, counted from 0 (output of decoder layer i); None: `default_tap_ids`."""
    num_taps: int = 5
    """How many taps the default rule gives."""
    last_hidden: Literal["no", "before_final_norm", "after_final_norm"] = "no"
    """Also capture the last hidden state; then every layer is run."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Arithmetic of the target."""
    mask_token: int | str | None = None
    """Token that fills the masked slots; needed where the target has no default for it."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    device_map: str | dict[str, int] | None = None
    """transformers' device_map for a target that fits no single GPU ("auto")."""
    compile_layers: bool = False
    """Run decoder layers through torch.compile. Only from the main thread of a process of its own."""
    batch_tokens: int = 16384
    """Tokens of a padded batch (rows x longest)."""


class TargetOutOfMemory(RuntimeError):
    """The device had no room for a batch; the caller halves its token budget."""


class ParityError(RuntimeError):
    """Captured states differ from a plain forward; the message names layer and sample."""


class Target:
    """A loaded target: `spec`, `capture_spec`, `tokenizer`, `model` (text body, no head), `device`, `report`."""

    spec: TargetSpec
    capture_spec: CaptureSpec
    config: TargetConfig
    tokenizer: Any
    model: torch.nn.Module
    device: torch.device
    report: list[str]
    """Sentences that the user must hear, e.g. that flash-linear-attention is missing."""

    def capture(self, batch: Sequence[Sample]) -> list[CapturedSample]:
        """Run one right-padded batch and return one bf16 [T, D] tensor a column and sample, padding cut.

        Raise TargetOutOfMemory when the device has no room.
        """
        raise NotImplementedError


def load_target(config: TargetConfig, device: str | torch.device) -> Target:
    """Load the text model as far as the last tap (or whole, with `last_hidden`). Raise UserError."""
    raise NotImplementedError


def describe_target(config: TargetConfig) -> tuple[TargetSpec, CaptureSpec]:
    """Identity of a target and of its capture, from its files alone; no weights are loaded."""
    raise NotImplementedError


def default_tap_ids(num_layers: int, num_taps: int = 5) -> tuple[int, ...]:
    """Layers tapped by the rule of the DFlash paper: id_i = round(1 + i (N-4)/(n-1)); n = 1: N // 2."""
    raise NotImplementedError


def batches(samples: Sequence[Sample], token_budget: int) -> Iterator[list[Sample]]:
    """Yield batches of samples of similar length with rows x longest <= token_budget, longest first."""
    raise NotImplementedError


def check_parity(target: Target, samples: Sequence[Sample]) -> dict[str, float]:
    """Compare captured states with a plain forward (batch of one, output_hidden_states).

    Return the worst relative error of each column. Raise ParityError naming layer and sample.
    """
    raise NotImplementedError


def load_embedding_and_head(path: str, revision: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the target's embedding [V, D] and head [V, D] (the same tensor when tied) as bf16, nothing else."""
    raise NotImplementedError
