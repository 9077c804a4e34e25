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
    logits_nV: Tensor, label_n: Tensor, write: bool, *, block: int = 8192, warps: int = 16
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
