"""Several GPUs, gradients summed by NCCL while backward runs: the same steps as one GPU with all rows.

python -m pytest tests/gpu/test_ranks_gpu.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from dflash_core.distributed import join_world, leave_world
from tests.gpu.test_trainer_gpu import ROWS, row_on, trainer_on
from tests.spawned_ranks import results_of_ranks

pytestmark = pytest.mark.gpu

STEPS = 3


def take_steps(trainer: Any, rank: int, size: int) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of each step over this rank's share of the rows."""
    rows = [row_on("cuda", trainer, lengths) for lengths in ROWS.values()][rank::size]
    losses, norms = [], []
    for _ in range(STEPS):
        trainer.step(rows, len(rows))
        summary, norm = trainer.summary()
        losses.append(summary.loss)
        norms.append(norm)
    return losses, norms


def _rank(rank: int, size: int, port: int, results: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world = join_world("cuda")
    trainer = trainer_on("cuda", "bfloat16", world=world)
    found = take_steps(trainer, rank, size)
    results.put((*found, {n: p.detach().cpu().numpy() for n, p in trainer.drafter.named_parameters()}))
    leave_world(world)


def test_two_gpus_equal_one_with_all_rows() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = results_of_ranks(_rank, 2, timeout=200)
    losses, norms = take_steps(trainer_on("cuda", "bfloat16"), 0, 1)
    for rank_losses, rank_norms, _ in found:
        assert rank_losses == pytest.approx(losses, rel=1e-2)
        assert rank_norms == pytest.approx(norms, rel=3e-2)
    weights, others = found[0][2], found[1][2]
    assert all((weights[name] == others[name]).all() for name in weights)
