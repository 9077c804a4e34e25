"""A rank that runs one full train step and one evaluation step on random data, to have everything compiled.

`torchrun -m flows.cache_rank FILE`, FILE being JSON with a "drafter" and a "training" configuration. The step
is the trainer's own: what it leaves in the compile cache is what training looks for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash_core.compile_watch import Watch, seconds_since_process_start
from dflash_core.configuration import UserError
from dflash_core.distributed import World, join_world, leave_world, start_device
from dflash_core.drafter import Drafter, DrafterConfig
from dflash_core.packing import pack_tokens
from dflash_core.records import Sample
from dflash_core.row_batch import prepare_row
from dflash_core.training import TrainingConfig, TrainingRow, make_trainer
from flows.ranks import say, serve_rank

DOCUMENTS = 8
"""Documents of the random row; their number enters no graph."""


def main() -> None:
    """Compile, say how long the first optimizer step took, and report."""
    watch = Watch.from_environment()
    watch.mark("python, torch and our modules")
    values = json.loads(Path(sys.argv[1]).read_text())
    drafter = DrafterConfig.model_validate(values["drafter"])
    training = TrainingConfig.model_validate(values["training"])
    world = join_world()
    watch.load_compiler()
    start_device(world.device)
    watch.mark("device")
    tensors = random_tensors(drafter, training, world)
    watch.mark("weights")
    row = random_row(drafter, training, world)
    watch.mark("row")
    watch.start()
    watch.mark("waiting for the compiler's modules")
    trainer = make_trainer(*tensors, training, total_steps=1000, world=world)
    watch.mark("trainer")
    trainer.step([row], 1)
    trainer.check_finite()  # waits for the device
    watch.mark("first step")
    say("first_step", rank=world.rank, seconds=round(seconds_since_process_start(), 3))
    trainer.validate([row])
    say(**watch.report(rank=world.rank).model_dump(mode="json"))
    leave_world(world)


def random_tensors(
    config: DrafterConfig, training: TrainingConfig, world: World
) -> tuple[Drafter, Tensor, Tensor]:
    """Return a drafter, an embedding and a head with random weights on this rank's device.

    Raises UserError when the configuration compiles nothing.
    """
    if not training.compiles_on(world.device.type):
        raise UserError("this training configuration compiles nothing here: set training.compile to true")
    with world.device:
        drafter = Drafter(config, training.dtype)
    generator = torch.Generator(world.device).manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
    shape = (config.vocab_size, config.hidden_size)
    embedding_VD, head_VD = (
        torch.empty(shape, dtype=training.dtype, device=world.device).normal_(0.0, 0.02, generator=generator)
        for _ in range(2)
    )
    return drafter, embedding_VD, head_VD


def random_row(config: DrafterConfig, training: TrainingConfig, world: World) -> TrainingRow:
    """Build a packed row of random tokens and taps in the shapes of the configuration."""
    draw = np.random.default_rng(0)
    documents = min(DOCUMENTS, training.row_tokens)
    lengths = [training.row_tokens // documents] * documents
    samples = [
        Sample(
            sample_id=f"random-{i}",
            token_ids_T=draw.integers(0, config.vocab_size, length).astype(np.int32),
            loss_mask_T=np.ones(length, bool),
        )
        for i, length in enumerate(lengths)
    ]
    packed = pack_tokens(samples, training.row_tokens)
    batch = prepare_row(
        packed,
        config,
        anchors=training.anchors_per_row,
        seed=0,
        epoch=0,
        dense=world.device.type != "cuda",
    )
    generator = torch.Generator(world.device).manual_seed(world.rank)

    def states(width: int) -> torch.Tensor:
        shape = (training.row_tokens, width)
        empty = torch.empty(shape, dtype=torch.bfloat16, device=world.device)
        return empty.normal_(generator=generator)

    return TrainingRow(
        batch=batch.to(world.device),
        taps_CE=states(len(config.tap_layer_ids) * config.hidden_size),
        last_hidden_CD=states(config.hidden_size) if training.loss.kl_weight > 0 else None,
    )


if __name__ == "__main__":
    serve_rank(main)
