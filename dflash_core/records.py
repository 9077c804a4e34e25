"""What passes between the rooms: a tokenised chat, its captured hidden states, where they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from dflash_core.configuration import Config

TAP_CONVENTION = "layer id i is the output of decoder layer i, counted from 0"
"""Written into every data set; a data set or drafter with another sentence is refused."""

LAST_HIDDEN = "last_hidden"
"""Column of the optional last hidden state (input of the head, or of the final norm: see `CaptureSpec`)."""


def tap_column(layer_id: int) -> str:
    """Name the shard column of one tapped layer: 16 -> "layer_016"."""
    return f"layer_{layer_id:03d}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One tokenised chat."""

    sample_id: str
    """Stable name of the chat, unique in a data set."""
    token_ids_T: np.ndarray
    """int32 [T]."""
    loss_mask_T: np.ndarray
    """bool [T]: True where the token was written by the assistant and is to be learnt."""
    where: str = ""
    """Where the chat was read, such as "chats.jsonl:12": for messages, not stored."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CapturedSample:
    """A sample and the hidden states that the target computed for it."""

    sample: Sample
    states: dict[str, torch.Tensor]
    """Column name (`tap_column`, `LAST_HIDDEN`) -> bf16 [T, D], on the device that computed them."""


class TargetSpec(Config):
    """Which target a data set or a drafter belongs to. Every field is part of the identity."""

    name: str
    """Hub name or folder name; for people."""
    weights_sha256: str
    """Fingerprint of configuration and weights (hub revision, or a digest of the folder)."""
    tokenizer_sha256: str
    """Fingerprint of the tokenizer files, the chat template included."""
    model_type: str
    """transformers' model type of the text model, e.g. "qwen3"."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    """Rows of the embedding (padded vocabulary)."""
    rope_theta: float
    mask_token_id: int | None = None
    """Token id whose embedding fills the masked slots; None when the target has no default for it."""


class CaptureSpec(Config):
    """What was captured from the target."""

    tap_layer_ids: tuple[int, ...]
    tap_convention: str = TAP_CONVENTION
    last_hidden: Literal["no", "before_final_norm", "after_final_norm"] = "no"
    weights_dtype: str = "bfloat16"
    """Arithmetic of the target while capturing: "bfloat16", "float32", "fp8"."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Shard columns in stored order."""
        taps = tuple(tap_column(i) for i in self.tap_layer_ids)
        return taps if self.last_hidden == "no" else (*taps, LAST_HIDDEN)
