"""The loss: the target's head and cross entropy in one pass over the scored slots, and the weights of the
slots.

Logits of all slots never exist: a chunk of slots goes through the head, its cross entropy and its gradient
with respect to the hidden states are computed at once, and the logits are overwritten by the next chunk. That
is two products with the head, one forward and one for the gradient. The gradient rows are kept unweighted:
the gradient of a slot's loss is linear in its weight, so weights that depend on the losses themselves
(D-PACE) are applied in backward. Shapes: P rows of hidden states (slots 1..K-1 of A anchors, and padding), N
the most slots that can be scored, D width, V vocabulary, C context tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from dflash_core.configuration import Config, UserError

GAMMA_OF_BLOCK = {16: 7.0, 10: 5.0, 8: 4.0}
"""Published decay lengths by block size (DFlash, arXiv 2602.06036)."""


class LossConfig(Config):
    """What is minimised."""

    weighting: Literal["decay", "dpace", "uniform"] = "decay"
    """"decay": exp(-(k-1)/gamma) at slot k; "dpace": by the drafter's own confidence; "uniform": 1."""
    gamma: Annotated[float, Field(gt=0)] | None = None
    """Decay length; None: the published one, which exists for blocks of 16, 10 and 8 alone."""
    dpace_alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Smoothing of D-PACE: 1 makes every slot count by its place alone."""
    kl_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of KL(target || drafter) in the loss, the rest being cross entropy; needs the stored last hidden
    state.
    """
    chunk_slots: Annotated[int, Field(ge=1)] = 4096
    """Slots that go through the head at a time; bounds memory at chunk_slots x vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadInputs:
    """The scored slots on the device (see `dflash_core.blocks.ScoredSlots`)."""

    slot_N: Tensor
    """int64 [N]: row of the hidden states."""
    label_N: Tensor
    """int64 [N]."""
    rank_P: Tensor
    """int64 [P]: place of each row among the scored slots, -1 where not scored."""
    count: int
    """Entries of `slot_N` and `label_N` that are real."""


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """The target's distributions for the KL term: the state from which the target predicted each scored
    token.
    """

    hidden_CD: Tensor
    """[C, D], after the target's final norm."""
    index_N: Tensor
    """int64 [N]: row of `hidden_CD` that predicts scored slot n, i.e. anchor + k - 1."""
    weight: float
    """Share of KL in the loss."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotLosses:
    """Results for the scored slots, float32 [N], zero in padding."""

    loss_N: Tensor
    """Differentiable: cross entropy, or its mixture with KL."""
    ce_N: Tensor
    """Cross entropy; carries no gradient."""
    correct_N: Tensor
    """1 where the label is the first largest logit."""


def resolve_gamma(config: LossConfig, block_size: int) -> float:
    """Return the decay length of a block size; raises UserError where none is published and none is given."""
    if config.gamma is not None:
        return config.gamma
    if block_size not in GAMMA_OF_BLOCK:
        raise UserError(
            f"training.loss.gamma is missing: there is no published decay length for block_size {block_size} "
            f"(there is for {sorted(GAMMA_OF_BLOCK)}); set one, e.g. {max(1, block_size // 3)}"
        )
    return GAMMA_OF_BLOCK[block_size]


def slot_weights(config: LossConfig, block_size: int) -> Tensor:
    """Float32 [K]: weight of each slot before anything is known of its loss; 0 at slot 0.

    Decay is exp(-(k-1)/gamma) (DFlash, arXiv 2602.06036). D-PACE starts from ones.
    """
    slot_K = torch.arange(block_size, dtype=torch.float32)
    weight_K = torch.ones(block_size)
    if config.weighting == "decay":
        weight_K = torch.exp(-(slot_K - 1.0) / resolve_gamma(config, block_size))
    return torch.where(slot_K > 0, weight_K, 0.0)


def dpace_weights(ce_AK: Tensor, scored_AK: Tensor, alpha: float) -> Tensor:
    """Weights by expected acceptance (D-PACE, arXiv 2605.18810): w_j = sum over m >= j of prod over i <= m of
    q~_i.

    q = exp(-cross entropy), q~ = (1 - alpha) q + alpha. Slots that are not scored neither count nor lower the
    later ones. Float32 [A, K] in and out, no gradient.
    """
    ce_AK = ce_AK.detach()
    smoothed_AK = torch.where(scored_AK, (1.0 - alpha) * torch.exp(-ce_AK) + alpha, 1.0)
    reached_AK = torch.where(scored_AK, smoothed_AK.cumprod(dim=1), 0.0)
    return torch.where(scored_AK, reached_AK.flip(1).cumsum(dim=1).flip(1), 0.0)


def leading_matches(correct_AK: Tensor, scored_AK: Tensor) -> Tensor:
    """Int64 [A]: slots 1, 2, ... of each block that are scored and correct before the first that is not.

    Acceptance length of a block is this plus one, the target's own token.
    """
    return (correct_AK & scored_AK)[:, 1:].cumprod(dim=1).sum(dim=1)


def spread(values_N: Tensor, rank_P: Tensor, shape_AK: tuple[int, int]) -> Tensor:
    """Return values of scored slots at their places in the blocks, [A, K], zero elsewhere (slot 0
    included).
    """
    anchors, slots = shape_AK
    found_P = torch.where(rank_P >= 0, values_N[rank_P.clamp(min=0)], 0.0)
    return F.pad(found_P[: anchors * (slots - 1)].view(anchors, slots - 1), (1, 0))


def head_loss(
    hidden_PD: Tensor, head_VD: Tensor, inputs: HeadInputs, chunk_slots: int, teacher: Teacher | None = None
) -> SlotLosses:
    """Send the scored slots through the frozen head and score them (see the module's docstring).

    `hidden_PD` and `head_VD` have one dtype. With gradients enabled the gradient is computed here, in
    forward; backward only scales and scatters it. On CUDA the pass over the logits is one kernel of our own,
    elsewhere plain torch.
    """
    loss_N, ce_N, correct_N = _HeadLoss.apply(hidden_PD, head_VD, inputs, chunk_slots, teacher)
    return SlotLosses(loss_N, ce_N, correct_N)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PD: Tensor,
        head_VD: Tensor,
        inputs: HeadInputs,
        chunk_slots: int,
        teacher: Teacher | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        most = inputs.slot_N.shape[0]
        wanted = ctx.needs_input_grad[0]
        loss_N = torch.zeros(most, dtype=torch.float32, device=hidden_PD.device)
        ce_N, correct_N, scale_N = (
            torch.zeros_like(loss_N),
            torch.zeros_like(loss_N),
            torch.zeros_like(loss_N),
        )
        grad_ND = hidden_PD.new_zeros((most if wanted else 0, hidden_PD.shape[1]))
        buffer = hidden_PD.new_empty((min(chunk_slots, most), head_VD.shape[0]))
        for start in range(0, inputs.count, chunk_slots):
            part = slice(start, min(start + chunk_slots, inputs.count))
            logits = torch.mm(
                hidden_PD[inputs.slot_N[part]], head_VD.t(), out=buffer[: part.stop - part.start]
            )
            teacher_logits, kl_weight = None, 0.0
            if teacher is not None:
                kl_weight = teacher.weight
                rows = teacher.hidden_CD[teacher.index_N[part]].to(head_VD.dtype)
                teacher_logits = torch.mm(rows, head_VD.t())
            score = _score_on_cuda if logits.is_cuda else _score_plainly
            loss_N[part], ce_N[part], correct_N[part], scale_N[part] = score(
                logits, inputs.label_N[part], teacher_logits, kl_weight, wanted
            )
            if wanted:
                torch.mm(logits, head_VD, out=grad_ND[part])
        ctx.save_for_backward(grad_ND, scale_N, inputs.rank_P)
        ctx.mark_non_differentiable(ce_N, correct_N)
        return loss_N, ce_N, correct_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_ND, scale_N, rank_P = ctx.saved_tensors
        pull_N = grads[0] * scale_N
        if grad_ND.is_cuda:
            from dflash_core.loss_kernel import gather_scaled

            return gather_scaled(grad_ND, pull_N, rank_P), None, None, None, None
        known_P = rank_P.clamp(min=0)
        pull_P = torch.where(rank_P >= 0, pull_N[known_P], 0.0)
        return (grad_ND[known_P] * pull_P[:, None]).to(grad_ND.dtype), None, None, None, None


def _score_plainly(
    logits: Tensor, label_n: Tensor, teacher_logits: Tensor | None, kl_weight: float, wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, cross entropy, correctness and gradient scale of a chunk; `logits` becomes the gradient if
    `wanted`.
    """
    log_p = F.log_softmax(logits.float(), dim=-1)
    loss_n = ce_n = -log_p.gather(1, label_n[:, None]).squeeze(1)
    correct_n = (log_p.argmax(dim=-1) == label_n).float()
    p_teacher = None
    if teacher_logits is not None:
        log_t = F.log_softmax(teacher_logits.float(), dim=-1)
        p_teacher = log_t.exp()
        loss_n = (1.0 - kl_weight) * ce_n + kl_weight * (p_teacher * (log_t - log_p)).sum(dim=-1)
    if wanted:
        pull = log_p.exp_()  # in place: on a CPU this function is bound by passes over memory
        pull.scatter_add_(1, label_n[:, None], torch.full_like(ce_n, kl_weight - 1.0)[:, None])
        if p_teacher is not None:
            pull.sub_(p_teacher, alpha=kl_weight)
        logits.copy_(pull)
    return loss_n, ce_n, correct_n, torch.ones_like(ce_n)


def _score_on_cuda(
    logits: Tensor, label_n: Tensor, teacher_logits: Tensor | None, kl_weight: float, wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_score_plainly`, in one read and one write of the logits, or two of each with a teacher."""
    from dflash_core.loss_kernel import cross_entropy_in_place, mixed_loss_in_place

    if teacher_logits is None:
        ce_n, correct_n, scale_n = cross_entropy_in_place(logits, label_n, wanted)
        return ce_n, ce_n, correct_n, scale_n
    loss_n, ce_n, correct_n = mixed_loss_in_place(logits, teacher_logits, label_n, kl_weight, wanted)
    return loss_n, ce_n, correct_n, torch.ones_like(loss_n)
