"""Takes a chat through its turns again, with the target in the place of the assistant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dflash_core.messages import ChatError
from flows.answer import Answer


@dataclass
class Conversation:
    """One chat on its way: what is said already, and what the people in it still have to say."""

    sample_id: str | None
    """None where the chat has no id of its own: one made of its content would say nothing of the answers."""
    where: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    said: list[dict[str, Any]] = field(default_factory=list)
    error: ChatError | None = None
    finish_reason: str = "stop"
    _next: int = 0

    def prompt(self) -> list[dict[str, Any]] | None:
        """Go on to the next turn of the assistant and return what stands before it; None at the end.

        In chats with tools only the last response is written anew: the recorded tool results answer the
        recorded calls. The kept responses are marked as not supervised, the target did not write them.
        """
        while self.error is None and self.finish_reason == "stop" and self._next < len(self.messages):
            message = self.messages[self._next]
            self._next += 1
            if message["role"] != "assistant":
                self.said.append(message)
            elif self._keeps(self._next - 1):
                self.said.append({**message, "supervised": False})
            elif not self.said or self.said[-1]["role"] != "assistant":
                return list(self.said)
        return None

    def hear(self, message: dict[str, Any], finish_reason: str) -> None:
        """Take the target's response; a response that was cut short ends the chat."""
        if finish_reason == "length" and not message.get("content"):
            self.error = ChatError("cut while thinking", "raise generation.max_new_tokens", unusable=False)
            return
        if not any(message.get(key) for key in ("content", "reasoning_content", "tool_calls")):
            self.error = ChatError("empty response", "the target ended its turn at once", unusable=False)
            return
        self.said.append(message)
        self.finish_reason = finish_reason

    def record(self) -> dict[str, Any]:
        """The chat with the target's responses, in `messages` form.

        Templates drop the reasoning of earlier turns, so what was written after it does not follow from
        the text that will be captured: of a target that thinks, only the last response is supervised.
        """
        last = max(i for i, message in enumerate(self.said) if message["role"] == "assistant")
        messages = [
            {**message, "supervised": False} if "reasoning_content" in message and i != last else message
            for i, message in enumerate(self.said)
        ]
        name = {} if self.sample_id is None else {"id": self.sample_id}
        tools = {"tools": self.tools} if self.tools else {}
        return {**name, "messages": messages, **tools, "finish_reason": self.finish_reason}

    def _keeps(self, position: int) -> bool:
        with_tools = self.tools is not None or any(message["role"] == "tool" for message in self.messages)
        later = self.messages[position + 1 :]
        return with_tools and any(message["role"] == "assistant" for message in later)


def answer_turns(
    conversations: list[Conversation],
    answer: Answer,
    seed: int,
    told: Callable[[int], None] | None = None,
) -> int:
    """Let the target answer every turn of every chat, all chats' first turns first; return tokens written.

    `told` hears how many chats are finished, again and again while the target writes.
    """
    tokens = 0
    waiting = conversations
    while waiting:
        asked = [(chat, prompt) for chat in waiting if (prompt := chat.prompt()) is not None]
        finished = len(conversations) - len(asked)
        tell = (lambda: None) if told is None else partial(told, finished)
        tell()
        if not asked:
            break
        answers = answer([(prompt, chat.tools) for chat, prompt in asked], seed, tell)
        for (chat, _), response in zip(asked, answers, strict=True):
            if isinstance(response, ChatError):
                chat.error = response
            else:
                chat.hear(response.message, response.finish_reason)
                tokens += response.num_tokens
        waiting = [chat for chat, _ in asked]
    return tokens
