"""The forward of a target over packed documents without padding, with as few passes over memory as possible.

transformers runs padded rows and many small kernels between the matrix products. Here the documents of a
batch stand one behind the other in one row of N tokens; attention and the linear-attention state respect
their borders; projections that read the same input are merged into one product; what stands between the
products is fused (see fused.py). It uses the very weights of the transformers model, whose own forward
stays usable beside it and is what the parity gate compares with.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_core.fused import Fused, rms_norm
from dflash_core.records import LAST_HIDDEN, CaptureSpec, Sample, tap_column
from dflash_core.target_fp8 import Fp8Product

MODEL_TYPES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
ROUND_TO = 128
"""The tokens of a batch are rounded up to a multiple of this, with a document of its own."""


class NotPackable(ValueError):
    """This model has a part that the packed forward does not know; the padded one runs it."""


def packed_batches(samples: Sequence[Sample], token_budget: int) -> Iterator[list[Sample]]:
    """Yield batches of about equal size and at most `token_budget` tokens, in the order of the samples.

    Documents of any lengths share a packed batch, so nothing is sorted and what is written in order need
    not be held back. A sample longer than the budget comes alone.
    """
    total = sum(sample.num_tokens for sample in samples)
    even = total / max(1, -(-total // token_budget))
    batch: list[Sample] = []
    size = 0
    for sample in samples:
        if batch and (size + sample.num_tokens > token_budget or size + sample.num_tokens / 2 > even):
            yield batch
            batch, size = [], 0
        batch.append(sample)
        size += sample.num_tokens
    if batch:
        yield batch


@dataclass(frozen=True)
class PackedBatch:
    """Documents one behind the other."""

    ids_N: Tensor
    """int64 token ids."""
    position_N: Tensor
    """int32 place of each token in its document."""
    bounds_B1: Tensor
    """int32 first token of each document, and N."""
    host_bounds_B1: Tensor
    """The same on the host: nothing then has to wait for the device."""
    bounds: list[int]
    """The same as numbers."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False))


def pack(samples: Sequence[Sample], device: torch.device) -> PackedBatch:
    """Put samples one behind the other; the rest up to a multiple of ROUND_TO is a document of zeros."""
    lengths = [sample.num_tokens for sample in samples]
    if rest := -sum(lengths) % ROUND_TO:
        lengths.append(rest)
    bounds = [0, *np.cumsum(lengths).tolist()]
    ids_N = np.zeros(bounds[-1], dtype=np.int64)
    for sample, start in zip(samples, bounds, strict=False):
        ids_N[start : start + sample.num_tokens] = sample.token_ids_T
    position_N = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    host_bounds_B1 = torch.tensor(bounds, dtype=torch.int32)
    return PackedBatch(
        ids_N=send(torch.from_numpy(ids_N), device),
        position_N=send(torch.from_numpy(position_N), device),
        bounds_B1=send(host_bounds_B1, device),
        host_bounds_B1=host_bounds_B1,
        bounds=bounds,
    )


