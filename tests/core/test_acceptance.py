"""Acceptance is counted honestly, and the simulated one equals the real one."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dflash_core.acceptance import (
    AcceptanceStats,
    count_blocks,
    draft_blocks,
    first_difference,
    leading_matches,
    simulate,
    stats_of,
    teacher_forced_acceptance,
)
from dflash_core.cached_target import CachedTarget
from dflash_core.configuration import UserError
from dflash_core.drafter import ContextCache, Drafter
from dflash_core.speculative import (
    Candidates,
    DrafterProposer,
    Generation,
    greedy_generate,
    speculative_generate,
)
from tests.core.test_speculative import build
from tests.core.tiny_drafter import tiny_drafter

PROMPT = [5, 9, 2, 77, 31, 8, 60]
NEW_TOKENS = 26


def drafter_for(model: nn.Module) -> Drafter:
    drafter = tiny_drafter(target_num_layers=4, tap_layer_ids=(0, 2), block_size=5)
    return drafter.to(torch.float32).requires_grad_(True)


@cache
def overfitted(kind: str, device: str = "cpu") -> tuple[nn.Module, Drafter, list[int]]:
    """A drafter taught one greedy text by plain cross entropy, block by block as it will draft.

    Taught on the CPU; `device` is where the target writes the text, and where both are returned.
    """
    model: Any = build(kind).to(device)
    target = CachedTarget(model, (0, 2))
    text = PROMPT + greedy_generate(target, PROMPT, max_new_tokens=NEW_TOKENS).token_ids
    drafter = drafter_for(model)
    drafter.compute_dtype = torch.float32
    target.start()
    _, taps_TE = target.extend(torch.tensor(text, device=device))
    taps_TE = taps_TE.cpu()
    embedding_VD = model.get_input_embeddings().weight.detach().cpu()
    head_VD = model.get_output_embeddings().weight.detach().cpu()
    target.close()
    size, mask_id = drafter.config.block_size, drafter.config.mask_token_id
    anchors = range(len(PROMPT), len(text) - size + 1)
    ids = torch.tensor([[text[a]] + [mask_id] * (size - 1) for a in anchors]).reshape(-1)
    position = torch.tensor([a + k for a in anchors for k in range(size)])
    block = torch.arange(len(anchors)).repeat_interleave(size)
    anchor_of = torch.tensor(list(anchors)).repeat_interleave(size)
    context = torch.arange(len(text))[None, :] < anchor_of[:, None]
    inside = block[:, None] == block[None, :]
    window = drafter.config.sliding_window or 0
    near = position[:, None] - torch.arange(len(text))[None, :] < window
    causal = inside & (position[:, None] >= position[None, :])
    masks: dict = {
        "full_attention": torch.cat([context, inside], dim=1),
        "sliding_attention": torch.cat([context & near, causal], dim=1),
    }
    labels = torch.tensor([text[a + k] for a in anchors for k in range(size)])
    drafts = torch.arange(len(labels)) % size > 0
    inputs = F.embedding(ids, embedding_VD)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    for _ in range(150):
        hidden = drafter(taps_TE.clone(), torch.arange(len(text)), inputs.clone(), position, masks)
        loss = F.cross_entropy(F.linear(hidden, head_VD)[drafts], labels[drafts])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, drafter.to(device).eval(), text


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3.5"])
def test_an_overfitted_drafter_earns_whole_blocks(kind: str) -> None:
    model, drafter, text = overfitted(kind)
    target = CachedTarget(model, drafter.config.tap_layer_ids)
    drafted = speculative_generate(
        target, DrafterProposer(drafter, target), PROMPT, max_new_tokens=NEW_TOKENS - 4
    )
    target.close()
    assert PROMPT + drafted.token_ids == text[: len(PROMPT) + NEW_TOKENS - 4]
    stats = stats_of([drafted], drafter.config.block_size)
    assert stats.acceptance_length == drafter.config.block_size
    assert stats.per_slot == [1.0] * 4


def test_an_untrained_drafter_is_lossless_as_well() -> None:
    model = build("qwen3")
    drafter = drafter_for(model)
    drafter.compute_dtype = torch.float32
    target = CachedTarget(model, drafter.config.tap_layer_ids)
    plain = greedy_generate(target, PROMPT, max_new_tokens=30)
    drafted = speculative_generate(target, DrafterProposer(drafter, target), PROMPT, max_new_tokens=30)
    assert first_difference(plain, drafted, tolerance=0.0) is None
    assert stats_of([drafted], 5).acceptance_length < 2


@pytest.mark.parametrize("damage", [0.0, 0.03, 0.1])
def test_teacher_forced_acceptance_equals_the_real_one(damage: float) -> None:
    """With weights damaged so that some blocks are cut short, the walk makes the same jumps as decoding."""
    model, perfect, text = overfitted("qwen3")
    drafter = drafter_for(model)
    drafter.compute_dtype = torch.float32
    drafter.load_state_dict(perfect.state_dict())
    chance = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += damage * torch.randn(parameter.shape, generator=chance)
    target = CachedTarget(model, drafter.config.tap_layer_ids)
    real = speculative_generate(target, DrafterProposer(drafter, target), PROMPT, max_new_tokens=NEW_TOKENS)
    target.start()
    _, taps_TE = target.extend(torch.tensor(text))
    target.close()
    mask_T = torch.zeros(len(text), dtype=torch.bool)
    mask_T[len(PROMPT) :] = True
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight  # type: ignore[operator]
    simulated = teacher_forced_acceptance(drafter, taps_TE, torch.tensor(text), mask_T, embedding, head)
    # The last real block may look past the end of the stored text; the simulated one cannot.
    starts = np.cumsum([0, *real.committed_per_call])[:-1]
    whole = int((starts + drafter.config.block_size < NEW_TOKENS).sum())
    assert whole > 3
    matches = leading_matches(drafter, taps_TE, torch.tensor(text), mask_T, embedding, head)
    position, jumps = len(PROMPT), []
    for _ in range(whole):
        jumps.append(int(matches[position]))
        position += jumps[-1] + 1
    assert jumps == real.accepted_per_call[:whole]
    if damage == 0.1:
        assert len(set(jumps)) > 1, "blocks of one length would prove little"
    assert simulated.blocks >= whole


@pytest.mark.parametrize("window", [None, 6, 40])
def test_many_blocks_at_once_equal_one_by_one(window: int | None) -> None:
    kinds = None if window is None else ("sliding_attention", "full_attention", "sliding_attention")
    drafter = tiny_drafter(layer_types=kinds, sliding_window=window)
    drafter.compute_dtype = torch.float32
    chance = torch.Generator().manual_seed(0)
    taps_TE = torch.randn(30, 64, generator=chance)
    anchors = torch.tensor([1, 2, 9, 17, 29])
    inputs_QD = torch.randn(25, 32, generator=chance)
    whole = ContextCache()
    drafter.extend(whole, taps_TE)
    with torch.no_grad():
        together_QD = draft_blocks(drafter, whole, anchors, inputs_QD)
    for i, anchor in enumerate(anchors.tolist()):
        before = ContextCache()
        drafter.extend(before, taps_TE[:anchor])
        alone_KD = drafter.draft(before, inputs_QD[5 * i : 5 * i + 5])
        torch.testing.assert_close(together_QD[5 * i : 5 * i + 5], alone_KD, atol=1e-5, rtol=1e-5)


def test_simulate_walks_each_response_on_its_own() -> None:
    mask = np.array([0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1], dtype=bool)
    #                       a        b            a        lone token: the prompt's forward brought it
    matches = np.array([-1, -1, 2, 9, 9, 1, 0, -1, -1, 0, 0, -1, 0])
    stats = simulate(matches, mask, block_size=4)
    # First response: a block of 2 + 1, then one accepted draft that ends the text; second: nothing accepted,
    # 1 token.
    assert stats.blocks == 3
    assert stats.tokens == 3 + 1 + 1
    assert stats.reached_K.tolist() == [3, 2, 1, 0]


def test_stats_add_up() -> None:
    one = count_blocks([0, 3, 3], [1, 4, 4], 4)
    two = count_blocks([1], [2], 4)
    both = one + two
    assert both.blocks == 4
    assert both.acceptance_length == 11 / 4
    assert both.reached_K.tolist() == [4, 3, 2, 2]
    assert both.per_slot == [0.75, 0.5, 0.5]
    empty = AcceptanceStats(tokens=0, reached_K=np.zeros(4, dtype=np.int64))
    assert np.isnan(empty.acceptance_length)
    assert (both + empty).report() == both.report()


def generation(tokens: list[int], tops: list[Candidates]) -> Generation:
    return Generation(token_ids=tokens, candidates=tops)


def test_a_difference_is_a_tie_only_if_both_runs_show_it() -> None:
    sure = Candidates(tokens=(1, 2), logits=(9.0, 3.0))
    near = Candidates(tokens=(4, 7), logits=(8.0, 7.95))
    swapped = Candidates(tokens=(7, 4), logits=(8.0, 7.99))
    third = Candidates(tokens=(7, 5, 4), logits=(8.0, 8.0, 7.98))
    other = Candidates(tokens=(7, 5), logits=(8.0, 7.99))
    plain = generation([1, 4, 3], [sure, near, sure])
    assert first_difference(plain, generation([1, 4, 3], [sure, near, sure]), tolerance=0.0) is None
    tie = first_difference(plain, generation([1, 7, 9], [sure, swapped, sure]), tolerance=0.01)
    assert tie is not None
    assert (tie.position, tie.greedy_token, tie.speculative_token, tie.tie) == (1, 4, 7, True)
    assert tie.greedy_candidates == near
    assert tie.speculative_candidates == swapped
    three = first_difference(plain, generation([1, 7, 9], [sure, third, sure]), tolerance=0.01)
    assert three is not None
    assert three.tie
    for tops, tolerance in [([sure, swapped], 0.001), ([sure, other], 0.01), ([sure, sure], 0.01)]:
        wrong = first_difference(plain, generation([1, 7, 9], tops), tolerance=tolerance)
        assert wrong is not None
        assert not wrong.tie
    short = first_difference(plain, generation([1, 4], [sure, near]), tolerance=0.01)
    assert short is not None
    assert (short.position, short.speculative_token, short.tie) == (2, None, False)


def test_a_drafter_of_another_target_is_refused() -> None:
    model = build("qwen3")
    drafter = drafter_for(model)
    with pytest.raises(UserError, match="reads taps"):
        DrafterProposer(drafter, CachedTarget(model, (0, 1)))
    wide = tiny_drafter(target_num_layers=4, tap_layer_ids=(0, 2), vocab_size=100)
    with pytest.raises(UserError, match="100 embeddings"):
        DrafterProposer(wide, CachedTarget(model, (0, 2)))
