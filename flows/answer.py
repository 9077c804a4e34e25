"""The two ways to get the target's answer: transformers in this process, or an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import httpx
from pydantic import Field

from dflash_core.chat import ChatConfig
from dflash_core.configuration import Config, UserError
from dflash_core.messages import ChatError
from dflash_core.respond import GenerationSettings, Prompt, Responder, Response, split_reasoning

log = logging.getLogger(__name__)

Answer = Callable[[Sequence[Prompt], int, Callable[[], None]], list[Response | ChatError]]
"""(prompts, seed, alive) -> one response or error a prompt, in their order; `alive` is called meanwhile."""

_ALIVE_EVERY_S = 5.0
"""`alive` is called so often at least while requests are in flight."""

_OTHER_TOKENS = 0.05
"""Share of responses whose text may be read as other tokens; small targets write a few such by themselves."""

_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504}
_MISCONFIGURED = {401, 403, 404, 405}


class EndpointConfig(Config):
    """An OpenAI-compatible server."""

    url: str
    """Base URL, e.g. "http://localhost:8000/v1"."""
    model: str
    """Name under which the server serves the target."""
    concurrency: int = Field(default=32, ge=1)
    """Requests in flight."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for one answer."""
    retries: int = Field(default=5, ge=0)
    """Further tries of a request after a lost connection or a server's error, with growing pauses."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, if the server wants one."""


class LocalAnswers:
    """Answers with a `Responder`; prompts longer than the chat's maximal length are refused."""

    def __init__(self, responder: Responder, settings: GenerationSettings, batch_size: int) -> None:
        self.responder, self.settings, self.batch_size = responder, settings, batch_size

    def __call__(
        self, prompts: Sequence[Prompt], seed: int, alive: Callable[[], None]
    ) -> list[Response | ChatError]:
        """Answer in batches; see `Answer`."""
        results: list[Response | ChatError] = [self._refusal(prompt) for prompt in prompts]  # type: ignore[misc]
        accepted = [i for i, refusal in enumerate(results) if refusal is None]
        settings = self.settings.model_copy(update={"seed": seed})
        answers = self.responder.respond(
            [prompts[i] for i in accepted], settings, self.batch_size, lambda _: alive()
        )
        for i, answer in zip(accepted, answers, strict=True):
            results[i] = answer
        tell_of_other_tokens(answers)
        return results

    def _refusal(self, prompt: Prompt) -> ChatError | None:
        encoder = self.responder.encoder
        try:
            length = len(encoder.prompt_ids(*prompt))
        except ChatError as error:
            return error
        limit = encoder.config.max_length
        detail = f"{length} tokens, chat.max_length is {limit}"
        return ChatError("prompt too long", detail, unusable=False) if length >= limit else None


def tell_of_other_tokens(answers: Sequence[Response]) -> None:
    """Warn when many responses, made text and read again, are other tokens than the target wrote."""
    others = sum(not answer.reads_back for answer in answers)
    if others > max(2, _OTHER_TOKENS * len(answers)):
        log.warning(
            "%d of %d responses give other tokens when their text is read again than the target wrote: "
            "is this the target's own tokenizer? Drafters are taught what is read",
            others,
            len(answers),
        )


def endpoint_answers(config: EndpointConfig, chat: ChatConfig, settings: GenerationSettings) -> Answer:
    """Answer through a server, `config.concurrency` requests at a time.

    Template variables (enable_thinking among them) go along as `chat_template_kwargs`, which vLLM and
    SGLang pass to the template. Raise UserError when the server cannot be reached or refuses the model.
    """
    key = os.environ.get(config.api_key_variable)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency)
    client = httpx.Client(
        base_url=config.url.rstrip("/"), headers=headers, timeout=config.timeout_seconds, limits=limits
    )
    stop = threading.Event()

    def ask(prompt: Prompt, seed: int) -> Response | ChatError:
        body = _request_body(config, chat, settings, prompt, seed)
        try:
            return _ask(client, config, body, stop)
        except UserError:
            stop.set()
            raise

    def answer(prompts: Sequence[Prompt], seed: int, alive: Callable[[], None]) -> list[Response | ChatError]:
        with ThreadPoolExecutor(max_workers=config.concurrency) as pool:
            asked = [pool.submit(ask, prompt, seed) for prompt in prompts]
            waiting = set(asked)
            while waiting:  # timeouts and the number of tries bound this
                _, waiting = wait(waiting, _ALIVE_EVERY_S, FIRST_COMPLETED)
                alive()
        return [request.result() for request in asked]

    return answer


def _request_body(
    config: EndpointConfig, chat: ChatConfig, settings: GenerationSettings, prompt: Prompt, seed: int
) -> dict[str, Any]:
    messages, tools = prompt
    body: dict[str, Any] = {
        "model": config.model,
        "messages": [
            {key: value for key, value in message.items() if key != "supervised"} for message in messages
        ],
        "max_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "seed": seed,
    }
    if tools:
        body["tools"] = tools
    if variables := chat.template_variables():
        body["chat_template_kwargs"] = variables
    return body


def _ask(
    client: httpx.Client, config: EndpointConfig, body: dict[str, Any], stop: threading.Event
) -> Response | ChatError:
    problem = ""
    for attempt in range(config.retries + 1):
        if stop.is_set():
            return ChatError("not asked", "the run was stopped", unusable=False)
        if attempt:
            time.sleep(min(60.0, 0.5 * 2**attempt) * random.uniform(0.5, 1.0))
        try:
            reply = client.post("/chat/completions", json=body)
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__}: {error}"
            continue
        if reply.status_code == 200:
            return _read_reply(reply)
        problem = f"HTTP {reply.status_code}: {reply.text[:300]}"
        if reply.status_code in _MISCONFIGURED:
            raise UserError(
                f"{config.url} refuses model {config.model!r}: {problem}; check endpoint.url, "
                f"endpoint.model and the key in {config.api_key_variable}"
            )
        if reply.status_code not in _RETRIED:
            return ChatError("server refused", problem)
    raise UserError(f"no answer from {config.url} after {config.retries + 1} tries: {problem}")


def _read_reply(reply: httpx.Response) -> Response | ChatError:
    try:
        content = reply.json()
        choice = content["choices"][0]
        heard, finish = choice["message"], choice.get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return ChatError("bad reply", f"{type(error).__name__}: {reply.text[:300]}")
    message = split_reasoning(heard.get("content") or "")
    reasoning = heard.get("reasoning_content") or heard.get("reasoning")
    if reasoning:
        message["reasoning_content"] = reasoning.strip("\n")
    if heard.get("tool_calls"):
        message["tool_calls"] = heard["tool_calls"]
    return Response(
        message=message,
        num_tokens=int((content.get("usage") or {}).get("completion_tokens") or 0),
        finish_reason="length" if finish == "length" else "stop",
    )
