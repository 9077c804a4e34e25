"""The arithmetic between a target's matrix products, written so that a compiler makes one kernel of each.

Letters: N tokens of a packed batch, D width, H heads, C channels of a convolution, F width of the MLP.
Values are rounded to the type of the input where transformers' modules round them, so that uncompiled they
agree closely; compiled, the kernels may keep float32 between such places, which is no less exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_core.fp8 import quantise_rows


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float, offset: float) -> Tensor:
    """Root mean square norm over the last dimension; `offset` is 1 for weights stored around zero."""
    x32 = x_ND.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (x32 * (weight_D.float() + offset)).to(x_ND.dtype)
    return weight_D * x32.to(x_ND.dtype)


def add_rms_norm(
    residual_ND: Tensor, update_ND: Tensor, weight_D: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Return residual + update, rounded as the model rounds it, and the norm of that sum."""
    sum_ND = residual_ND + update_ND
    return sum_ND, rms_norm(sum_ND, weight_D, eps, offset)


def swiglu(gate_up_NF2: Tensor) -> Tensor:
    """silu(gate) * up of the two halves: [N, 2F] -> [N, F]."""
    gate_NF, up_NF = gate_up_NF2.chunk(2, dim=-1)
    return F.silu(gate_NF) * up_NF


def rotate(x_NHd: Tensor, cos_Nr: Tensor, sin_Nr: Tensor) -> Tensor:
    """Rotary embedding of the first r channels of each head (the rest passes), halves rotated."""
    turned = x_NHd[..., : cos_Nr.shape[-1]]
    first, second = turned.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    turned = turned * cos_Nr[:, None] + swapped * sin_Nr[:, None]
    return torch.cat((turned, x_NHd[..., cos_Nr.shape[-1] :]), dim=-1)


def attention_inputs(
    qkv_NX: Tensor,
    heads: tuple[int, int, int, bool],
    norms: tuple[Tensor | None, Tensor | None, float, float],
    cos_Nr: Tensor,
    sin_Nr: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Split a merged projection into rotated queries and keys, values, and the output gate.

    `heads`: query heads, key heads, head width d, whether each query head is followed by a gate of d.
    `norms`: weights of the norms of query and key heads (or None), eps, offset.
    Returns q [N, Hq, d], k and v [N, Hk, d], gate [N, Hq * d] or None.
    """
    query_heads, key_heads, width, gated = heads
    q_weight, k_weight, eps, offset = norms
    query_part = query_heads * width * (2 if gated else 1)
    q, k, v = qkv_NX.split([query_part, key_heads * width, key_heads * width], dim=-1)
    tokens, gate = len(qkv_NX), None
    if gated:
        q, gate = q.reshape(tokens, query_heads, 2 * width).chunk(2, dim=-1)
        gate = gate.reshape(tokens, query_heads * width)
    q, k = q.reshape(tokens, query_heads, width), k.reshape(tokens, key_heads, width)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps, offset), rms_norm(k, k_weight, eps, offset)
    q, k = rotate(q, cos_Nr, sin_Nr), rotate(k, cos_Nr, sin_Nr)
    return q, k, v.reshape(tokens, key_heads, width).contiguous(), gate


def gate_output(mixed_NX: Tensor, gate_NX: Tensor) -> Tensor:
    """Attention output times sigmoid(gate)."""
    return mixed_NX * torch.sigmoid(gate_NX)


def delta_inputs(
    projected_NX: Tensor,
    conv_CW: Tensor,
    position_N: Tensor,
    shape: tuple[int, int, int, int],
    unit_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal depthwise convolution and SiLU of a merged projection, split into q, k, v; q, k of unit length.

    The first C columns of `projected_NX` are convolved with W taps; `position_N` is the place of a token in
    its document, so that no tap reaches into the document before. `shape`: key heads, key width, value
    heads, value width. Returns q, k [N, Hk, dk] in `unit_dtype` and v [N, Hv, dv].
    """
    key_heads, key_width, value_heads, value_width = shape
    channels, taps = conv_CW.shape
    x_NC = projected_NX[:, :channels]
    mixed = x_NC.float() * conv_CW[:, taps - 1].float()
    for back in range(1, taps):
        earlier_NC = F.pad(x_NC, (0, 0, back, 0))[: len(x_NC)].float()
        inside_N1 = (position_N >= back)[:, None]
        mixed = mixed + torch.where(inside_N1, earlier_NC * conv_CW[:, taps - 1 - back].float(), 0.0)
    mixed = F.silu(mixed.to(projected_NX.dtype))
    keys = key_heads * key_width
    q, k, v = mixed.split([keys, keys, value_heads * value_width], dim=-1)
    tokens = len(x_NC)
    q, k = (unit(part.reshape(tokens, key_heads, key_width).float()).to(unit_dtype) for part in (q, k))
    return q, k, v.reshape(tokens, value_heads, value_width).contiguous()


def unit(x: Tensor) -> Tensor:
    """Scale the last dimension to unit length (eps 1e-6 under the root, as gated delta nets do)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def decay_and_rate(
    projected_NX: Tensor, start: int, heads: int, a_log_H: Tensor, dt_bias_H: Tensor
) -> tuple[Tensor, Tensor]:
    """Log decay g (float32) and learning rate beta [N, H] of a gated delta net.

    Columns start .. start+H of the merged projection hold b, the next H hold a: beta = sigmoid(b),
    g = -exp(A_log) softplus(a + dt_bias).
    """
    b_NH = projected_NX[:, start : start + heads]
    a_NH = projected_NX[:, start + heads : start + 2 * heads].float()
    g_NH = -a_log_H.float().exp() * F.softplus(a_NH + dt_bias_H.float())
    return g_NH, torch.sigmoid(b_NH)


def gated_rms_norm(x_NHd: Tensor, projected_NX: Tensor, start: int, weight_d: Tensor, eps: float) -> Tensor:
    """Norm of each head times its weight and silu(z); z are the columns from `start`. Returns [N, H * d]."""
    tokens, heads, width = x_NHd.shape
    z_NHd = projected_NX[:, start : start + heads * width].reshape(tokens, heads, width)
    normed = rms_norm(x_NHd, weight_d, eps, 0.0)
    return (normed * F.silu(z_NHd.float())).to(x_NHd.dtype).reshape(tokens, heads * width)


class Fused:
    """The functions above, each compiled to one kernel, or as they stand."""

    def __init__(self, *, compiled: bool) -> None:
        """Compiled functions must only be called from the main thread of a process."""
        wrap = _compiled if compiled else _as_it_stands
        self.rms_norm = wrap(rms_norm)
        self.add_rms_norm = wrap(add_rms_norm)
        self.swiglu = wrap(swiglu)
        self.attention_inputs = wrap(attention_inputs)
        self.gate_output = wrap(gate_output)
        self.delta_inputs = wrap(delta_inputs)
        self.decay_and_rate = wrap(decay_and_rate)
        self.gated_rms_norm = wrap(gated_rms_norm)
        self.quantise_rows = wrap(quantise_rows)


def _as_it_stands(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile once for any number of tokens: that dimension is declared dynamic, all others are constants."""
    compiled = torch.compile(function)

    def run(first: Tensor, *rest: Any) -> Any:
        tokens = len(first)
        for argument in (first, *rest):
            if isinstance(argument, Tensor) and argument.ndim and len(argument) == tokens:
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return compiled(first, *rest)

    return run
