"""Turns one chat into token ids and the mask of what the assistant wrote, with the target's own template."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from pydantic import Field

from dflash_core.configuration import Config, UserError
from dflash_core.messages import ChatError, normalise, record_id
from dflash_core.records import Sample

__all__ = ["ChatConfig", "ChatEncoder", "ChatError", "TurnMarkers", "encode_chat", "normalise"]

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = ("PROBEQUESTIONONE", "PROBEANSWERONE", "PROBEQUESTIONTWO", "PROBEANSWERTWO")


class ChatConfig(Config):
    """How chats become samples. Every field changes the content of a data set, so all are its identity."""

    max_length: int = Field(default=3072, ge=8)
    """Tokens that a chat is cut to."""
    min_supervised: int = Field(default=3, ge=1)
    """A chat with fewer supervised tokens (after the cut) is dropped."""
    enable_thinking: bool | None = None
    """Given to the template when set; must be what the drafter will be served with."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the template, e.g. {"date_string": "01 Jan 2026"}."""
    chat_template: str | None = None
    """Jinja text that replaces the tokenizer's template."""

    def template_variables(self) -> dict[str, Any]:
        """Everything that is passed to the template beside messages and tools."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**self.template_arguments, **thinking}


@dataclass(frozen=True)
class TurnMarkers:
    """The text with which a template opens and closes an assistant turn."""

    header: str
    """Opens every assistant turn, e.g. "<|im_start|>assistant\\n"."""
    generation_prompt: str
    """What a server appends before the target writes: the header, perhaps an open or empty think block."""
    turn_end: str
    """Special token with which the target ends its turn, e.g. "<|im_end|>"."""


class ChatEncoder:
    """Encodes chats with one tokenizer and one configuration; finds the template's turn markers once."""

    def __init__(self, tokenizer: Any, config: ChatConfig) -> None:
        """Raise UserError when the template gives no way to tell what the assistant wrote."""
        self.tokenizer, self.config = tokenizer, config
        template = config.chat_template or tokenizer.chat_template
        if not template:
            raise UserError(
                "the tokenizer has no chat template, so chats cannot be turned into tokens; "
                "give one with chat.chat_template (Jinja text)"
            )
        if isinstance(template, dict):
            template = template.get("tool_use") or template["default"]
        self.template: str = template
        self.has_generation_tags = bool(_GENERATION_TAG.search(template))
        self.markers = _find_turn_markers(self)

    def encode(self, record: dict[str, Any]) -> Sample:
        """Encode one record (messages or ShareGPT form).

        The template is rendered once. The mask is True for the tokens that the target writes when it is
        served with the same settings: the text of assistant turns with their end token, without the header
        and without what the generation prompt already holds. Tokens behind the last supervised one are cut.
        A record with "finish_reason": "length" does not get its last end token supervised: the target did
        not write it. Raise ChatError when the record gives no sample.
        """
        messages, tools = normalise(record)
        cut_short = record.get("finish_reason") == "length"
        ids, mask_T = self._ids_and_mask(messages, tools, cut_short)
        mask_T[self.config.max_length :] = False
        supervised = int(mask_T.sum())
        if supervised < self.config.min_supervised:
            cause = "too few supervised tokens" if len(ids) <= self.config.max_length else "cut away"
            detail = f"{supervised} of {len(ids)} tokens; chat.min_supervised is {self.config.min_supervised}"
            raise ChatError(cause, detail, unusable=False)
        stop = int(np.flatnonzero(mask_T)[-1]) + 1
        return Sample(
            sample_id=record_id(record, messages),
            token_ids_T=np.asarray(ids[:stop], dtype=np.int32),
            loss_mask_T=mask_T[:stop],
        )

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
        """Token ids of the messages with the generation prompt appended, as a server would build them."""
        return self._ids(self.render(messages, tools, add_generation_prompt=True))

    def render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, *, add_generation_prompt: bool = False
    ) -> str:
        """Render messages to text. Raise ChatError when the template refuses them."""
        try:
            return self.tokenizer.apply_chat_template(
                _for_template(messages),
                tools=tools,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.config.template_variables(),
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ChatError("template refused", str(error)) from None

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _ids_and_mask(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, cut_short: bool
    ) -> tuple[list[int], np.ndarray]:
        if self.has_generation_tags:
            return self._from_generation_tags(messages, tools, cut_short)
        text = self.render(messages, tools)
        assistants = [message for message in messages if message["role"] == "assistant"]
        spans = self._assistant_spans(text, len(assistants))
        if cut_short:
            start, end = spans[-1]
            spans[-1] = (start, end - len(self.markers.turn_end))
        kept = [
            span for span, message in zip(spans, assistants, strict=True) if message.get("supervised", True)
        ]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], _tokens_inside(encoded["offset_mapping"], kept)

    def _from_generation_tags(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, cut_short: bool
    ) -> tuple[list[int], np.ndarray]:
        try:
            encoded = self.tokenizer.apply_chat_template(
                _for_template(messages),
                tools=tools,
                chat_template=self.template,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **self.config.template_variables(),
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ChatError("template refused", str(error)) from None
        ids = list(encoded["input_ids"])
        mask_T = np.asarray(encoded["assistant_masks"], dtype=bool)
        runs = _runs(mask_T)
        end_ids = self._ids(self.markers.turn_end)
        # Tags may hold what a server puts behind the header itself, say an empty think block.
        held_ids = self._ids(self.markers.generation_prompt.removeprefix(self.markers.header))
        for start, stop in runs:
            if held_ids and ids[start : min(start + len(held_ids), stop)] == held_ids:
                mask_T[start : start + len(held_ids)] = False
        # Tags are often placed before the end of the turn, but the target writes that token too.
        for _, stop in runs:
            if len(end_ids) == 1 and ids[stop : stop + 1] == end_ids:
                mask_T[stop] = True
        assistants = [message for message in messages if message["role"] == "assistant"]
        runs = _runs(mask_T)
        if any(message.get("supervised") is False for message in assistants):
            if len(runs) != len(assistants):
                raise ChatError("turns not found", f"{len(assistants)} assistant turns, {len(runs)} tagged")
            for (start, stop), message in zip(runs, assistants, strict=True):
                mask_T[start:stop] = message.get("supervised", True)
        if cut_short and runs and ids[runs[-1][1] - 1] in end_ids:
            mask_T[runs[-1][1] - 1] = False
        return ids, mask_T

    def _assistant_spans(self, text: str, expected: int) -> list[tuple[int, int]]:
        """Character spans [start, end) of what the target wrote, found by the turn markers."""
        markers, spans, cursor = self.markers, [], 0
        while (position := text.find(markers.header, cursor)) >= 0:
            whole = text.startswith(markers.generation_prompt, position)
            start = position + len(markers.generation_prompt if whole else markers.header)
            end = text.find(markers.turn_end, start)
            end = len(text) if end < 0 else end + len(markers.turn_end)
            spans.append((start, end))
            cursor = end
        if len(spans) != expected:
            raise ChatError(
                "turns not found",
                f"the rendered text opens {len(spans)} assistant turns, the record has {expected}: "
                "a message holds control tokens, or the template leaves turns out",
            )
        return spans


def encode_chat(tokenizer: Any, record: dict[str, Any], config: ChatConfig) -> Sample:
    """Encode one chat; `ChatEncoder` does the same for many without probing the template each time."""
    return ChatEncoder(tokenizer, config).encode(record)


def _find_turn_markers(encoder: ChatEncoder) -> TurnMarkers:
    """Learn how the template opens and closes assistant turns from a conversation of known words."""
    first, answer, second, last = _PROBE
    question = [{"role": "user", "content": first}]
    turns = [*question, {"role": "assistant", "content": answer}, {"role": "user", "content": second}]
    try:
        before = encoder.render(question, None)
        prompt = encoder.render(question, None, add_generation_prompt=True)
        dialogue = encoder.render([*turns, {"role": "assistant", "content": last}], None)
    except ChatError as error:
        raise UserError(f"the chat template fails on a plain two-turn conversation: {error.detail}") from None
    generation_prompt = prompt[len(before) :] if prompt.startswith(before) else ""
    opening = dialogue[dialogue.find(first) + len(first) : dialogue.find(answer)]
    # The header is what a written turn shares with the generation prompt: the latter may go on with a
    # think block that history turns do not have.
    header = _longest_common(opening, generation_prompt)
    closing = dialogue[dialogue.find(answer) + len(answer) : dialogue.find(second)]
    turn_end = _first_special(encoder.tokenizer, closing)
    if not encoder.has_generation_tags and not (header.strip() and turn_end):
        raise UserError(
            "the chat template does not show where assistant turns begin and end (it adds no generation "
            "prompt, or no special token at the end of a turn); put {% generation %} ... {% endgeneration %} "
            "around the assistant's text and give the template with chat.chat_template"
        )
    return TurnMarkers(header=header, generation_prompt=generation_prompt, turn_end=turn_end)


def _longest_common(opening: str, generation_prompt: str) -> str:
    """Longest beginning of `generation_prompt` that occurs in `opening`, e.g. the bare header."""
    length = len(generation_prompt)
    while length and generation_prompt[:length] not in opening:
        length -= 1
    return generation_prompt[:length]


def _first_special(tokenizer: Any, text: str) -> str:
    """First special token in `text`, as text; "" when there is none."""
    special = {tokenizer.eos_token_id, *tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        if token in special:
            return tokenizer.convert_ids_to_tokens(token)
    return ""


def _for_template(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in message.items() if key != "supervised"} for message in messages]


def _tokens_inside(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> np.ndarray:
    """bool [T]: tokens that begin inside a span; spans are ascending and do not overlap."""
    starts_T = np.asarray([start for start, _ in offsets], dtype=np.int64)
    mask_T = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        mask_T |= (starts_T >= start) & (starts_T < end)
    return mask_T


def _runs(mask_T: np.ndarray) -> list[tuple[int, int]]:
    """[start, stop) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask_T.astype(np.int8), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
