"""The arithmetic of the drafter: context, draft layers, rotation and norms, as plain functions of tensors.

Shapes: C context tokens of a row, E = L*D values of the concatenated taps, D width, Q = A*K query tokens
(slots of all blocks), P of them in the last layer, S = C + Q keys, H query heads, G key/value heads, F
features of a head. These functions are what is compiled: one graph serves all layers between the first and
the last. Products are in `LayerShape.dtype`, with weights cast inside; norms and rotation in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from dflash_core.fp8 import Fp8Linear


class LayerWeights(NamedTuple):
    """Weights of one draft layer, as tensors: what `draft_layer` computes with."""

    input_layernorm: Tensor
    q_proj: Tensor
    k_proj: Tensor
    v_proj: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o_proj: Tensor
    post_attention_layernorm: Tensor
    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor


class LayerShape(NamedTuple):
    """Python constants of the arithmetic; guards of the compiled graph."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    dtype: torch.dtype
    fp8: bool
    """Whether the products of the layers are in fp8."""


class Context(NamedTuple):
    """Keys and values that the context contributes to each draft layer: one [C, G, F] tensor a layer,
    rotated.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, in float32 whatever comes in."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def product(x_NI: Tensor, weight_OI: Tensor, shape: LayerShape) -> Tensor:
    """x @ weight.T, in fp8 where the layers are."""
    return Fp8Linear.apply(x_NI, weight_OI) if shape.fp8 else F.linear(x_NI, weight_OI)


def rotary_tables(position_N: Tensor, theta: float, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [N, F/2], of rotary embedding at integer positions (RoFormer, arXiv
    2104.09864).

    The frequencies are computed in float32 at each call and are no buffer: casting a module to bf16 cannot
    round them.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_N.device) / head_dim
    angle_NF = position_N.float()[:, None] * (1.0 / theta**exponent)[None, :]
    return angle_NF.cos(), angle_NF.sin()


def rotate(x_NHF: Tensor, cos_NF: Tensor, sin_NF: Tensor) -> Tensor:
    """Rotate the halves of each head's features (Qwen's layout: feature f pairs with f + F/2). Float32 in,
    float32 out.
    """
    first, second = x_NHF.chunk(2, dim=-1)
    cos, sin = cos_NF[:, None, :], sin_NF[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def context_keys_values(
    taps_CE: Tensor,
    fc: Tensor,
    hidden_norm: Tensor,
    layers: tuple[LayerWeights, ...],
    cos_CF: Tensor,
    sin_CF: Tensor,
    shape: LayerShape,
) -> Context:
    """Project the taps once, then give every layer its keys and values of the context.

    The keys and values of all layers come from one product with the concatenated k_proj and v_proj weights:
    the context is the same for all of them, and its gradient is then one product too.
    """
    dtype = shape.dtype
    context_CD = rms_norm(F.linear(taps_CE.to(dtype), fc.to(dtype)), hidden_norm, shape.eps).to(dtype)
    weight = torch.cat([w.to(dtype) for layer in layers for w in (layer.k_proj, layer.v_proj)], dim=0)
    kv_CLGF = F.linear(context_CD, weight).view(-1, 2 * len(layers), shape.num_kv_heads, shape.head_dim)
    keys, values = [], []
    for i, layer in enumerate(layers):
        normed = rms_norm(kv_CLGF[:, 2 * i], layer.k_norm, shape.eps)
        keys.append(rotate(normed, cos_CF, sin_CF).to(dtype))
        # A copy: gradients of views of one tensor would be added up layer by layer, outside of the graph.
        values.append(kv_CLGF[:, 2 * i + 1].clone())
    return Context(tuple(keys), tuple(values))


def attend(q_QHF: Tensor, k_SGF: Tensor, v_SGF: Tensor, mask: BlockMask | Tensor | None) -> Tensor:
    """Attention with grouped heads: flex attention for a `BlockMask`, SDPA for a dense bool [Q, S] mask or
    None (all visible). Queries come scaled, so that no kernel has to multiply its scores.
    """
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q_QHF, k_SGF, v_SGF))
    if isinstance(mask, BlockMask):
        out = flex_attention(q, k, v, block_mask=mask, scale=1.0, enable_gqa=True)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def slot_projections(x_ND: Tensor, w: LayerWeights, shape: LayerShape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [N, H, F], keys and values [N, G, F] of slots, before their norms and rotation."""
    dtype, heads, kv_heads, features = shape.dtype, shape.num_heads, shape.num_kv_heads, shape.head_dim
    normed_ND = rms_norm(x_ND, w.input_layernorm, shape.eps).to(dtype)
    weight = torch.cat([w.q_proj.to(dtype), w.k_proj.to(dtype), w.v_proj.to(dtype)], dim=0)
    projected = product(normed_ND, weight, shape).view(-1, heads + 2 * kv_heads, features)
    q, k, v = projected.split((heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def turn(x_NHF: Tensor, norm: Tensor, cos_NF: Tensor, sin_NF: Tensor, shape: LayerShape) -> Tensor:
    """Norm of each head, then rotation, in float32; what keys go through after their projection."""
    return rotate(rms_norm(x_NHF, norm, shape.eps), cos_NF, sin_NF).to(shape.dtype)


def turn_queries(x_NHF: Tensor, norm: Tensor, cos_NF: Tensor, sin_NF: Tensor, shape: LayerShape) -> Tensor:
    """As `turn`, times the scale of attention's scores before anything is rounded."""
    turned = rotate(rms_norm(x_NHF, norm, shape.eps), cos_NF, sin_NF)
    return (turned * shape.head_dim**-0.5).to(shape.dtype)


def attend_and_feed(
    x_PD: Tensor,
    q_PHF: Tensor,
    k_QGF: Tensor,
    v_QGF: Tensor,
    context_keys_CGF: Tensor,
    context_values_CGF: Tensor,
    w: LayerWeights,
    mask: BlockMask | Tensor | None,
    shape: LayerShape,
) -> Tensor:
    """The rest of a layer for P of the Q slots: attention over context and all slots, then the MLP."""
    dtype = shape.dtype
    k_SGF = torch.cat((context_keys_CGF, k_QGF), dim=0)
    v_SGF = torch.cat((context_values_CGF, v_QGF), dim=0)
    attended = attend(q_PHF, k_SGF, v_SGF, mask).reshape(-1, shape.num_heads * shape.head_dim)
    x_PD = x_PD + product(attended, w.o_proj.to(dtype), shape)
    normed_PD = rms_norm(x_PD, w.post_attention_layernorm, shape.eps).to(dtype)
    # Two products, not one with joined weights: the gradients of gate and up then need not be joined either.
    gate = product(normed_PD, w.gate_proj.to(dtype), shape)
    up = product(normed_PD, w.up_proj.to(dtype), shape)
    return x_PD + product(F.silu(gate) * up, w.down_proj.to(dtype), shape)


def draft_layer(
    x_QD: Tensor,
    context_keys_CGF: Tensor,
    context_values_CGF: Tensor,
    w: LayerWeights,
    cos_QF: Tensor,
    sin_QF: Tensor,
    mask: BlockMask | Tensor | None,
    shape: LayerShape,
) -> Tensor:
    """One Qwen3 decoder layer over the slots; keys and values are those of the context, then those of the
    slots.

    Products in `shape.dtype` with weights cast here, inside the compiled region; norms and rotation in
    float32.
    """
    q, k, v = slot_projections(x_QD, w, shape)
    q = turn_queries(q, w.q_norm, cos_QF, sin_QF, shape)
    k = turn(k, w.k_norm, cos_QF, sin_QF, shape)
    return attend_and_feed(x_QD, q, k, v, context_keys_CGF, context_values_CGF, w, mask, shape)


def first_draft_layer(
    rows_RD: Tensor,
    context_keys_CGF: Tensor,
    context_values_CGF: Tensor,
    w: LayerWeights,
    cos_QF: Tensor,
    sin_QF: Tensor,
    mask: BlockMask | Tensor | None,
    shape: LayerShape,
    slots: int,
) -> Tensor:
    """`draft_layer` for the first layer of blocks: `rows_RD` are the embeddings of the A anchors and of the
    mask token.

    All masked slots enter as the same vector, so its projections are computed once instead of A * (slots - 1)
    times.
    """
    # So few rows that fp8 has nothing to win.
    few = slot_projections(rows_RD, w, shape._replace(fp8=False))
    q, k, v = (repeat_mask_row(rows, slots) for rows in few)
    q = turn_queries(q, w.q_norm, cos_QF, sin_QF, shape)
    k = turn(k, w.k_norm, cos_QF, sin_QF, shape)
    x_QD = repeat_mask_row(rows_RD, slots)
    return attend_and_feed(x_QD, q, k, v, context_keys_CGF, context_values_CGF, w, mask, shape)


def last_draft_layer(
    x_QD: Tensor,
    context_keys_CGF: Tensor,
    context_values_CGF: Tensor,
    w: LayerWeights,
    cos_QF: Tensor,
    sin_QF: Tensor,
    mask: BlockMask | Tensor,
    shape: LayerShape,
    slots: int,
) -> Tensor:
    """`draft_layer` for the last layer of blocks, for slots 1..K-1 alone: nothing is predicted from slot 0.

    Slot 0 still gives keys and values. `mask` has P queries, A * (slots - 1) or more; the output is [P, D],
    padded with rows that mean nothing.
    """
    queries = mask.seq_lengths[0] if isinstance(mask, BlockMask) else mask.shape[0]
    dtype, kv_heads, features = shape.dtype, shape.num_kv_heads, shape.head_dim
    normed_QD = rms_norm(x_QD, w.input_layernorm, shape.eps).to(dtype)
    kv_weight = torch.cat([w.k_proj.to(dtype), w.v_proj.to(dtype)], dim=0)
    k, v = product(normed_QD, kv_weight, shape).view(-1, 2 * kv_heads, features).chunk(2, dim=1)
    k = turn(k, w.k_norm, cos_QF, sin_QF, shape)
    cos_PF, sin_PF = (without_anchors(t, slots, queries) for t in (cos_QF, sin_QF))
    q = product(without_anchors(normed_QD, slots, queries), w.q_proj.to(dtype), shape)
    q = turn_queries(q.view(-1, shape.num_heads, features), w.q_norm, cos_PF, sin_PF, shape)
    x_PD = without_anchors(x_QD, slots, queries)
    return attend_and_feed(x_PD, q, k, v, context_keys_CGF, context_values_CGF, w, mask, shape)


def repeat_mask_row(rows_RX: Tensor, slots: int) -> Tensor:
    """[A + 1, ...] of the anchors and of the mask token -> [A * slots, ...] of all slots: an anchor, then
    masks.
    """
    anchors_A, mask = rows_RX[:-1, None], rows_RX[-1:, None]
    masks = mask.expand(anchors_A.shape[0], slots - 1, *rows_RX.shape[1:])
    return torch.cat((anchors_A, masks), dim=1).flatten(0, 1)


def without_anchors(x_QX: Tensor, slots: int, rows: int) -> Tensor:
    """[A * slots, X] of all slots -> [rows, X] of slots 1 and later, zeros behind them."""
    kept = x_QX.view(-1, slots, x_QX.shape[1])[:, 1:].flatten(0, 1)
    return F.pad(kept, (0, 0, 0, rows - kept.shape[0]))


# The layers recomputed in backward, inside the compiled region, which adds no second graph. Each is its own
# function: one that all shared would count as recompiled for each of them.


def first_recomputed(*arguments: Any) -> Tensor:
    """`first_draft_layer`, recomputed in backward."""
    return checkpoint(first_draft_layer, *arguments, use_reentrant=False)


def recomputed(*arguments: Any) -> Tensor:
    """`draft_layer`, recomputed in backward."""
    return checkpoint(draft_layer, *arguments, use_reentrant=False)


def last_recomputed(*arguments: Any) -> Tensor:
    """`last_draft_layer`, recomputed in backward."""
    return checkpoint(last_draft_layer, *arguments, use_reentrant=False)


def final_norm(x_QD: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """The drafter's last norm; what the target's head is applied to."""
    return rms_norm(x_QD, weight, eps).to(dtype)
