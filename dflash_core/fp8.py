"""Products in fp8, an option of the draft layers: forward and input gradient in e4m3, the weight gradient in
bf16.

Each row of an operand has its own scale (its largest absolute value lands on e4m3's largest), computed where
the row is made, so the compiler fuses it with what comes before. Weights are quantised anew each step from
their float32 masters, along the dimension that the product sums over: once for the forward, once for the
input gradient. The weight gradient sums over tens of thousands of slots and keeps bf16. Letters: N rows, I
inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LARGEST = 448.0
"""Largest finite value of float8_e4m3fn."""


def quantise_rows(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 [N, I] and float32 scales [N, 1] with x ~ e4m3 * scale."""
    scale_N = x_NI.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (x_NI.float() / scale_N).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale_N


def scaled_product(a_NI: Tensor, b_OI: Tensor) -> Tensor:
    """bf16 [N, O] = a @ b.T, both quantised by rows."""
    a8, a_scale = quantise_rows(a_NI)
    b8, b_scale = quantise_rows(b_OI)
    return torch._scaled_mm(
        a8, b8.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


class Fp8Linear(torch.autograd.Function):
    """x [N, I], weight [O, I], both bf16 -> [N, O]. I, O and N must be multiples of 16."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return scaled_product(x_NI, weight_OI)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_NI, weight_OI = ctx.saved_tensors
        grad_NO = grads[0]
        grad_x = scaled_product(grad_NO, weight_OI.t().contiguous()) if ctx.needs_input_grad[0] else None
        return grad_x, grad_NO.t() @ x_NI
