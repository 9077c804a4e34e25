"""Batched generation equals one prompt at a time, token by token, for full-attention and hybrid targets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_core.chat import ChatConfig, ChatEncoder
from dflash_core.respond import GenerationSettings, Responder, Response, split_reasoning
from tests.core import chat_templates as templates
from tests.core.tiny_targets import write_family
from tests.tiny import tiny_tokenizer

PROMPTS = [([{"role": "user", "content": "a" * length}], None) for length in (3, 9, 1, 9, 4)]


def plain_greedy(responder: Responder, prompt: list[int], new_tokens: int) -> list[int]:
    """argmax of a forward over everything so far, again and again, without a cache."""
    ids = list(prompt)
    while len(ids) - len(prompt) < new_tokens:
        with torch.no_grad():
            logits = responder.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
        if ids[-1] in responder.stop_ids:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_batches_answer_as_single_prompts_do(family: str, tmp_path: Path) -> None:
    folder = write_family(family, tmp_path)
    responder = Responder(str(folder), None, ChatConfig(), "cpu", torch.float32)
    assert responder.hybrid == (family == "qwen3_5")
    counted: list[int] = []
    answers = responder.respond(PROMPTS, GenerationSettings(max_new_tokens=6), 4, counted.append)
    assert counted[-1] == len(PROMPTS) and counted == sorted(counted)
    for (messages, tools), answer in zip(PROMPTS, answers, strict=True):
        ids = responder.encoder.prompt_ids(messages, tools)
        expected = plain_greedy(responder, ids, 6)
        stopped = expected[-1] in responder.stop_ids
        assert answer.num_tokens == len(expected)
        assert answer.finish_reason == ("stop" if stopped else "length")
        text = responder.tokenizer.decode(expected[:-1] if stopped else expected)
        assert answer.message == {"role": "assistant", "content": text}
        read = responder.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert answer.reads_back == (read == (expected[:-1] if stopped else expected))


def test_the_end_token_stops_and_is_not_part_of_the_text(tmp_path: Path) -> None:
    responder = Responder(str(write_family("qwen3", tmp_path)), None, ChatConfig(), "cpu", torch.float32)
    first = plain_greedy(responder, responder.encoder.prompt_ids(*PROMPTS[0]), 3)
    responder.stop_ids = [first[2]]
    [answer] = responder.respond(PROMPTS[:1], GenerationSettings(max_new_tokens=9))
    assert answer.finish_reason == "stop"
    assert answer.num_tokens == first.index(first[2]) + 1


def test_a_long_batch_says_that_it_goes_on(tmp_path: Path) -> None:
    responder = Responder(str(write_family("qwen3", tmp_path)), None, ChatConfig(), "cpu", torch.float32)
    responder.stop_ids = [responder.model.config.vocab_size]  # is never written
    counted: list[int] = []
    [answer] = responder.respond(PROMPTS[:1], GenerationSettings(max_new_tokens=200), progress=counted.append)
    assert answer.num_tokens == 200
    assert counted[-1] == 1 and counted.count(0) >= 200 // 64


def test_sampling_follows_the_seed_and_leaves_the_global_state_alone(tmp_path: Path) -> None:
    responder = Responder(str(write_family("llama", tmp_path)), None, ChatConfig(), "cpu", torch.float32)

    def sample(seed: int) -> list[Response]:
        settings = GenerationSettings(max_new_tokens=8, temperature=1.0, top_p=0.9, seed=seed)
        return responder.respond(PROMPTS, settings, 2)

    state = torch.random.get_rng_state()
    assert sample(1) == sample(1) != sample(2)
    assert torch.equal(state, torch.random.get_rng_state())


def test_reasoning_is_split_from_the_text() -> None:
    assert split_reasoning("<think>\nr\n</think>\n\na") == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "r",
    }
    assert split_reasoning("<think>\n\n</think>\n\na") == {"role": "assistant", "content": "a"}
    assert split_reasoning("a") == {"role": "assistant", "content": "a"}
    opened = ChatEncoder(tiny_tokenizer(), ChatConfig(chat_template=templates.THINKING_OPEN))
    assert split_reasoning("r\n</think>\n\na", opened)["reasoning_content"] == "r"
    assert split_reasoning("r, cut", opened) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "r, cut",
    }
