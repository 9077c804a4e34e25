"""Records of either form become the same messages; what cannot be used says why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_core.messages import ChatError, normalise, record_id

QUESTION = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}


def test_both_forms_give_the_same_messages() -> None:
    sharegpt = {
        "system": "be kind",
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
    }
    messages = {"messages": [{"role": "system", "content": "be kind"}, QUESTION, ANSWER]}
    assert normalise(sharegpt) == normalise(messages)


def test_parts_of_text_are_joined_and_reasoning_is_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    record = {
        "messages": [{"role": "user", "content": parts}, {**ANSWER, "reasoning": "because", "name": "bot"}]
    }
    messages, tools = normalise(record)
    assert messages[0]["content"] == "ab" and tools is None
    assert messages[1] == {**ANSWER, "reasoning_content": "because", "name": "bot"}


def test_tool_calls_become_objects() -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    record = {
        "messages": [
            QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "1"},
            ANSWER,
        ],
        "tools": json.dumps([{"type": "function"}]),
    }
    messages, tools = normalise(record)
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert messages[2]["tool_call_id"] == "1"
    assert tools == [{"type": "function"}]
    sharegpt = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "hello"},
    ]
    again, _ = normalise({"conversations": sharegpt})
    assert again[1]["tool_calls"][0]["function"] == messages[1]["tool_calls"][0]["function"]
    assert [message["role"] for message in again] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1], "not an object"),
        ({"text": "x"}, "no messages"),
        ({"messages": []}, "no messages"),
        ({"messages": [QUESTION]}, "no assistant turn"),
        ({"messages": [{"role": "wizard", "content": "x"}, ANSWER]}, "bad role"),
        ({"conversations": [{"from": "wizard", "value": "x"}]}, "bad role"),
        ({"messages": ["x"]}, "bad message"),
        ({"messages": [{"role": "user", "content": 3}, ANSWER]}, "bad content"),
        ({"messages": [{"role": "user", "content": ""}, ANSWER]}, "empty message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, "not text"),
        ({"messages": [QUESTION, {**ANSWER, "tool_calls": [{"function": {}}]}]}, "bad tool call"),
        ({"messages": [QUESTION, ANSWER], "tools": "{"}, "bad JSON"),
        ({"messages": [QUESTION, ANSWER], "tools": ["x"]}, "bad tools"),
        ({"messages": [QUESTION, {**ANSWER, "content": "half a pair: \ud83d"}]}, "not valid Unicode"),
        ({"messages": [QUESTION, ANSWER], "tools": [{"name": "\ud83d"}]}, "not valid Unicode"),
    ],
)
def test_unusable_records_say_why(record: Any, reason: str) -> None:
    with pytest.raises(ChatError) as caught:
        normalise(record)
    assert caught.value.reason == reason and caught.value.unusable


def test_a_chat_is_named_by_its_id_or_its_content() -> None:
    record = {"messages": [QUESTION, ANSWER]}
    messages, _ = normalise(record)
    assert record_id({**record, "id": 7}, messages) == "7"
    name = record_id(record, messages)
    with pytest.raises(ChatError, match="not valid Unicode"):
        record_id({**record, "id": "\ud83d"}, messages)
    assert len(name) == 32 and name == record_id({**record, "source": "elsewhere"}, messages)
    assert name != record_id(record, [QUESTION, {**ANSWER, "content": "bye"}])
