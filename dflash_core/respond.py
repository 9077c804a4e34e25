"""Lets the target write its own responses: batched greedy or sampled generation with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflash_core.chat import ChatConfig
from dflash_core.configuration import Config


class GenerationSettings(Config):
    """How responses are drawn."""

    max_new_tokens: int = 1024
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Response:
    """What the target wrote for one prompt."""

    message: dict[str, Any]
    """{"role": "assistant", "content": ...} with "reasoning_content" split out where the target thinks."""
    token_ids: list[int]
    finish_reason: str
    """"stop" or "length"."""


class Responder:
    """A whole target (head included) that answers batches of prompts."""

    def __init__(self, path: str, revision: str | None, chat: ChatConfig, device: str | torch.device) -> None:
        """Load model and tokenizer. Raise UserError."""
        raise NotImplementedError

    def respond(
        self, prompts: Sequence[tuple[list[dict[str, Any]], list[Any] | None]], settings: GenerationSettings
    ) -> list[Response]:
        """Answer (messages, tools) pairs in one go; results in the order of the prompts."""
        raise NotImplementedError
