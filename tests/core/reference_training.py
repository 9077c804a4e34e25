"""Training written out slowly: loops over documents, anchors and slots, in float64, without rows, masks or
packing.

It shares no arithmetic with the trainer. A document is a chat by itself; everything here counts in its own
positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_core.drafter import DrafterConfig
from dflash_core.loss import LossConfig

PUBLISHED_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Document:
    """A chat, what the target computed for it, and the positions that blocks start from."""

    tokens: list[int]
    supervised: list[bool]
    taps_TE: Tensor
    last_hidden_TD: Tensor
    """After the target's final norm: row t is what the target predicts token t + 1 from."""
    anchors: list[int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Model:
    """A drafter's weights by name, and the target's embedding and head; float64."""

    config: DrafterConfig
    weights: Mapping[str, Tensor]
    embedding_VD: Tensor
    head_VD: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slot:
    """A scored slot of a block."""

    label: int
    weight: float
    cross_entropy: float
    loss: Tensor
    """Scalar with a gradient: cross entropy, or its mixture with KL."""
    correct: bool


Block = list[Slot]
"""The scored slots of one anchor: slots 1, 2, ... as far as they are scored."""


def possible_anchors(supervised: Sequence[bool]) -> list[int]:
    """Positions whose own token and the next one are both to be learnt."""
    return [t for t in range(len(supervised) - 1) if supervised[t] and supervised[t + 1]]


def scored_slots(document: Document, anchor: int, block_size: int) -> list[int]:
    """Slot k predicts token anchor + k; it counts up to the end of the document or of the answer."""
    slots = []
    for k in range(1, block_size):
        at = anchor + k
        if at >= len(document.tokens) or not document.supervised[at]:
            break
        slots.append(k)
    return slots


def blocks_of(model: Model, loss: LossConfig, documents: Sequence[Document]) -> list[Block]:
    """Score every block of the documents."""
    blocks = []
    for document in documents:
        for anchor in document.anchors:
            logits_KV = draft(model, document, anchor)
            scored = scored_slots(document, anchor, model.config.block_size)
            labels = [document.tokens[anchor + k] for k in scored]
            log_p = [F.log_softmax(logits_KV[k], dim=0) for k in scored]
            entropies = [-float(log_p[i][labels[i]].detach()) for i in range(len(scored))]
            weights = weights_of(loss, model.config.block_size, scored, entropies)
            block = []
            for i, k in enumerate(scored):
                value = -log_p[i][labels[i]]
                if loss.kl_weight > 0:
                    # The token at anchor + k is predicted from the state of the token before it.
                    teacher_logits_V = model.head_VD @ document.last_hidden_TD[anchor + k - 1].double()
                    log_t = F.log_softmax(teacher_logits_V, dim=0)
                    kl = (log_t.exp() * (log_t - log_p[i])).sum()
                    value = (1 - loss.kl_weight) * value + loss.kl_weight * kl
                block.append(
                    Slot(
                        label=labels[i],
                        weight=weights[i],
                        cross_entropy=entropies[i],
                        loss=value,
                        correct=int(logits_KV[k].argmax()) == labels[i],
                    )
                )
            blocks.append(block)
    return blocks


def weights_of(loss: LossConfig, block_size: int, scored: list[int], entropies: list[float]) -> list[float]:
    """One weight a scored slot."""
    if loss.weighting == "uniform":
        return [1.0 for _ in scored]
    if loss.weighting == "decay":
        gamma = loss.gamma or PUBLISHED_GAMMA[block_size]
        return [math.exp(-(k - 1) / gamma) for k in scored]
    # D-PACE: slot j matters as far as the drafter is expected to reach it and all that follow.
    weights = []
    for j in range(len(scored)):
        weight = 0.0
        for m in range(j, len(scored)):
            reached = 1.0
            for i in range(m + 1):
                reached *= (1 - loss.dpace_alpha) * math.exp(-entropies[i]) + loss.dpace_alpha
            weight += reached
        weights.append(weight)
    return weights


def mean_loss(blocks: Sequence[Block]) -> Tensor:
    """What a step minimises: the weighted mean over all slots of all rows."""
    top, bottom = torch.zeros((), dtype=torch.float64), 0.0
    for block in blocks:
        for slot in block:
            top = top + slot.weight * slot.loss
            bottom += slot.weight
    return top / bottom


def metrics_of(blocks: Sequence[Block], block_size: int, context_tokens: int) -> dict[str, Any]:
    """Every field of a summary, counted slot by slot."""
    whole = [block for block in blocks if len(block) == block_size - 1]
    slots = [slot for block in blocks for slot in block]
    slot_loss, slot_accuracy, slot_acceptance = [], [], []
    for k in range(1, block_size):
        reaching = [block for block in blocks if len(block) >= k]
        slot_loss.append(_mean([block[k - 1].cross_entropy for block in reaching]))
        slot_accuracy.append(_mean([block[k - 1].correct for block in reaching]))
        slot_acceptance.append(_mean([all(slot.correct for slot in block[:k]) for block in reaching]))
    return {
        "loss": float(mean_loss(blocks).detach()),
        "cross_entropy": _mean([slot.cross_entropy for slot in slots]),
        "accuracy": _mean([slot.correct for slot in slots]),
        "acceptance_length": _mean([_accepted(block) for block in blocks]),
        "acceptance_length_whole": _mean([_accepted(block) for block in whole]),
        "slot_loss": slot_loss,
        "slot_accuracy": slot_accuracy,
        "slot_acceptance": slot_acceptance,
        "scored_slots": len(slots),
        "blocks": len(blocks),
        "context_tokens": context_tokens,
    }


def _accepted(block: Block) -> int:
    """Tokens that one verification commits: the leading matches and the target's own next token."""
    length = 1
    for slot in block:
        if not slot.correct:
            break
        length += 1
    return length


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def draft(model: Model, document: Document, anchor: int) -> Tensor:
    """Logits [K, V] of one block: the drafter as a plain Qwen3 whose queries are the block's tokens."""
    c, w = model.config, model.weights
    last = anchor + c.block_size
    context = _norm(document.taps_TE[:anchor].double() @ w["fc.weight"].T, w["hidden_norm.weight"], c)
    x = model.embedding_VD[[document.tokens[anchor]] + [c.mask_token_id] * (c.block_size - 1)]
    for i, kind in enumerate(c.types):
        layer = {n.removeprefix(f"layers.{i}."): p for n, p in w.items() if n.startswith(f"layers.{i}.")}
        normed = _norm(x, layer["input_layernorm.weight"], c)
        both = torch.cat([context, normed])
        q = _heads(normed @ layer["self_attn.q_proj.weight"].T, c)
        k = _heads(both @ layer["self_attn.k_proj.weight"].T, c)
        v = _heads(both @ layer["self_attn.v_proj.weight"].T, c)
        q = _turned(_norm(q, layer["self_attn.q_norm.weight"], c), range(anchor, last), c)
        k = _turned(_norm(k, layer["self_attn.k_norm.weight"], c), range(last), c)
        sees = torch.tensor([[_sees(at, key, kind, c) for key in range(last)] for at in range(anchor, last)])
        heads = []
        for h in range(c.num_heads):
            g = h // (c.num_heads // c.num_kv_heads)
            scores = (q[:, h] @ k[:, g].T / math.sqrt(c.head_dim)).masked_fill(~sees, -math.inf)
            heads.append(scores.softmax(dim=1) @ v[:, g])
        x = x + torch.cat(heads, dim=1) @ layer["self_attn.o_proj.weight"].T
        normed = _norm(x, layer["post_attention_layernorm.weight"], c)
        gate = F.silu(normed @ layer["mlp.gate_proj.weight"].T)
        x = x + (gate * (normed @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return _norm(x, w["norm.weight"], c) @ model.head_VD.T


def _sees(at: int, key: int, kind: str, c: DrafterConfig) -> bool:
    """Keys are the tokens before the anchor and the block itself. Sliding layers are causal, and short of
    sight.
    """
    if kind == "full_attention":
        return True
    assert c.sliding_window is not None
    return at - c.sliding_window < key <= at


def _norm(x: Tensor, weight: Tensor, c: DrafterConfig) -> Tensor:
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + c.rms_norm_eps).sqrt() * weight


def _heads(x: Tensor, c: DrafterConfig) -> Tensor:
    return x.view(len(x), -1, c.head_dim)


def _turned(x_NHF: Tensor, positions: range, c: DrafterConfig) -> Tensor:
    """Feature f of a head turns with feature f + F/2 by position * theta^(-2f/F)."""
    half = c.head_dim // 2
    angle = torch.tensor([[p * c.rope_theta ** (-f / half) for f in range(half)] for p in positions])
    cos, sin = angle.double().cos()[:, None], angle.double().sin()[:, None]
    first, second = x_NHF[..., :half], x_NHF[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
