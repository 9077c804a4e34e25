"""Random packed rows for tests of the trainer: samples with taps that depend on the sample alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dflash_core.distributed import World
from dflash_core.drafter import Drafter, DrafterConfig
from dflash_core.packing import pack_tokens
from dflash_core.records import Sample
from dflash_core.row_batch import RowBatch, prepare_row
from dflash_core.training import Trainer, TrainingConfig, TrainingRow
from tests.core.tiny_drafter import tiny_config

CPU = torch.device("cpu")
ALONE = World(rank=0, size=1, device=CPU)


def random_samples(lengths: Sequence[int], *, seed: int = 0, supervised: float = 0.9) -> list[Sample]:
    generator = np.random.default_rng(seed)
    return [
        Sample(
            sample_id=f"s{seed}-{i}",
            token_ids_T=generator.integers(0, 90, n).astype(np.int32),
            loss_mask_T=generator.random(n) < supervised,
        )
        for i, n in enumerate(lengths)
    ]


def taps_of(sample: Sample, width: int) -> torch.Tensor:
    """Float32 [T, width], the same for a sample wherever it is packed."""
    seed = int.from_bytes(sample.sample_id.encode()[-6:], "big")
    return torch.randn(sample.num_tokens, width, generator=torch.Generator().manual_seed(seed))


def make_row(
    samples: Sequence[Sample],
    config: DrafterConfig,
    *,
    row_tokens: int = 64,
    anchors: int = 12,
    epoch: int = 0,
    seed: int = 0,
    dense: bool = True,
) -> TrainingRow:
    packed = pack_tokens(samples, row_tokens)
    batch: RowBatch = prepare_row(packed, config, anchors=anchors, seed=seed, epoch=epoch, dense=dense)
    width = len(config.tap_layer_ids) * config.hidden_size
    taps_CE = torch.zeros(row_tokens, width)
    last_hidden_CD = torch.zeros(row_tokens, config.hidden_size)
    for i, sample in enumerate(samples):
        span = slice(int(packed.starts_N[i]), int(packed.starts_N[i + 1]))
        both = taps_of(sample, width + config.hidden_size)
        taps_CE[span], last_hidden_CD[span] = both[:, :width], both[:, width:]
    return TrainingRow(batch=batch, taps_CE=taps_CE, last_hidden_CD=last_hidden_CD)


def tiny_trainer(
    *,
    world: World = ALONE,
    total_steps: int = 100,
    drafter_changes: dict[str, Any] | None = None,
    std: float = 0.2,
    **training: Any,
) -> Trainer:
    """A random small drafter, embedding and head on the world's device; compiled where the configuration says
    so.
    """
    values: dict[str, Any] = {
        "row_tokens": 64,
        "anchors_per_row": 12,
        "compute_dtype": "float32",
        "loss": {"gamma": 3.0, "chunk_slots": 7},
        "optimizer": {"learning_rate": 3e-3, "warmup_fraction": 0.0},
    }
    config = TrainingConfig.model_validate(values | training)
    drafter = Drafter(tiny_config(**(drafter_changes or {})), config.dtype)
    drafter.init_weights(0, std=std)
    drafter.to(world.device)
    if config.compile:
        drafter.compile_regions(checkpoint_layers=config.checkpoint_layers)
    elif config.checkpoint_layers:
        drafter.checkpoint_layers()
    generator = torch.Generator().manual_seed(7)
    shape = (drafter.config.vocab_size, drafter.config.hidden_size)
    embedding, head = (
        (5 * std * torch.randn(shape, generator=generator)).to(world.device, config.dtype) for _ in range(2)
    )
    return Trainer(drafter, embedding, head, config, total_steps=total_steps, world=world)


def gradients(trainer: Trainer, rows: Sequence[TrainingRow]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and its gradient by the trainer's own forward, without an update."""
    top, bottom = 0.0, 0.0
    trainer.drafter.zero_grad(set_to_none=True)
    for row in rows:
        losses, weights_N = trainer.forward(row)
        total = (losses.loss_N * weights_N).sum()
        total.backward()
        top, bottom = top + float(total.detach()), bottom + float(weights_N.sum())
    found = {
        n: p.grad / max(bottom, 1e-30) for n, p in trainer.drafter.named_parameters() if p.grad is not None
    }
    trainer.drafter.zero_grad(set_to_none=True)
    return top / max(bottom, 1e-30), found
