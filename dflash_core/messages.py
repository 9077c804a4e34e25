"""Brings a chat record, in any of the usual forms, to one list of messages."""

from __future__ import annotations

import hashlib
import json
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")

_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "function_call",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class ChatError(ValueError):
    """A chat that gives no sample. `reason` is a short class for counting, `detail` is for people.

    `unusable` is True when the record itself is at fault (it counts towards the caller's limit of bad
    records), False when it is sound and merely filtered, e.g. too short.
    """

    def __init__(self, reason: str, detail: str = "", *, unusable: bool = True) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail, self.unusable = reason, detail, unusable


def normalise(record: Any, *, to_answer: bool = False) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Return (messages, tools) of a record in `messages` form or in ShareGPT form (`conversations`).

    Each message has "role" (one of ROLES) and "content" (text), and where the record has them
    "reasoning_content", "tool_calls" (arguments as objects), "tool_call_id", "name", "supervised".
    With `to_answer`, a chat that ends with a question (or tool result) gets an empty assistant turn: the
    place of the answer. Raise ChatError when the record has neither form, an unknown role, content that is
    not text or not valid Unicode, or no assistant turn.
    """
    if not isinstance(record, dict):
        raise ChatError("not an object", f"a record must be a JSON object, this is a {type(record).__name__}")
    turns = _turns(record)
    messages = [_message(turn, position) for position, turn in enumerate(turns)]
    if isinstance(record.get("system"), str) and record["system"] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": record["system"]})
    if to_answer and messages[-1]["role"] in ("user", "tool"):
        messages.append({"role": "assistant", "content": ""})
    if not any(message["role"] == "assistant" for message in messages):
        raise ChatError("no assistant turn", f"roles are {[message['role'] for message in messages]}")
    tools = _tools(record)
    _check_unicode([messages, tools])
    return messages, tools


def record_id(record: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    """Name a chat: its own id, else 32 hex of its content."""
    if (name := own_id(record)) is not None:
        return name
    text = json.dumps([messages, _tools(record)], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def own_id(record: dict[str, Any]) -> str | None:
    """Return what a chat has as `id` (or `sample_id`, `uuid`, `conversation_id`). Raise ChatError."""
    for key in ("id", "sample_id", "uuid", "conversation_id"):
        value = record.get(key)
        if isinstance(value, (str, int)) and not isinstance(value, bool) and str(value).strip():
            _check_unicode(value)
            return str(value)
    return None


def _check_unicode(value: Any) -> None:
    """JSON can spell half of a surrogate pair ("\\ud83d"), which no tokenizer takes and UTF-8 cannot hold."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise ChatError("not valid Unicode", str(error)) from None


def _turns(record: dict[str, Any]) -> list[Any]:
    for key in ("messages", "conversations", "conversation"):
        turns = record.get(key)
        if isinstance(turns, str):
            turns = _parse(turns, key)
        if isinstance(turns, list):
            if not turns:
                raise ChatError("no messages", f'"{key}" is empty')
            return turns
    raise ChatError("no messages", f'neither "messages" nor "conversations" among {sorted(record)[:12]}')


def _message(turn: Any, position: int) -> dict[str, Any]:
    where = f"message {position}"
    if not isinstance(turn, dict):
        raise ChatError("bad message", f"{where} is a {type(turn).__name__}, not an object")
    if "role" not in turn and "from" in turn:
        turn = _from_sharegpt(turn, where)
    role = turn.get("role")
    if role not in ROLES:
        raise ChatError("bad role", f"{where} has role {role!r}; known are {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": role, "content": _text(turn.get("content"), where)}
    if role == "assistant":
        _add_assistant_parts(message, turn, where)
    for key in ("name", "tool_call_id"):
        if isinstance(turn.get(key), str):
            message[key] = turn[key]
    if not message["content"] and role in ("user", "assistant") and len(message) == 2:
        raise ChatError("empty message", f"{where} ({role}) has no content")
    if turn.get("supervised") is False:
        message["supervised"] = False
    return message


def _add_assistant_parts(message: dict[str, Any], turn: dict[str, Any], where: str) -> None:
    for key in _REASONING_KEYS:
        if isinstance(turn.get(key), str) and turn[key].strip():
            message["reasoning_content"] = turn[key]
            break
    calls = turn.get("tool_calls")
    if isinstance(calls, str):
        calls = _parse(calls, f"tool_calls of {where}")
    if calls:
        if not isinstance(calls, list):
            raise ChatError("bad tool call", f"tool_calls of {where} is not a list")
        message["tool_calls"] = [_tool_call(call, where) for call in calls]


def _from_sharegpt(turn: dict[str, Any], where: str) -> dict[str, Any]:
    role = _SHAREGPT_ROLES.get(str(turn["from"]).lower())
    if role is None:
        known = ", ".join(_SHAREGPT_ROLES)
        raise ChatError("bad role", f"{where} is from {turn['from']!r}; known are {known}")
    value = turn.get("value", turn.get("content"))
    rest = {key: entry for key, entry in turn.items() if key not in ("from", "value", "content")}
    if role == "function_call":
        call = _parse(value, where) if isinstance(value, str) else value
        return {**rest, "role": "assistant", "content": "", "tool_calls": [call]}
    return {**rest, "role": role, "content": value}


def _text(content: Any, where: str) -> str:
    """Join text parts; anything that is not text (images, audio) cannot be captured by a text model."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = []
        for part in content:
            text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str) or (isinstance(part, dict) and part.get("type", "text") != "text"):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ChatError("not text", f"{where} has a part of type {kind!r}")
            parts.append(text)
        return "".join(parts)
    raise ChatError("bad content", f"content of {where} is a {type(content).__name__}, not text")


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Bring a call to {"type": "function", "function": {"name", "arguments": {...}}}; templates iterate."""
    if not isinstance(call, dict):
        raise ChatError("bad tool call", f"a tool call of {where} is not an object")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatError("bad tool call", f"a tool call of {where} has no function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parse(arguments or "{}", f"arguments of a tool call of {where}")
    result = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    if isinstance(call.get("id"), str):
        result["id"] = call["id"]
    return result


def _tools(record: dict[str, Any]) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str):
        tools = _parse(tools, "tools") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ChatError("bad tools", '"tools" must be a list of objects')
    return tools


def _parse(text: Any, where: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError) as error:
        raise ChatError("bad JSON", f"{where} is not JSON: {error}") from None
