"""The fused head loss and the slot weights, against plain cross entropy and loops."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from dflash_core.configuration import UserError
from dflash_core.loss import (
    HeadInputs,
    LossConfig,
    Teacher,
    dpace_weights,
    head_loss,
    leading_matches,
    resolve_gamma,
    slot_weights,
    spread,
)


def _inputs(queries: int, count: int, most: int, vocabulary: int) -> HeadInputs:
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(queries, generator=generator)[:count].sort().values
    slot_N = torch.zeros(most, dtype=torch.int64)
    slot_N[:count] = slots
    label_N = torch.zeros(most, dtype=torch.int64)
    label_N[:count] = torch.randint(0, vocabulary, (count,), generator=generator)
    rank_P = torch.full((queries,), -1)
    rank_P[slots] = torch.arange(count)
    return HeadInputs(slot_N, label_N, rank_P, count)


@pytest.mark.parametrize("count", [0, 1, 13, 32])
@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("kl_weight", [None, 0.3])
def test_chunked_loss_and_gradient_equal_plain_autograd(
    count: int, chunk: int, kl_weight: float | None
) -> None:
    torch.manual_seed(1)
    queries, most, width, vocabulary, context = 40, 32, 16, 50, 20
    hidden = torch.randn(queries, width, requires_grad=True)
    head = torch.randn(vocabulary, width)
    inputs = _inputs(queries, count, most, vocabulary)
    weights = torch.rand(most)
    teacher = None
    if kl_weight is not None:
        teacher = Teacher(torch.randn(context, width), torch.randint(0, context, (most,)), kl_weight)
    losses = head_loss(hidden, head, inputs, chunk, teacher)
    (losses.loss_N * weights).sum().backward()

    plain = hidden.detach().clone().requires_grad_()
    logits = plain[inputs.slot_N[:count]] @ head.t()
    ce = F.cross_entropy(logits, inputs.label_N[:count], reduction="none")
    expected = ce
    if teacher is not None:
        target = F.log_softmax(teacher.hidden_CD[teacher.index_N[:count]] @ head.t(), dim=-1)
        kl = F.kl_div(F.log_softmax(logits, -1), target, log_target=True, reduction="none").sum(-1)
        expected = (1 - kl_weight) * ce + kl_weight * kl
    (expected * weights[:count]).sum().backward()
    torch.testing.assert_close(losses.loss_N[:count], expected.detach())
    torch.testing.assert_close(losses.ce_N[:count], ce.detach())
    assert torch.equal(losses.correct_N[:count] > 0, logits.argmax(-1) == inputs.label_N[:count])
    assert (losses.loss_N[count:] == 0).all()
    torch.testing.assert_close(hidden.grad, plain.grad)


def test_decay_weights() -> None:
    weight_K = slot_weights(LossConfig(), 8)
    assert weight_K.tolist() == pytest.approx([0.0] + [math.exp(-(k - 1) / 4) for k in range(1, 8)])
    assert resolve_gamma(LossConfig(), 16) == 7 and resolve_gamma(LossConfig(), 10) == 5
    assert slot_weights(LossConfig(weighting="uniform"), 32).tolist() == [0.0] + [1.0] * 31
    with pytest.raises(UserError, match="block_size 32"):
        slot_weights(LossConfig(), 32)
    assert slot_weights(LossConfig(gamma=10), 32)[11] == pytest.approx(math.exp(-1))


def test_dpace_weights_against_loops() -> None:
    torch.manual_seed(0)
    ce, scored, alpha = torch.rand(6, 5) * 3, torch.rand(6, 5) < 0.7, 0.5
    scored[:, 0] = False
    weights = dpace_weights(ce, scored, alpha)
    for a in range(6):
        for j in range(5):
            expected = 0.0
            for m in range(j, 5):
                product = 1.0
                for i in range(m + 1):
                    if scored[a, i]:
                        product *= (1 - alpha) * math.exp(-float(ce[a, i])) + alpha
                expected += product if scored[a, m] else 0.0
            assert float(weights[a, j]) == pytest.approx(expected if scored[a, j] else 0.0)


def test_leading_matches_by_hand() -> None:
    correct = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [0, 1, 1, 1, 1]]).bool()
    scored = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 1, 0, 1, 1]]).bool()
    assert leading_matches(correct, scored).tolist() == [2, 0, 4, 1]


def test_spread_puts_values_back() -> None:
    inputs = _inputs(11, 5, 9, 10)
    rank_P = inputs.rank_P.clone()
    rank_P[9:] = -1
    values = torch.arange(1.0, 10.0)
    spread_AK = spread(values, rank_P, (3, 4))
    assert spread_AK.shape == (3, 4) and not spread_AK[:, 0].any()
    kept = [(int(slot), n + 1.0) for n, slot in enumerate(inputs.slot_N[:5]) if slot < 9]
    assert kept and [(s, float(spread_AK[:, 1:].reshape(-1)[s])) for s, _ in kept] == kept
    assert (spread_AK != 0).sum() == len(kept)
