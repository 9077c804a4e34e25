"""AdamW in one pass over memory: a Triton kernel, imported on CUDA only.

torch's fused kernel writes the unscaled gradient back when it is given a scale; this one reads weight,
gradient and moments once, writes weight and moments once, and leaves the gradient alone: seven passes instead
of eight. Division by the sum of weights and by the clipping excess, and the halt on numbers that are not
finite, happen in registers.
"""

# mypy: ignore-errors
# Triton is installed with CUDA builds of torch alone, and its kernels are no annotated Python.

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _adamw(
    weight_ptr,
    grad_ptr,
    mean_ptr,
    square_ptr,
    scale_ptr,
    halted_ptr,
    size,
    beta1,
    beta2,
    epsilon,
    keep,
    step_size,
    root_correction,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    halted = tl.zeros([BLOCK], tl.float32) + tl.load(halted_ptr)
    lives = inside & (halted == 0.0)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0) / tl.load(scale_ptr)
    mean = tl.load(mean_ptr + at, mask=inside, other=0.0)
    square = tl.load(square_ptr + at, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    mean = mean + (1.0 - beta1) * (grad - mean)
    square = beta2 * square + (1.0 - beta2) * grad * grad
    weight = weight * keep - step_size * mean / (tl.sqrt(square) / root_correction + epsilon)
    tl.store(mean_ptr + at, mean, mask=lives)
    tl.store(square_ptr + at, square, mask=lives)
    tl.store(weight_ptr + at, weight, mask=lives)


def adamw_step(optimizer: torch.optim.AdamW, step: int, scale: Tensor, halted: Tensor) -> None:
    """What `optimizer.step()` does with gradients divided by `scale`, unless `halted` (both float32 scalars).

    `step` counts from 1. State is that of torch's optimizer, under the same names (Decoupled Weight Decay,
    arXiv 1711.05101).
    """
    counts = []
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        rate = float(group["lr"])
        numbers = (
            beta1,
            beta2,
            group["eps"],
            1.0 - rate * group["weight_decay"],
            rate / (1.0 - beta1**step),
            math.sqrt(1.0 - beta2**step),
        )
        for weight in group["params"]:
            if weight.grad is None:
                continue
            state = optimizer.state[weight]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
                state["exp_avg"] = torch.zeros_like(weight)
                state["exp_avg_sq"] = torch.zeros_like(weight)
            counts.append(state["step"])
            size = weight.numel()
            tensors = (weight, weight.grad, state["exp_avg"], state["exp_avg_sq"], scale, halted)
            if not all(t.is_contiguous() for t in tensors):
                raise ValueError("weights, gradients and moments must be contiguous")
            _adamw[(triton.cdiv(size, BLOCK),)](*tensors, size, *numbers, BLOCK=BLOCK, num_warps=8)
    if counts:
        torch._foreach_add_(counts, [1.0 - halted] * len(counts))  # one tensor for all would be read back
