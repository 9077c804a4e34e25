"""Cross entropy and its gradient in one pass over bf16 logits: a Triton kernel, imported on CUDA only.

With the label's own logit as the reference, s = sum_v exp(x_v - x_label) gives everything: cross entropy =
log s, and the gradient row softmax - onehot = (exp(x - x_label) - s * onehot) / s. The kernel writes exp(x -
x_label) over x while it sums, so no second read is needed; the label's entry becomes 1 - s afterwards, in
float32 before rounding, so that confident slots keep their precision; and the division by s is left to the
caller, who scales each gradient row anyway.
"""

# mypy: ignore-errors
# Triton is installed with CUDA builds of torch alone, and its kernels are no annotated Python.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 70.0
"""Logit differences are cut here, so that 2**18 of them still sum up in float32; a cross entropy that large
is a ruin anyway.
"""


@triton.jit
def _exponentiate(
    logits_ptr,
    label_ptr,
    sum_ptr,
    beaten_ptr,
    stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    WRITE: tl.constexpr,
    CUT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * stride
    label = tl.load(label_ptr + row)
    reference = tl.load(base + label).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    beaten = tl.zeros([BLOCK], tl.int32)
    # The label's logit must be read by every thread before any thread overwrites it.
    tl.debug_barrier()
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < V
        x = tl.load(base + column, mask=inside, other=float("-inf")).to(tl.float32)
        before = (x > reference) | ((x == reference) & (column < label))
        beaten += before.to(tl.int32)
        # NaN passes through the cut: a broken logit must reach the loss.
        difference = x - reference
        e = tl.exp(tl.where(difference > CUT, CUT, difference))
        total += e
        if WRITE:
            tl.store(base + column, e.to(logits_ptr.dtype.element_ty), mask=inside)
    tl.store(sum_ptr + row, tl.sum(total))
    tl.store(beaten_ptr + row, tl.sum(beaten))


def cross_entropy_in_place(
    logits_nV: Tensor, label_n: Tensor, write: bool, *, block: int = 4096, warps: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    """Return cross entropy, correctness and gradient scale, float32 [n]; with `write` logits become the
    gradient / scale.

    `logits_nV` is contiguous in V, `label_n` int64. Correct: no logit is larger, none before the label is
    equal.
    """
    rows, vocabulary = logits_nV.shape
    sum_n = torch.empty(rows, dtype=torch.float32, device=logits_nV.device)
    beaten_n = torch.empty(rows, dtype=torch.int32, device=logits_nV.device)
    _exponentiate[(rows,)](
        logits_nV,
        label_n,
        sum_n,
        beaten_n,
        logits_nV.stride(0),
        V=vocabulary,
        BLOCK=block,
        WRITE=write,
        CUT=LARGEST,
        num_warps=warps,
    )
    if write:
        logits_nV.scatter_(1, label_n[:, None], (1.0 - sum_n).to(logits_nV.dtype)[:, None])
    return sum_n.log(), (beaten_n == 0).float(), sum_n.reciprocal()


@triton.jit
def _gather_scaled(rows_ptr, rank_ptr, scale_ptr, out_ptr, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    rank = tl.load(rank_ptr + row)
    known = rank >= 0
    scale = tl.load(scale_ptr + rank, mask=known, other=0.0)
    for start in range(0, D, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < D
        x = tl.load(rows_ptr + rank * D + column, mask=inside & known, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * D + column, (x * scale).to(out_ptr.dtype.element_ty), mask=inside)


def gather_scaled(rows_ND: Tensor, scale_N: Tensor, rank_P: Tensor) -> Tensor:
    """Return [P, D]: row p is rows[rank[p]] * scale[rank[p]], zero where the rank is -1. `rows_ND` is
    contiguous.
    """
    out_PD = rows_ND.new_empty((rank_P.shape[0], rows_ND.shape[1]))
    width = rows_ND.shape[1]
    block = min(2048, triton.next_power_of_2(width))
    _gather_scaled[(rank_P.shape[0],)](rows_ND, rank_P, scale_N, out_PD, D=width, BLOCK=block, num_warps=4)
    return out_PD


@triton.jit
def _sum_both(
    logits_ptr,
    teacher_ptr,
    label_ptr,
    sum_ptr,
    teacher_sum_ptr,
    cross_ptr,
    beaten_ptr,
    stride,
    teacher_stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    CUT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base, teacher_base = logits_ptr + row * stride, teacher_ptr + row * teacher_stride
    label = tl.load(label_ptr + row)
    reference = tl.load(base + label).to(tl.float32)
    teacher_reference = tl.load(teacher_base + label).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    teacher_total = tl.zeros([BLOCK], tl.float32)
    cross = tl.zeros([BLOCK], tl.float32)
    beaten = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < V
        x = tl.load(base + column, mask=inside, other=float("-inf")).to(tl.float32)
        beaten += ((x > reference) | ((x == reference) & (column < label))).to(tl.int32)
        difference = x - reference
        difference = tl.where(difference > CUT, CUT, difference)
        total += tl.exp(difference)
        t = tl.load(teacher_base + column, mask=inside, other=float("-inf")).to(tl.float32)
        teacher_difference = t - teacher_reference
        teacher_difference = tl.where(teacher_difference > CUT, CUT, teacher_difference)
        e = tl.exp(teacher_difference)
        teacher_total += e
        cross += tl.where(inside, e * (teacher_difference - difference), 0.0)
    tl.store(sum_ptr + row, tl.sum(total))
    tl.store(teacher_sum_ptr + row, tl.sum(teacher_total))
    tl.store(cross_ptr + row, tl.sum(cross))
    tl.store(beaten_ptr + row, tl.sum(beaten))


@triton.jit
def _mixed_gradient(
    logits_ptr,
    teacher_ptr,
    label_ptr,
    sum_ptr,
    teacher_sum_ptr,
    stride,
    teacher_stride,
    kl_weight,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    CUT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base, teacher_base = logits_ptr + row * stride, teacher_ptr + row * teacher_stride
    label = tl.load(label_ptr + row)
    reference = tl.load(base + label).to(tl.float32)
    teacher_reference = tl.load(teacher_base + label).to(tl.float32)
    total, teacher_total = tl.load(sum_ptr + row), tl.load(teacher_sum_ptr + row)
    # As in `_exponentiate`: read the label's logit before anybody overwrites it.
    tl.debug_barrier()
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < V
        difference = tl.load(base + column, mask=inside, other=float("-inf")).to(tl.float32) - reference
        difference = tl.where(difference > CUT, CUT, difference)
        t = tl.load(teacher_base + column, mask=inside, other=float("-inf")).to(tl.float32)
        teacher_difference = t - teacher_reference
        teacher_difference = tl.where(teacher_difference > CUT, CUT, teacher_difference)
        pull = kl_weight * tl.exp(teacher_difference) / teacher_total
        pull += tl.where(column == label, 1.0 - kl_weight, 0.0)
        gradient = tl.exp(difference) / total - pull
        tl.store(base + column, gradient.to(logits_ptr.dtype.element_ty), mask=inside)


def mixed_loss_in_place(
    logits_nV: Tensor, teacher_nV: Tensor, label_n: Tensor, kl_weight: float, write: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (1 - w) cross entropy + w KL(teacher || drafter), cross entropy and correctness, float32 [n].

    With `write` logits become the gradient. KL = sum_v p_t (log p_t - log p), with both labels' logits as
    references.
    """
    rows, vocabulary = logits_nV.shape
    sum_n, teacher_sum_n, cross_n = torch.empty(3, rows, dtype=torch.float32, device=logits_nV.device)
    beaten_n = torch.empty(rows, dtype=torch.int32, device=logits_nV.device)
    strides = (logits_nV.stride(0), teacher_nV.stride(0))
    sums = (sum_n, teacher_sum_n)
    shape = {"V": vocabulary, "BLOCK": 4096, "CUT": LARGEST, "num_warps": 8}
    _sum_both[(rows,)](logits_nV, teacher_nV, label_n, *sums, cross_n, beaten_n, *strides, **shape)
    ce_n = sum_n.log()
    kl_n = cross_n / teacher_sum_n - teacher_sum_n.log() + ce_n
    if write:
        _mixed_gradient[(rows,)](logits_nV, teacher_nV, label_n, *sums, *strides, kl_weight, **shape)
    return (1.0 - kl_weight) * ce_n + kl_weight * kl_n, ce_n, (beaten_n == 0).float()
