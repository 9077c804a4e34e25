"""Regenerates the responses of chats with the target: here, or through an OpenAI-compatible endpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflash_core.chat import ChatConfig
from dflash_core.configuration import Config
from dflash_core.respond import GenerationSettings


class EndpointConfig(Config):
    """An OpenAI-compatible server."""

    url: str
    """Base URL, e.g. "http://localhost:8000/v1"."""
    model: str
    concurrency: int = 32
    timeout_seconds: float = 600.0
    retries: int = 5
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, if the server wants one."""


class RespondConfig(Config):
    """One run of `dflash respond`."""

    inputs: tuple[str, ...]
    """Files, folders or data set names (see storage.chats.read_chats)."""
    output: str
    """Folder of part-00000.jsonl ...; finished parts are not done again."""
    target: str | None = None
    """Folder or hub name: answer with transformers here. Give this or `endpoint`."""
    revision: str | None = None
    endpoint: EndpointConfig | None = None
    chat: ChatConfig = ChatConfig()
    generation: GenerationSettings = GenerationSettings()
    batch_size: int = 32
    part_records: int = 512
    limit: int | None = None
    """Stop after this many records."""
    max_bad_fraction: float = 0.01
    device: str = "auto"


@dataclass(frozen=True, kw_only=True)
class RespondReport:
    """What a run did."""

    parts: list[str]
    written: int
    resumed: int
    bad: dict[str, int]
    tokens: int
    seconds: float


def respond(config: RespondConfig, progress: Callable[[int, int | None], None] | None = None) -> RespondReport:
    """Write one record a chat with the target's own responses; `progress(done, total)` is called as it goes."""
    raise NotImplementedError
