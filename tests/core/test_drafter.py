"""The drafter, against its own inference form and against a plain layer written out with transformers'
parts.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from dflash_core.blocks import build_blocks
from dflash_core.draft_layers import repeat_mask_row, rotary_tables, rotate
from dflash_core.drafter import ContextCache
from dflash_core.packing import pack_tokens
from tests.core.tiny_drafter import tiny_config
from tests.core.training_rows import make_row, random_samples, taps_of, tiny_trainer


def _blocks_of(samples, config, epoch=0):
    return build_blocks(
        pack_tokens(samples, 64),
        anchors=12,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        seed=0,
        epoch=epoch,
    )


@pytest.mark.parametrize("types", ["full", "mixed", "sliding", "one", "two"])
@pytest.mark.parametrize("lengths", [[20, 1, 25, 2], [64]])
def test_training_forward_equals_inference_with_cache(types: str, lengths: list[int]) -> None:
    kinds = {
        "full": ("full_attention",) * 3,
        "sliding": ("sliding_attention",) * 3,
        "mixed": ("sliding_attention", "sliding_attention", "full_attention"),
        "one": ("full_attention",),
        "two": ("full_attention", "sliding_attention"),
    }
    shape = {"layer_types": kinds[types], "num_layers": len(kinds[types])}
    trainer = tiny_trainer(drafter_changes=shape)
    drafter, config = trainer.drafter, trainer.drafter.config
    samples = random_samples(lengths)
    row = make_row(samples, config)
    blocks = _blocks_of(samples, config)
    rows_RD = F.embedding(row.batch.input_ids_R, trainer._embedding_VD)
    input_QD = repeat_mask_row(rows_RD, config.block_size)
    where = (row.taps_CE, row.batch.position_C)
    masks, last_mask = row.batch.attention_masks()
    with torch.no_grad():
        hidden_QD = drafter(*where, input_QD, row.batch.position_Q, masks)
        hidden_PD = drafter.forward_blocks(*where, rows_RD, row.batch.position_Q, masks, last_mask)
    kept = hidden_QD.view(12, config.block_size, -1)[:, 1:].flatten(0, 1)
    torch.testing.assert_close(hidden_PD, kept, rtol=1e-5, atol=1e-5)
    compared = 0
    packed = pack_tokens(samples, 64)
    for a in range(12):
        if not blocks.valid_A[a]:
            continue
        document = int(packed.document_C[blocks.anchor_A[a]])
        taps = taps_of(samples[document], row.taps_CE.shape[1] + config.hidden_size)
        before = int(blocks.anchor_A[a] - blocks.document_start_A[a])
        cache = ContextCache()
        drafter.extend(cache, taps[: before // 2, : row.taps_CE.shape[1]])
        drafter.extend(cache, taps[before // 2 : before, : row.taps_CE.shape[1]])
        assert cache.length == before
        span = slice(a * config.block_size, (a + 1) * config.block_size)
        torch.testing.assert_close(
            drafter.draft(cache, input_QD[span]), hidden_QD[span], rtol=1e-4, atol=1e-4
        )
        compared += 1
    assert compared >= 10


def test_layer_equals_transformers_qwen3() -> None:
    """One block behind its context is a plain Qwen3 layer whose queries are the last K rows, without a causal
    mask.
    """
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, apply_rotary_pos_emb

    trainer = tiny_trainer(drafter_changes={"num_layers": 1, "layer_types": None})
    drafter, c = trainer.drafter, trainer.drafter.config
    w = drafter.layer_weights()[0]
    torch.manual_seed(0)
    t, k = 11, c.block_size
    taps, x = torch.randn(t, 2 * c.hidden_size), torch.randn(k, c.hidden_size)
    cache = ContextCache()
    drafter.extend(cache, taps)
    ours = drafter.draft(cache, x)

    def norm(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        module = Qwen3RMSNorm(len(weight), c.rms_norm_eps)
        module.weight = torch.nn.Parameter(weight.detach())
        return module(value)

    context = norm(taps @ drafter.fc.weight.T, drafter.hidden_norm.weight)
    normed = norm(x, w.input_layernorm)
    both = torch.cat((context, normed))
    query = norm((normed @ w.q_proj.T).view(1, k, c.num_heads, c.head_dim), w.q_norm).transpose(1, 2)
    key = norm((both @ w.k_proj.T).view(1, t + k, c.num_kv_heads, c.head_dim), w.k_norm).transpose(1, 2)
    value = (both @ w.v_proj.T).view(1, t + k, c.num_kv_heads, c.head_dim).transpose(1, 2)
    inverse = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2) / c.head_dim)
    angle = torch.cat([torch.arange(t + k)[:, None] * inverse] * 2, dim=-1)[None]
    _, key = apply_rotary_pos_emb(key, key, angle.cos(), angle.sin())
    query, _ = apply_rotary_pos_emb(query, query, angle[:, t:].cos(), angle[:, t:].sin())
    attended = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    x = x + attended.transpose(1, 2).reshape(k, -1) @ w.o_proj.T
    mlp = Qwen3MLP(Qwen3Config(hidden_size=c.hidden_size, intermediate_size=c.intermediate_size))
    mlp.load_state_dict(
        {f"{n}.weight": getattr(w, n).detach() for n in ("gate_proj", "up_proj", "down_proj")}
    )
    x = x + mlp(norm(x, w.post_attention_layernorm))
    torch.testing.assert_close(ours, norm(x, drafter.norm.weight), rtol=1e-4, atol=1e-5)


def test_casting_the_module_does_not_round_the_rotation() -> None:
    trainer = tiny_trainer()
    before = rotary_tables(torch.tensor([30000]), 1e6, 128)
    trainer.drafter.to(torch.bfloat16)
    assert not list(trainer.drafter.buffers())
    assert torch.equal(before[0], rotary_tables(torch.tensor([30000]), 1e6, 128)[0])


def test_rotation_depends_on_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def score(i: int, j: int) -> torch.Tensor:
        at = [rotary_tables(torch.tensor([p]), 100.0, 8) for p in (i, j)]
        return (rotate(q, *at[0]) * rotate(k, *at[1])).sum()

    torch.testing.assert_close(score(9, 4), score(25, 20))
    assert not torch.allclose(score(9, 4), score(9, 5))


def test_parameter_count_of_the_released_27b_drafter() -> None:
    from dflash_core.drafter import Drafter, DrafterConfig

    config = DrafterConfig(
        hidden_size=5120,
        intermediate_size=17408,
        num_heads=32,
        num_kv_heads=8,
        rope_theta=1e7,
        vocab_size=248320,
        block_size=16,
        mask_token_id=248070,
        tap_layer_ids=(1, 16, 31, 46, 61),
        target_num_layers=64,
    )
    with torch.device("meta"):
        drafter = Drafter(config)
    assert len(drafter.state_dict()) == 58
    assert sum(p.numel() for p in drafter.parameters()) == 1_730_213_120


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"layer_types": ("full_attention",)}, "layer_types has 1 entries"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"num_kv_heads": 3}, "not a multiple"),
        ({"block_size": 1}, "at least one slot"),
        ({"tap_layer_ids": (8,)}, "tap_layer_ids"),
        ({"mask_token_id": 96}, "outside the vocabulary"),
        ({"tap_convention": "layer id i is hidden_states[i]"}, "tap_convention"),
    ],
)
def test_wrong_shapes_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        tiny_config(**wrong)
