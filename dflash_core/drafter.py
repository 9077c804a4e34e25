"""The drafter: Qwen3-style layers that read the target's taps and fill all slots of a block in one forward.

Its arithmetic is in `dflash_core.draft_layers` (letters are explained there). The modules here only hold the
float32 master weights, under the names that the exported folder has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from dflash_core.configuration import Config, UserError
from dflash_core.draft_layers import (
    Context,
    LayerShape,
    LayerWeights,
    context_keys_values,
    draft_layer,
    final_norm,
    first_draft_layer,
    first_recomputed,
    last_draft_layer,
    last_recomputed,
    recomputed,
    rotary_tables,
    without_anchors,
)
from dflash_core.records import TAP_CONVENTION

LayerType = Literal["full_attention", "sliding_attention"]


class DrafterConfig(Config):
    """Shape of a drafter and the target that it belongs to. Every field is part of its identity."""

    hidden_size: int
    """Width D; equals the target's, whose embedding and head the drafter borrows."""
    intermediate_size: int
    num_layers: int = 5
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float
    """The target's theta; nothing else of its rotary settings is used."""
    vocab_size: int
    """Rows of the target's embedding (padded vocabulary)."""
    block_size: int
    """Slots K of a block, the anchor's included."""
    mask_token_id: int
    """Token whose embedding fills slots 1..K-1."""
    tap_layer_ids: tuple[int, ...]
    """Target layers whose outputs are read, in the order in which `fc` sees them."""
    tap_convention: str = TAP_CONVENTION
    target_num_layers: int
    layer_types: tuple[LayerType, ...] | None = None
    """One entry a draft layer; None: all full. In-block attention is causal in sliding layers, bidirectional
    in full ones.
    """
    sliding_window: int | None = None
    """Tokens that a slot of a sliding layer sees, itself included: positions p-window+1 .. p."""

    @model_validator(mode="after")
    def _check(self) -> DrafterConfig:
        types = self.types
        if len(types) != self.num_layers:
            raise UserError(
                f"drafter.layer_types has {len(types)} entries for {self.num_layers} layers; name one a layer"
            )
        if "sliding_attention" in types and not self.sliding_window:
            raise UserError(
                "drafter.sliding_window is missing although layer_types has sliding layers; set e.g. 2048"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"drafter.num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.block_size < 2:
            raise UserError(
                f"drafter.block_size {self.block_size}: a block needs at least one slot to draft (2)"
            )
        if self.tap_convention != TAP_CONVENTION:
            raise UserError(
                f"tap_convention {self.tap_convention!r} is not ours ({TAP_CONVENTION!r}); convert the ids"
            )
        if not self.tap_layer_ids or not all(0 <= i < self.target_num_layers for i in self.tap_layer_ids):
            raise UserError(
                f"drafter.tap_layer_ids {self.tap_layer_ids}: "
                f"the target's layers are 0..{self.target_num_layers - 1}"
            )
        if list(self.tap_layer_ids) != sorted(set(self.tap_layer_ids)):
            raise UserError(
                f"drafter.tap_layer_ids {self.tap_layer_ids}: name different layers in ascending order, "
                "the order in which engines capture them"
            )
        if self.head_dim % 2:
            raise UserError(f"drafter.head_dim {self.head_dim} is odd; rotation needs pairs of features")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(
                f"drafter.mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}"
            )
        return self

    @property
    def types(self) -> tuple[LayerType, ...]:
        """Layer types with the default filled in."""
        full: LayerType = "full_attention"
        return self.layer_types or (full,) * self.num_layers

    def window_of(self, layer: int) -> int | None:
        """Return the window of draft layer `layer`, None when it sees everything."""
        return self.sliding_window if self.types[layer] == "sliding_attention" else None


class _Attention(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.k_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)


class _FeedForward(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)


class DraftLayer(nn.Module):
    """Holds the weights of one draft layer; the arithmetic is `draft_layer`."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(c)
        self.mlp = _FeedForward(c)
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def weights(self) -> LayerWeights:
        """Return the parameters in the order in which the arithmetic names them."""
        attention, mlp = self.self_attn, self.mlp
        return LayerWeights(
            input_layernorm=self.input_layernorm.weight,
            q_proj=attention.q_proj.weight,
            k_proj=attention.k_proj.weight,
            v_proj=attention.v_proj.weight,
            q_norm=attention.q_norm.weight,
            k_norm=attention.k_norm.weight,
            o_proj=attention.o_proj.weight,
            post_attention_layernorm=self.post_attention_layernorm.weight,
            gate_proj=mlp.gate_proj.weight,
            up_proj=mlp.up_proj.weight,
            down_proj=mlp.down_proj.weight,
        )


@dataclass
class ContextCache:
    """Inference: keys and values of the committed context, one growing buffer a layer. Filled by
    `Drafter.extend`.
    """

    length: int = 0
    """Context tokens held: positions 0 .. length-1."""
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def append(self, more: Context) -> None:
        """Add tokens at the end; buffers grow by doubling."""
        added = more.keys[0].shape[0]
        needed = self.length + added
        for buffers, news in ((self.keys, more.keys), (self.values, more.values)):
            for i, new in enumerate(news):
                if len(buffers) <= i:
                    buffers.append(new.new_empty((max(64, needed), *new.shape[1:])))
                elif buffers[i].shape[0] < needed:
                    grown = new.new_empty((max(needed, 2 * buffers[i].shape[0]), *new.shape[1:]))
                    grown[: self.length] = buffers[i][: self.length]
                    buffers[i] = grown
                buffers[i][self.length : needed] = new
        self.length = needed


class Drafter(nn.Module):
    """fc, hidden_norm, draft layers and norm; embedding and head are the target's and are passed in, never
    held.

    `state_dict()` has exactly the tensors of an exported folder. Parameters are float32 masters when
    training; `compute_dtype` is the type of products and activations.
    """

    def __init__(self, config: DrafterConfig, compute_dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.fp8 = False
        """Compute the products of the layers in fp8 when training; see `dflash_core.fp8`."""
        taps = len(config.tap_layer_ids)
        self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DraftLayer(config) for _ in range(config.num_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._context: Callable[..., Context] = context_keys_values
        self._first_layer: Callable[..., Tensor] = first_draft_layer
        self._layer: Callable[..., Tensor] = draft_layer
        self._last_layer: Callable[..., Tensor] = last_draft_layer
        self._final: Callable[..., Tensor] = final_norm

    def init_weights(self, seed: int, std: float = 0.02) -> None:
        """Draw all matrices from a normal distribution, in a fixed order, on the device where they are.

        A seed gives the same weights on devices of the same kind.
        """
        device = self.norm.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        for parameter in self.parameters():
            with torch.no_grad():
                if parameter.ndim == 1:
                    parameter.fill_(1.0)
                else:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator, device=device) * std)

    def compile_regions(self, *, checkpoint_layers: bool = False) -> None:
        """Compile the regions of the forward: the context, the first layer, one graph for all other layers,
        the norm.

        Shapes are static (dynamic=False) and a graph break is an error (fullgraph=True), so flex attention
        can never fall back to its unfused eager form unnoticed.
        """
        if checkpoint_layers:
            self.checkpoint_layers()
        compiled = partial(torch.compile, dynamic=False, fullgraph=True)
        self._context = compiled(self._context)
        self._first_layer = compiled(self._first_layer)
        self._layer = compiled(self._layer)
        self._last_layer = compiled(self._last_layer)
        self._final = compiled(self._final)

    def checkpoint_layers(self) -> None:
        """Recompute the layers in backward: less memory, more time. Before `compile_regions`."""
        self._first_layer, self._layer, self._last_layer = first_recomputed, recomputed, last_recomputed

    def layer_weights(self) -> tuple[LayerWeights, ...]:
        """Return the weights of all draft layers, first layer first."""
        return tuple(cast(DraftLayer, layer).weights() for layer in self.layers)

    @property
    def shape(self) -> LayerShape:
        """Constants of the arithmetic."""
        c = self.config
        return LayerShape(
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            eps=c.rms_norm_eps,
            dtype=self.compute_dtype,
            fp8=self.fp8,
        )

    def context(self, taps_CE: Tensor, position_C: Tensor) -> Context:
        """Return each layer's keys and values of context tokens at these positions of their documents.

        `taps_CE` [C, L*D] holds the taps concatenated in the order of `tap_layer_ids`; rows without a token
        must be finite.
        """
        c = self.config
        cos_CF, sin_CF = rotary_tables(position_C, c.rope_theta, c.head_dim)
        weights = self.layer_weights()
        return self._context(
            taps_CE, self.fc.weight, self.hidden_norm.weight, weights, cos_CF, sin_CF, self.shape
        )

    def forward(
        self,
        taps_CE: Tensor,
        position_C: Tensor,
        input_QD: Tensor,
        position_Q: Tensor,
        masks: Mapping[LayerType, BlockMask | Tensor],
    ) -> Tensor:
        """One packed row and any slots to final hidden states [Q, D], ready for the target's head.

        `input_QD` are the slots' embeddings, `position_Q` their positions in their documents, `masks` one
        attention mask a kind of layer (see `dflash_core.mask`). Training uses `forward_blocks`, which knows
        more about its slots.
        """
        context = self.context(taps_CE, position_C)
        c = self.config
        turns = rotary_tables(position_Q, c.rope_theta, c.head_dim)
        x_QD = input_QD.to(self.compute_dtype)
        for i, weights in enumerate(self.layer_weights()):
            keys, values, mask = context.keys[i], context.values[i], masks[c.types[i]]
            x_QD = self._layer(x_QD, keys, values, weights, *turns, mask, self.shape)
        return self._final(x_QD, self.norm.weight, c.rms_norm_eps, self.compute_dtype)

    def forward_blocks(
        self,
        taps_CE: Tensor,
        position_C: Tensor,
        rows_RD: Tensor,
        position_Q: Tensor,
        masks: Mapping[LayerType, BlockMask | Tensor],
        last_mask: BlockMask | Tensor,
    ) -> Tensor:
        """As `forward` for whole blocks, given the embeddings [A + 1, D] of the A anchors and of the mask
        token.

        `last_mask` has the P queries of the last layer: slots 1..K-1 of all blocks, then padding. Returns [P,
        D].
        """
        context = self.context(taps_CE, position_C)
        return self.block_slots(context, rows_RD, position_Q, masks, last_mask)

    def block_slots(
        self,
        context: Context,
        rows_RD: Tensor,
        position_Q: Tensor,
        masks: Mapping[LayerType, BlockMask | Tensor],
        last_mask: BlockMask | Tensor,
    ) -> Tensor:
        """The layers and the last norm over blocks, given the context's keys and values."""
        c, shape, weights = self.config, self.shape, self.layer_weights()
        turns = rotary_tables(position_Q, c.rope_theta, c.head_dim)
        slots, last = c.block_size, c.num_layers - 1
        where = [(context.keys[i], context.values[i], weights[i], *turns) for i in range(c.num_layers)]
        x_QD = self._first_layer(rows_RD.to(shape.dtype), *where[0], masks[c.types[0]], shape, slots)
        for i in range(1, last):
            x_QD = self._layer(x_QD, *where[i], masks[c.types[i]], shape)
        if last > 0:
            x_PD = self._last_layer(x_QD, *where[last], last_mask, shape, slots)
        else:
            queries = last_mask.seq_lengths[0] if isinstance(last_mask, BlockMask) else last_mask.shape[0]
            x_PD = without_anchors(x_QD, slots, queries)
        return self._final(x_PD, self.norm.weight, c.rms_norm_eps, self.compute_dtype)

    @torch.no_grad()
    def extend(self, cache: ContextCache, taps_TE: Tensor) -> None:
        """Inference: append the taps of the next T committed tokens to the context (positions follow on)."""
        position_T = torch.arange(cache.length, cache.length + taps_TE.shape[0], device=taps_TE.device)
        c = self.config
        cos_TF, sin_TF = rotary_tables(position_T, c.rope_theta, c.head_dim)
        weights = self.layer_weights()
        cache.append(
            context_keys_values(
                taps_TE, self.fc.weight, self.hidden_norm.weight, weights, cos_TF, sin_TF, self.shape
            )
        )

    @torch.no_grad()
    def draft(self, cache: ContextCache, input_KD: Tensor) -> Tensor:
        """Inference: final hidden states [K, D] of one block whose anchor has position `cache.length`.

        `input_KD` are the target's embeddings of [last committed token, MASK, ...]; fewer than block_size
        slots are allowed. The context holds the tokens before the anchor. The cache is not changed: the
        block's own keys are thrown away.
        """
        c, shape = self.config, self.shape._replace(fp8=False)
        slots = input_KD.shape[0]
        position_K = torch.arange(cache.length, cache.length + slots, device=input_KD.device)
        cos_KF, sin_KF = rotary_tables(position_K, c.rope_theta, c.head_dim)
        x_KD = input_KD.to(self.compute_dtype)
        for i, weights in enumerate(self.layer_weights()):
            window = c.window_of(i)
            mask = None if window is None else _sliding_mask(cache.length, position_K, window)
            keys, values = cache.keys[i][: cache.length], cache.values[i][: cache.length]
            x_KD = draft_layer(x_KD, keys, values, weights, cos_KF, sin_KF, mask, shape)
        return final_norm(x_KD, self.norm.weight, c.rms_norm_eps, self.compute_dtype)


def _sliding_mask(length: int, position_K: Tensor, window: int) -> Tensor:
    """Bool [K, length + K]: causal inside the block, and no further back than the window of each slot."""
    key_position_S = torch.arange(length + position_K.shape[0], device=position_K.device)
    distance_KS = position_K[:, None] - key_position_S[None, :]
    return (distance_KS >= 0) & (distance_KS < window)
