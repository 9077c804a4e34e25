"""Parts of the packed forward: merged projections, bounds of documents, arithmetic between the products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dflash_core import fused
from dflash_core.packed_body import ROUND_TO, NotPackable, documents_attention, merge_linears, pack
from tests.core.tiny_targets import random_samples

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [False, True])
def test_merged_projections_compute_the_same_and_share_their_memory(bias: bool) -> None:
    parts = [nn.Linear(8, size, bias=bias) for size in (6, 4, 2)]
    x_NX = torch.randn(5, 8)
    expected = torch.cat([part(x_NX) for part in parts], dim=1)
    merged = merge_linears(parts)
    torch.testing.assert_close(merged(x_NX), expected)
    torch.testing.assert_close(torch.cat([part(x_NX) for part in parts], dim=1), expected)
    again = merge_linears(parts)
    assert again.weight.data_ptr() == merged.weight.data_ptr(), "merging again copies nothing"
    torch.testing.assert_close(again(x_NX), expected)
    merged.weight.data[0] = 0
    assert not parts[0].weight[0].any()
    with pytest.raises(NotPackable):
        merge_linears([nn.Linear(8, 2, bias=True), nn.Linear(8, 2, bias=False)])


def test_packing_puts_documents_behind_each_other() -> None:
    samples = random_samples((3, 1, 7))
    batch = pack(samples, CPU)
    assert batch.bounds == [0, 3, 4, 11, ROUND_TO] and batch.longest == ROUND_TO - 11
    assert batch.bounds_B1.tolist() == batch.host_bounds_B1.tolist() == batch.bounds
    for sample, start in zip(samples, batch.bounds, strict=False):
        stop = start + sample.num_tokens
        assert batch.ids_N[start:stop].tolist() == sample.token_ids_T.tolist()
        assert batch.position_N[start:stop].tolist() == list(range(sample.num_tokens))
    assert not batch.ids_N[11:].any()
    assert pack(random_samples((ROUND_TO,)), CPU).bounds == [0, ROUND_TO]


def test_attention_stays_in_its_document() -> None:
    batch = pack(random_samples((5, 9)), CPU)
    tokens = batch.bounds[-1]
    q, k, v = torch.randn(tokens, 4, 8), torch.randn(tokens, 2, 8), torch.randn(tokens, 2, 8)
    found = documents_attention(q, k, v, batch, 0.3)
    document = torch.repeat_interleave(
        torch.arange(len(batch.bounds) - 1), torch.diff(torch.tensor(batch.bounds))
    )
    mask = (document[:, None] == document) & torch.ones(tokens, tokens).tril().bool()
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) * 0.3
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    torch.testing.assert_close(found, torch.einsum("hnm,mhd->nhd", weights, v), rtol=1e-4, atol=1e-5)


def test_the_convolution_is_a_causal_one_that_starts_anew_with_each_document() -> None:
    key_heads, key_width, value_heads, value_width, taps = 1, 4, 2, 3, 4
    channels = 2 * key_heads * key_width + value_heads * value_width
    batch = pack(random_samples((6, 2, 5)), CPU)
    projected, weight = torch.randn(batch.bounds[-1], channels + 5), torch.randn(channels, taps)
    shape = (key_heads, key_width, value_heads, value_width)
    q, k, v = fused.delta_inputs(projected, weight, batch.position_N, shape, torch.float32)
    for start, stop in zip(batch.bounds, batch.bounds[1:], strict=False):
        x = projected[start:stop, :channels].T[None]
        convolved = F.conv1d(F.pad(x, (taps - 1, 0)), weight[:, None], groups=channels)[0].T
        mixed = F.silu(convolved)
        q_part, k_part = F.normalize(mixed[:, :4], dim=-1), F.normalize(mixed[:, 4:8], dim=-1)
        torch.testing.assert_close(q[start:stop, 0], q_part, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(k[start:stop, 0], k_part, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(v[start:stop].flatten(1), mixed[:, 8:], rtol=1e-4, atol=1e-5)


def test_rotation_leaves_the_channels_behind_it_alone() -> None:
    x, angle = torch.randn(3, 2, 8), torch.randn(3, 2)
    cos, sin = (torch.cat((part, part), dim=-1) for part in (angle.cos(), angle.sin()))
    turned = fused.rotate(x, cos, sin)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    pairs = torch.complex(x[..., :2], x[..., 2:4]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    torch.testing.assert_close(turned[..., :2], pairs.real)
    torch.testing.assert_close(turned[..., 2:4], pairs.imag)