def send(host: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for what runs there."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


Product = Callable[[Tensor], Tensor]
"""A linear map [N, X] -> [N, Y]."""
MakeProduct = Callable[[Sequence[nn.Linear]], Product]
"""One product of several linear layers with the same input, in the arithmetic of the capture."""


class PackedBody:
    """A transformers text body (embed_tokens, layers, norm, rotary_emb) that runs packed batches."""

    def __init__(self, model: Any, spec: CaptureSpec, *, compiled: bool) -> None:
        """Merge the projections in place (the modules keep views of them). Raise NotPackable."""
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if model.config.model_type not in MODEL_TYPES:
            raise NotPackable(f"model type {model.config.model_type!r} is not among {', '.join(MODEL_TYPES)}")
        if not kinds <= {"full_attention", "linear_attention"}:
            raise NotPackable(f"layers of the kinds {sorted(kinds)}")
        self.model, self.spec = model, spec
        self.fused = Fused(compiled=compiled)
        self._fp8 = spec.weights_dtype == "fp8"
        self.layers = [_Layer(layer, self.fused, self._product) for layer in model.layers]

    def _product(self, linears: Sequence[nn.Linear]) -> Product:
        merged = linears[0] if len(linears) == 1 else merge_linears(linears)
        return Fp8Product(merged, self.fused.quantise_rows) if self._fp8 else merged

    def forward(self, batch: PackedBatch) -> dict[str, Tensor]:
        """States [N, D] of every column of the capture spec."""
        states: dict[str, Tensor] = {}
        x_ND = self.model.embed_tokens(batch.ids_N)
        rope = self._rope(x_ND, batch)
        norm = self.layers[0].input_norm
        normed_ND = self.fused.rms_norm(x_ND, norm.weight_D, norm.eps, norm.offset)
        for i, layer in enumerate(self.layers):
            update_ND = layer.mix(normed_ND, batch, rope)
            norm = layer.mlp_norm
            x_ND, normed_ND = self.fused.add_rms_norm(x_ND, update_ND, norm.weight_D, norm.eps, norm.offset)
            update_ND = layer.mlp(normed_ND)
            if i + 1 < len(self.layers):
                norm = self.layers[i + 1].input_norm
                x_ND, normed_ND = self.fused.add_rms_norm(
                    x_ND, update_ND, norm.weight_D, norm.eps, norm.offset
                )
            else:
                x_ND = x_ND + update_ND
            if i in self.spec.tap_layer_ids:
                states[tap_column(i)] = x_ND
        if self.spec.last_hidden == "before_final_norm":
            states[LAST_HIDDEN] = x_ND
        elif self.spec.last_hidden == "after_final_norm":
            states[LAST_HIDDEN] = self.model.norm(x_ND)
        return states

    def _rope(self, x_ND: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        position_1N = batch.position_N[None].long()
        rotary = self.model.rotary_emb
        if hasattr(rotary, "mrope_section"):
            # Text has the same place in time, height and width.
            position_1N = position_1N[None].expand(3, -1, -1)
        cos, sin = rotary(x_ND[None], position_1N)
        return cos[0], sin[0]


class _Norm:
    """Weight, eps and offset of an RMS norm module; the offset is found by trying the module."""

    def __init__(self, module: nn.Module) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if eps is None:
            raise NotPackable(f"{type(module).__name__} has no eps")
        self.weight_D, self.eps = weight, float(eps)
        probe_1D = torch.linspace(-2, 3, len(weight), device=weight.device, dtype=weight.dtype)[None]
        expected_1D = module(probe_1D).float()
        for offset in (0.0, 1.0):
            found_1D = rms_norm(probe_1D, weight, self.eps, offset).float()
            if torch.allclose(found_1D, expected_1D, rtol=2e-2, atol=1e-3):
                self.offset = offset
                return
        raise NotPackable(f"{type(module).__name__} is no RMS norm")


class _Layer:
    """One decoder layer: norms, token mixer, MLP."""

    def __init__(self, layer: Any, fused: Fused, product: MakeProduct) -> None:
        self.input_norm, self.mlp_norm = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        if hasattr(layer, "linear_attn"):
            self.mix: Callable[..., Tensor] = _DeltaNet(layer.linear_attn, fused, product)
        else:
            self.mix = _Attention(layer.self_attn, fused, product)
        dense = all(hasattr(layer.mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
        dense = dense and not isinstance(layer.mlp.gate_proj, nn.Parameter)
        self.mlp: Callable[[Tensor], Tensor] = (
            _Mlp(layer.mlp, fused, product) if dense else _experts(layer.mlp)
        )


class _Attention:
    """Causal attention inside each document; head norms, partial rotary and output gate where present."""

    def __init__(self, module: Any, fused: Fused, product: MakeProduct) -> None:
        self.fused = fused
        width = module.head_dim
        key_heads = module.k_proj.out_features // width
        query_heads = module.o_proj.in_features // width
        gated = module.q_proj.out_features == 2 * query_heads * width
        self.heads = (query_heads, key_heads, width, gated)
        self.scale = float(module.scaling)
        self.project = product([module.q_proj, module.k_proj, module.v_proj])
        self.output = product([module.o_proj])
        self.norms: tuple[Tensor | None, Tensor | None, float, float] = (None, None, 0.0, 0.0)
        if hasattr(module, "q_norm"):
            q_norm, k_norm = _Norm(module.q_norm), _Norm(module.k_norm)
            if len(q_norm.weight_D) != width or q_norm.offset != k_norm.offset:
                raise NotPackable("norms of queries and keys that are not per head")
            self.norms = (q_norm.weight_D, k_norm.weight_D, q_norm.eps, q_norm.offset)

    def __call__(self, x_ND: Tensor, batch: PackedBatch, rope: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v, gate = self.fused.attention_inputs(self.project(x_ND), self.heads, self.norms, *rope)
        mixed_NX = documents_attention(q, k, v, batch, self.scale).reshape(len(x_ND), -1)
        if gate is not None:
            mixed_NX = self.fused.gate_output(mixed_NX, gate)
        return self.output(mixed_NX)


class _DeltaNet:
    """Gated delta net whose state and convolution start anew with each document."""

    def __init__(self, module: Any, fused: Fused, product: MakeProduct) -> None:
        self.fused = fused
        self.shape = (module.num_k_heads, module.head_k_dim, module.num_v_heads, module.head_v_dim)
        self.conv_CW = module.conv1d.weight.squeeze(1)
        self.project = product([module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a])
        self.z_start = module.in_proj_qkv.out_features
        self.b_start = self.z_start + module.in_proj_z.out_features
        self.decay = (module.A_log, module.dt_bias)
        self.norm_weight, self.norm_eps = module.norm.weight, float(module.layer_norm_epsilon)
        self.output = product([module.out_proj])
        if module.activation != "silu" or module.conv1d.bias is not None:
            raise NotPackable("a gated delta net with another convolution")

    def __call__(self, x_ND: Tensor, batch: PackedBatch, rope: tuple[Tensor, Tensor]) -> Tensor:
        projected_NX = self.project(x_ND)
        # The kernel of flash-linear-attention takes rounded q and k, the reference computes in float32.
        unit_dtype = x_ND.dtype if has_delta_kernel(x_ND) else torch.float32
        q, k, v = self.fused.delta_inputs(
            projected_NX, self.conv_CW, batch.position_N, self.shape, unit_dtype
        )
        g, beta = self.fused.decay_and_rate(projected_NX, self.b_start, self.shape[2], *self.decay)
        mixed_NHd = documents_delta_rule(q, k, v, g, beta, batch)
        normed_NX = self.fused.gated_rms_norm(
            mixed_NHd, projected_NX, self.z_start, self.norm_weight, self.norm_eps
        )
        return self.output(normed_NX)


class _Mlp:
    """SwiGLU with gate and up as one product."""

    def __init__(self, module: Any, fused: Fused, product: MakeProduct) -> None:
        if getattr(module.config, "hidden_act", "silu") != "silu":
            raise NotPackable("an MLP that is not SwiGLU")
        self.fused = fused
        self.gate_up = product([module.gate_proj, module.up_proj])
        self.down = product([module.down_proj])

    def __call__(self, x_ND: Tensor) -> Tensor:
        return self.down(self.fused.swiglu(self.gate_up(x_ND)))


def _experts(module: Any) -> Callable[[Tensor], Tensor]:
    """Mixtures of experts run through their own module."""

    def run(x_ND: Tensor) -> Tensor:
        output = module(x_ND[None])
        return (output[0] if isinstance(output, tuple) else output).reshape(x_ND.shape)

    return run


def merge_linears(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One linear layer that computes several of the same input; the old ones become views of its weight."""
    merged = nn.Linear(1, 1, bias=False)
    merged.weight = nn.Parameter(_joined([part.weight.data for part in linears]), requires_grad=False)
    biases: list[Any] = [part.bias for part in linears]
    if any(bias is not None for bias in biases):
        if any(bias is None for bias in biases):
            raise NotPackable("projections with and without bias beside each other")
        merged.bias = nn.Parameter(_joined([bias.data for bias in biases]), requires_grad=False)
    merged.in_features, merged.out_features = linears[0].in_features, len(merged.weight)
    start = 0
    for part in linears:
        stop = start + part.out_features
        part.weight.data = merged.weight.data[start:stop]
        if part.bias is not None:
            part.bias.data = merged.bias.data[start:stop]
        start = stop
    return merged


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The tensors one below the other; without a copy where they lie so in memory already (merged before)."""
    first, following = parts[0], parts[0].data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and part.is_contiguous() and part.data_ptr() == following):
            return torch.cat(list(parts))
        following += part.numel() * part.element_size()
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())


def documents_attention(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, scale: float) -> Tensor:
    """Causal attention inside each document: q [N, Hq, d], k, v [N, Hk, d] -> [N, Hq, d]."""
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        bounds, longest = batch.bounds_B1, batch.longest
        return torch.ops.aten._flash_attention_forward(
            q, k, v, bounds, bounds, longest, longest, 0.0, True, False, scale=scale
        )[0]
    output = torch.empty_like(q)
    for start, stop in zip(batch.bounds, batch.bounds[1:], strict=False):
        q_1HTd, k_1HTd, v_1HTd = (part[start:stop].transpose(0, 1)[None] for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(
            q_1HTd, k_1HTd, v_1HTd, is_causal=True, scale=scale, enable_gqa=True
        )
        output[start:stop] = mixed[0].transpose(0, 1)
    return output


def has_delta_kernel(x: Tensor) -> bool:
    """Whether flash-linear-attention can run on the device of `x`."""
    return x.is_cuda and importlib.util.find_spec("fla") is not None


def documents_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, batch: PackedBatch
) -> Tensor:
    """Gated delta rule inside each document: q, k [N, Hk, dk], v [N, Hv, dv], g, beta [N, Hv] -> [N, Hv, dv].

    q and k have unit length. With flash-linear-attention on a GPU one call runs all documents; otherwise
    transformers' reference implementation runs them one by one.
    """
    if has_delta_kernel(q):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        inputs = [part[None] for part in (q, k, v, g, beta)]
        bounds = {"cu_seqlens": batch.bounds_B1, "cu_seqlens_cpu": batch.host_bounds_B1}
        return chunk_gated_delta_rule(*inputs, **bounds)[0][0]
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    # Not every version of the reference shares a key head among several value heads by itself.
    q, k = (part.repeat_interleave(v.shape[1] // part.shape[1], dim=1) for part in (q, k))
    outputs = []
    for start, stop in zip(batch.bounds, batch.bounds[1:], strict=False):
        inputs = [part[None, start:stop] for part in (q, k, v)]
        gates = {"g": g[None, start:stop], "beta": beta[None, start:stop]}
        outputs.append(torch_chunk_gated_delta_rule(*inputs, **gates)[0][0])
    return torch.cat(outputs).to(v.dtype)
