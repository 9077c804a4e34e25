"""Speculative decoding must change nothing but speed: greedy equality, exact sampling, honest counting."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash_core.cached_target import CachedTarget
from dflash_core.configuration import UserError
from dflash_core.speculative import accept_or_replace, greedy_generate, speculative_generate

VOCABULARY = 96
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.4,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def build(kind: str) -> nn.Module:
    torch.manual_seed(7)
    if kind == "qwen3":
        model: nn.Module = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    elif kind == "qwen3-sliding":
        sliding = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, **sliding))
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE, **LINEAR))
    return model.float().eval()


class Oracle:
    """Knows the greedy continuation and spoils a chosen share of its drafts."""

    def __init__(self, prompt: list[int], continuation: list[int], block_size: int, spoil: float) -> None:
        self.text, self.block_size, self.spoil = prompt + continuation, block_size, spoil
        self.chance = torch.Generator().manual_seed(3)

    def start(self) -> None:
        self.seen = 0

    def observe(self, taps_TC: torch.Tensor) -> None:
        self.seen += len(taps_TC)

    def propose(self, anchor_id: torch.Tensor) -> torch.Tensor:
        assert self.text[self.seen] == int(anchor_id), "the anchor is the first token that was not observed"
        return self.drafts()

    def drafts(self) -> torch.Tensor:
        """Of the known text at the next place, whatever was decoded before it."""
        wanted = self.text[self.seen + 1 : self.seen + self.block_size]
        wanted += [0] * (self.block_size - 1 - len(wanted))
        drafts = torch.tensor(wanted)
        wrong = torch.rand(len(drafts), generator=self.chance) < self.spoil
        drafts = torch.where(wrong, (drafts + 1) % VOCABULARY, drafts)
        return nn.functional.one_hot(drafts, VOCABULARY).float()


KINDS = ["qwen3", "qwen3-sliding", "llama", "qwen3.5"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spoil", [0.0, 0.3, 1.0])
def test_the_text_is_the_greedy_text(kind: str, spoil: float) -> None:
    target = CachedTarget(build(kind), (0, 2))
    prompt = [5, 9, 2, 77, 31, 8, 60]
    plain = greedy_generate(target, prompt, max_new_tokens=41)
    assert len(set(plain.token_ids)) > 5, "a text of one token would prove nothing"
    oracle = Oracle(prompt, greedy_generate(target, prompt, max_new_tokens=60).token_ids, 6, spoil)
    drafted = speculative_generate(target, oracle, prompt, max_new_tokens=41)
    assert drafted.token_ids == plain.token_ids
    assert plain.target_calls == 40
    if spoil == 0.0:
        assert set(drafted.committed_per_call) == {6}, "a perfect drafter earns a whole block a call"
        assert drafted.target_calls == 7
    if spoil == 1.0:
        assert set(drafted.committed_per_call) == {1}


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_after_a_rejection_is_as_if_the_drafts_had_never_been_run(kind: str) -> None:
    model = build(kind)
    target = CachedTarget(model, (1,))
    chance = torch.Generator().manual_seed(0)
    text_T = torch.randint(0, VOCABULARY, (40,), generator=chance)
    with torch.no_grad():
        full = model(text_T[None], output_hidden_states=True)
    logits, taps, position = [], [], 0
    for keep, spoil in [(9, 0), (1, 3), (4, 0), (3, 5), (1, 0), (0, 4), (7, 2), (15, 1)]:
        wrong_T = torch.randint(0, VOCABULARY, (spoil,), generator=chance)
        logits_TV, taps_TC = target.extend(torch.cat([text_T[position : position + keep], wrong_T]))
        target.commit(keep)
        logits.append(logits_TV[:keep])
        taps.append(taps_TC[:keep])
        position += keep
    assert position == target.length == 40
    torch.testing.assert_close(torch.cat(logits), full.logits[0], atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(torch.cat(taps), full.hidden_states[2][0], atol=2e-4, rtol=1e-3)
    assert (target.replays > 0) == (kind == "qwen3.5")


def test_hooks_are_taken_off() -> None:
    model = build("llama")
    with CachedTarget(model, (0, 1)):
        pass
    assert not any(module._forward_hooks for module in model.modules())


def test_unknown_layer_and_empty_prompt_are_refused() -> None:
    model = build("llama")
    with pytest.raises(UserError, match="layers 0 to 3"):
        CachedTarget(model, (1, 4))
    with pytest.raises(UserError, match="empty"):
        greedy_generate(CachedTarget(model), [], max_new_tokens=3)
    with pytest.raises(UserError, match="temperature"):
        speculative_generate(
            CachedTarget(model), Oracle([1], [2], 4, 0.0), [1], max_new_tokens=3, temperature=-1.0
        )


@pytest.mark.parametrize("stop_at", [1, 2, 6, 7, 12])
def test_a_stop_token_ends_the_text_and_drafts_after_it_do_not_count(stop_at: int) -> None:
    target = CachedTarget(build("qwen3"))
    prompt = [4, 90, 17]
    long = greedy_generate(target, prompt, max_new_tokens=40).token_ids
    stop = long[stop_at]
    first = long.index(stop)
    plain = greedy_generate(target, prompt, max_new_tokens=40, stop_ids={stop})
    drafted = speculative_generate(
        target, Oracle(prompt, long, 6, 0.0), prompt, max_new_tokens=40, stop_ids={stop}
    )
    assert drafted.token_ids == plain.token_ids == long[: first + 1]
    assert 1 + sum(drafted.committed_per_call) == len(drafted.token_ids)
    assert len(drafted.candidates) == len(drafted.token_ids)


def test_the_length_limit_cuts_the_text_and_not_the_count() -> None:
    target = CachedTarget(build("qwen3"))
    prompt = [4, 90, 17]
    long = greedy_generate(target, prompt, max_new_tokens=60).token_ids
    drafted = speculative_generate(target, Oracle(prompt, long, 8, 0.0), prompt, max_new_tokens=12)
    assert drafted.token_ids == long[:12]
    assert drafted.accepted_per_call == [7, 7], "the last block is counted as it was verified"


@pytest.mark.parametrize("drafts", ["argmax", "sample"])
def test_rejection_sampling_keeps_the_wanted_distribution(drafts: str) -> None:
    """Chi-squared over all texts of three tokens that two drafts and one own token can form."""
    chance = torch.Generator().manual_seed(11)
    size = 4
    proposal = torch.softmax(2 * torch.randn(2, size, generator=chance), -1)
    # What the target wants of a token depends on the accepted tokens before it.
    wanted_1 = torch.softmax(torch.randn(size, generator=chance), -1)
    wanted_2 = torch.softmax(torch.randn(size, size, generator=chance), -1)
    wanted_3 = torch.softmax(torch.randn(size, size, size, generator=chance), -1)
    exact = wanted_1[:, None, None] * wanted_2[:, :, None] * wanted_3
    if drafts == "argmax":
        proposal = nn.functional.one_hot(proposal.argmax(-1), size).float()
    trials = 4_000
    counts = torch.zeros(size, size, size)
    for _ in range(trials):
        text: list[int] = []
        while len(text) < 3:  # as in decoding: blocks of two drafts until the text is long enough
            draft = torch.multinomial(proposal, 1, generator=chance)[:, 0]
            rows = []
            for k in range(3):
                before = text + draft[:k].tolist()
                if len(before) == 0:
                    rows.append(wanted_1)
                elif len(before) == 1:
                    rows.append(wanted_2[before[0]])
                else:
                    rows.append(wanted_3[before[0], before[1]])
            accepted, own = accept_or_replace(draft, proposal, torch.stack(rows), chance)
            text += draft[:accepted].tolist() + own.tolist()
        counts[text[0], text[1], text[2]] += 1
    expected = exact * trials
    statistic = float(((counts - expected) ** 2 / expected).sum())
    degrees = size**3 - 1
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5, (
        f"chi squared {statistic:.1f} for {degrees} degrees"
    )


@pytest.mark.parametrize("drafts", ["argmax", "sample"])
def test_sampled_text_has_the_targets_distribution(drafts: str) -> None:
    """The first two tokens of sampled texts against the target's own probabilities, total variation."""
    torch.manual_seed(1)
    small = {**SHAPE, "vocab_size": 5, "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8}
    model = LlamaForCausalLM(LlamaConfig(**small)).eval()
    target = CachedTarget(model)
    temperature = 0.7
    with torch.no_grad():
        first = torch.softmax(model(torch.tensor([[1, 2]])).logits[0, -1] / temperature, -1)
        rows = [model(torch.tensor([[1, 2, t]])).logits[0, -1] / temperature for t in range(5)]
    exact = first[:, None] * torch.softmax(torch.stack(rows), -1)
    trials, counts = 700, torch.zeros(5, 5)
    chance = torch.Generator().manual_seed(5)

    class Guesser:
        block_size = 3
        logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(2))

        def start(self) -> None: ...
        def observe(self, taps_TC: torch.Tensor) -> None: ...
        def propose(self, anchor_id: torch.Tensor) -> torch.Tensor:
            return self.logits

    for _ in range(trials):
        text = speculative_generate(
            target,
            Guesser(),
            [1, 2],
            max_new_tokens=2,
            temperature=temperature,
            drafts=drafts,  # type: ignore[arg-type]
            generator=chance,
        ).token_ids
        counts[text[0], text[1]] += 1
    expected = exact * trials
    statistic = float(((counts - expected) ** 2 / expected.clamp_min(1e-9)).sum())
    assert statistic < 24 + 4 * (2 * 24) ** 0.5
