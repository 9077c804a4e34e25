"""Lets the target write its own responses: batched greedy or sampled generation with transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field

from dflash_core.chat import ChatConfig, ChatEncoder
from dflash_core.configuration import Config, Seed, UserError
from dflash_core.load_progress import tell_while_reading
from dflash_core.target_identity import load_text_config, load_tokenizer

Prompt = tuple[list[dict[str, Any]], list[Any] | None]
"""(messages, tools) that the target is to answer."""


_TOKENS_BETWEEN_SIGNS = 64


class GenerationSettings(Config):
    """How responses are drawn."""

    max_new_tokens: int = Field(default=1024, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class Response:
    """What the target wrote for one prompt."""

    message: dict[str, Any]
    """{"role": "assistant", "content": ...} with "reasoning_content" split out where the target thinks."""
    num_tokens: int
    finish_reason: Literal["stop", "length"]
    reads_back: bool = True
    """Whether the text, cut into tokens again, gives those that were written: labels are made of the text."""


class Responder:
    """A whole target (head included) that answers batches of prompts."""

    def __init__(
        self,
        path: str,
        revision: str | None,
        chat: ChatConfig,
        device: str | torch.device,
        dtype: torch.dtype = torch.bfloat16,
        alive: Callable[[], None] | None = None,
    ) -> None:
        """Load model and tokenizer; `alive` is called every few seconds while files are read, on another
        thread. Raise UserError.
        """
        from transformers import AutoModelForCausalLM

        self.device = torch.device(device)
        self.tokenizer = load_tokenizer(path, revision)
        self.encoder = ChatEncoder(self.tokenizer, chat)
        _, text = load_text_config(path, revision)
        self.hybrid = "linear_attention" in (getattr(text, "layer_types", None) or ())
        direct = self.device.type != "cpu" and importlib.util.find_spec("accelerate") is not None
        try:
            with tell_while_reading(alive) if alive else nullcontext():
                model: Any = AutoModelForCausalLM.from_pretrained(
                    path,
                    revision=revision,
                    config=text,
                    dtype=dtype,
                    device_map={"": self.device} if direct else None,
                )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise UserError(f"cannot load the target {path!r}: {error}") from None
        self.model = model.to(self.device).eval()
        self.stop_ids = _stop_ids(self.model, self.tokenizer, self.encoder)

    def respond(
        self,
        prompts: Sequence[Prompt],
        settings: GenerationSettings,
        batch_size: int = 32,
        progress: Callable[[int], None] | None = None,
    ) -> list[Response]:
        """Answer the prompts, in batches of similar length; results in the order of the prompts.

        `progress` is told how many were answered so far, after each batch and every 64 tokens of one. Raise
        ChatError when the template refuses a prompt.
        """
        ids = [self.encoder.prompt_ids(messages, tools) for messages, tools in prompts]
        answers: list[Response | None] = [None] * len(ids)
        done = 0

        def alive() -> None:
            if progress is not None:
                progress(done)

        for rows in _groups([len(row) for row in ids], batch_size, equal=self.hybrid):
            written = self._generate([ids[i] for i in rows], settings, alive)
            for row, new_ids in zip(rows, written, strict=True):
                answers[row] = self._response(new_ids)
            done += len(rows)
            alive()
        return [answer for answer in answers if answer is not None]

    def _generate(
        self, rows: list[list[int]], settings: GenerationSettings, alive: Callable[[], None]
    ) -> list[list[int]]:
        """New token ids of each row, the stop token included; halves the batch when memory runs out."""
        try:
            return self._generate_batch(rows, settings, alive)
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise
        torch.cuda.empty_cache()
        middle = len(rows) // 2
        return [
            *self._generate(rows[:middle], settings, alive),
            *self._generate(rows[middle:], settings, alive),
        ]

    def _generate_batch(
        self, rows: list[list[int]], settings: GenerationSettings, alive: Callable[[], None]
    ) -> list[list[int]]:
        longest = max(len(row) for row in rows)
        pad = self.stop_ids[0]
        ids_BT = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=self.device)
        mask_BT = torch.tensor(
            [[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=self.device
        )
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(settings.seed)
            output_BT = self.model.generate(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                generation_config=_generation_config(settings, self.stop_ids, pad),
                stopping_criteria=[_tell_and_go_on(alive)],
            )
        return [_until_stop(row[longest:].tolist(), self.stop_ids) for row in output_BT]

    def _response(self, written: list[int]) -> Response:
        stopped = bool(written) and written[-1] in self.stop_ids
        words = written[:-1] if stopped else written
        text = self.tokenizer.decode(words, skip_special_tokens=False)
        return Response(
            reads_back=self.tokenizer(text, add_special_tokens=False)["input_ids"] == words,
            message=split_reasoning(text, self.encoder),
            num_tokens=len(written),
            finish_reason="stop" if stopped else "length",
        )


def split_reasoning(text: str, encoder: ChatEncoder | None = None) -> dict[str, Any]:
    """Make the assistant's message of generated text: what stands before "</think>" is its reasoning.

    With an encoder whose generation prompt leaves a think block open, text without "</think>" is all
    reasoning (the generation was cut).
    """
    opened = encoder is not None and encoder.markers.generation_prompt.rstrip().endswith("<think>")
    if "</think>" not in text and not (opened or text.startswith("<think>")):
        return {"role": "assistant", "content": text}
    before, _, after = text.partition("</think>")
    message = {"role": "assistant", "content": after.lstrip("\n")}
    reasoning = before.removeprefix("<think>").strip("\n")
    return {**message, "reasoning_content": reasoning} if reasoning else message


def _groups(lengths: list[int], batch_size: int, *, equal: bool) -> Iterator[list[int]]:
    """Row numbers by descending length; with `equal`, only rows of one length share a batch.

    Hybrid targets carry a running state through every position, so their rows are never padded.
    """
    group: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if group and (len(group) == batch_size or (equal and lengths[row] != lengths[group[0]])):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _generation_config(settings: GenerationSettings, stop_ids: list[int], pad: int) -> Any:
    """A configuration of our own: the target's may hold penalties that a greedy verifier does not apply."""
    from transformers import GenerationConfig

    sampling: dict[str, Any] = {"do_sample": False}
    if settings.temperature > 0:
        sampling = {
            "do_sample": True,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": 0,
        }
    return GenerationConfig(
        max_new_tokens=settings.max_new_tokens, eos_token_id=stop_ids, pad_token_id=pad, **sampling
    )


def _tell_and_go_on(alive: Callable[[], None]) -> Callable[..., torch.Tensor]:
    """A stopping criterion that never stops, and says now and then that the generation goes on."""

    def criterion(ids_BT: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if ids_BT.shape[1] % _TOKENS_BETWEEN_SIGNS == 0:
            alive()
        return torch.zeros(len(ids_BT), dtype=torch.bool, device=ids_BT.device)

    return criterion


def _stop_ids(model: Any, tokenizer: Any, encoder: ChatEncoder) -> list[int]:
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    ids = [*ids, tokenizer.eos_token_id, tokenizer.get_vocab().get(encoder.markers.turn_end)]
    stops = list(dict.fromkeys(i for i in ids if i is not None))
    if not stops:
        raise UserError("neither tokenizer nor generation_config.json names an end-of-text token")
    return stops


def _until_stop(ids: list[int], stop_ids: list[int]) -> list[int]:
    for position, token in enumerate(ids):
        if token in stop_ids:
            return ids[: position + 1]
    return ids
