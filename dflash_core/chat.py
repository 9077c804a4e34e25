"""Turns one chat into token ids and the mask of what the assistant wrote, with the target's own template."""

from __future__ import annotations

from typing import Any

from dflash_core.configuration import Config
from dflash_core.records import Sample


class ChatConfig(Config):
    """How chats become samples. Every field changes the content of a data set, so all are part of its identity."""

    max_length: int = 3072
    """Tokens that a chat is cut to."""
    min_supervised: int = 3
    """A chat with fewer supervised tokens (after the cut) is dropped."""
    enable_thinking: bool | None = None
    """Given to the template when set; must be what the drafter will be served with."""
    template_arguments: dict[str, Any] = {}
    """Further variables of the template, e.g. {"date_string": "01 Jan 2026"}."""
    chat_template: str | None = None
    """Jinja text that replaces the tokenizer's template."""


class ChatError(ValueError):
    """A chat that gives no sample. `reason` is a short class for counting, `detail` is for people.

    `unusable` is True when the record itself is at fault (it counts towards the caller's limit of bad
    records), False when it is sound and merely filtered, e.g. too short.
    """

    def __init__(self, reason: str, detail: str = "", *, unusable: bool = True) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail, self.unusable = reason, detail, unusable


class ChatEncoder:
    """Encodes chats with one tokenizer and one configuration; finds the template's turn markers once."""

    def __init__(self, tokenizer: Any, config: ChatConfig) -> None:
        """Raise UserError when the template gives no way to tell what the assistant wrote."""
        raise NotImplementedError

    def encode(self, record: dict[str, Any]) -> Sample:
        """Encode one record (messages or ShareGPT form). Raise ChatError when it gives no sample."""
        raise NotImplementedError

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
        """Token ids of the messages with the generation prompt appended, as a server would build them."""
        raise NotImplementedError


def normalise(record: Any) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Return (messages, tools) of a record in `messages` or ShareGPT (`conversations`) form. Raise ChatError."""
    raise NotImplementedError


def encode_chat(tokenizer: Any, record: dict[str, Any], config: ChatConfig) -> Sample:
    """Encode one chat; `ChatEncoder` does the same for many without probing the template each time."""
    return ChatEncoder(tokenizer, config).encode(record)
