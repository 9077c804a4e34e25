"""On a GPU, other kernels serve one token than a block: texts stay equal, or leave each other at a tie."""

from __future__ import annotations

import pytest
import torch

from dflash_core.acceptance import first_difference, leading_matches, stats_of
from dflash_core.cached_target import CachedTarget
from dflash_core.speculative import DrafterProposer, greedy_generate, speculative_generate
from tests.core.test_acceptance import PROMPT, overfitted
from tests.core.test_speculative import KINDS, Oracle, build
from tests.core.tiny_drafter import tiny_drafter

pytestmark = pytest.mark.gpu


class OracleOnGpu(Oracle):
    """Goes on with its own text where decoding has left it at a tie."""

    def propose(self, anchor_id: torch.Tensor) -> torch.Tensor:
        return self.drafts().to(anchor_id.device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_texts_are_equal_up_to_ties(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    target = CachedTarget(build(kind).to("cuda", dtype), (0, 2))
    plain = greedy_generate(target, PROMPT, max_new_tokens=120)
    long = greedy_generate(target, PROMPT, max_new_tokens=140).token_ids
    oracle = OracleOnGpu(PROMPT, long, 8, 0.3)
    drafted = speculative_generate(target, oracle, PROMPT, max_new_tokens=120)
    difference = first_difference(plain, drafted, tolerance=tolerance)
    assert difference is None or difference.tie


@pytest.mark.parametrize("kind", ["qwen3", "qwen3.5"])
def test_an_overfitted_drafter_earns_whole_blocks(kind: str) -> None:
    model, drafter, text = overfitted(kind, "cuda")
    target = CachedTarget(model, drafter.config.tap_layer_ids)
    drafted = speculative_generate(target, DrafterProposer(drafter, target), PROMPT, max_new_tokens=20)
    target.close()
    assert PROMPT + drafted.token_ids == text[: len(PROMPT) + 20]
    assert stats_of([drafted], 5).acceptance_length == 5


def test_simulation_on_the_gpu_equals_that_on_the_cpu() -> None:
    drafter = tiny_drafter()
    drafter.compute_dtype = torch.float32
    chance = torch.Generator().manual_seed(0)
    taps_TE = torch.randn(200, 64, generator=chance)
    ids_T = torch.randint(0, 90, (200,), generator=chance)
    mask_T = torch.arange(200) > 20
    embedding, head = torch.randn(96, 32, generator=chance), torch.randn(96, 32, generator=chance)
    cpu = leading_matches(drafter, taps_TE, ids_T, mask_T, embedding, head)
    moved = [t.cuda() for t in (taps_TE, ids_T, mask_T, embedding, head)]
    gpu = leading_matches(drafter.cuda(), *moved)
    assert (cpu == gpu).all()
