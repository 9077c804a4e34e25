"""Trains from shards through the store's reader, and compares with the same step fed from memory. Prints
JSON lines.

python benchmarks/train_from_store.py --setting 27B --steps 16 --codec tolerance=0.1

Writes a data set of random states with realistic statistics in the shapes of `benchmarks/train_step.py` to a
temporary folder, then takes optimizer steps whose rows come from it as in a real run (`flows.train_data`):
fetched, decoded, packed, anchors drawn and tile tables built beside the step. One process measures memory,
store and memory again, so that a card that grows warm favours neither. `data_wait_ms` is the time between two
steps on the device, `host_wait_ms` what the host waits for a row.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from reader import write_dataset
from train_step import SETTINGS, build, milliseconds, synchronise

from dflash_core.compile_watch import Watch
from dflash_core.distributed import join_world
from dflash_core.fast_path import FastPath, fused_attention_calls
from dflash_core.step_clock import StepClock, StepReport
from dflash_core.training import Trainer, TrainingRow
from flows.train_data import StepPlace, TrainingData

WARM_STEPS = 4
"""Steps from the store that are not counted: buffers grow, the reader gets ahead."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--setting", default="27B", choices=SETTINGS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--codec", default="tolerance=0.1")
    parser.add_argument("--rows", type=int, default=4, help="of the data set: more than its reader holds")
    parser.add_argument("--writer-threads", type=int, default=8)
    arguments = parser.parse_args()
    setting = SETTINGS[arguments.setting]
    world = join_world()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        made = SimpleNamespace(
            width=setting["drafter"]["hidden_size"],
            taps=len(setting["drafter"]["tap_layer_ids"]),
            document_tokens=setting["document_tokens"],
            tokens=setting["document_tokens"] * setting["documents"] * arguments.rows,
            device=str(world.device),
            writer_threads=arguments.writer_threads,
        )
        dataset, _ = write_dataset(made, arguments.codec, folder)  # type: ignore[arg-type]
        size = sum(r.size for r in dataset.records().values())
        tell(
            setting=arguments.setting,
            codec=arguments.codec,
            encoded_bytes_per_token=round(size / dataset.plan.tokens),
            seconds_to_write=round(time.perf_counter() - started, 1),
        )
        taps = dataset.spec.capture.tap_layer_ids
        shape = {**setting["drafter"], "tap_layer_ids": taps, "target_num_layers": 64}
        watch = Watch.from_environment().start()
        trainer, row, facts = build({**setting, "drafter": shape}, 4096, {}, world)
        training = trainer.config.model_copy(update={"validation_fraction": 0.0, "epochs": 1 << 20})
        data = TrainingData(dataset, trainer.drafter.config, training, world)
        trainer.step([row], 1)
        synchronise()
        tell(seconds_to_first_step=round(time.perf_counter() - started, 1))
        if torch.cuda.is_available():
            watch.forbid("error")
        memory = from_memory(trainer, row, arguments.steps)
        tell(from_memory_ms=rounded(memory))
        reports, waits, wall_s = from_store(trainer, data, arguments.steps + WARM_STEPS)
        store_ms = 1000 * wall_s / len(reports)
        tell(
            from_store_ms=round(store_ms, 2),
            step_ms=rounded(r.step_ms for r in reports),
            data_wait_ms=rounded(r.gap_ms for r in reports),
            host_wait_ms=rounded(waits),
            context_tokens_per_s=round(facts["context_tokens"] / store_ms * 1000),
        )
        again = from_memory(trainer, row, arguments.steps)
        tell(from_memory_again_ms=rounded(again))
        path = FastPath(median(memory + again))
        for report in reports:
            path.observe(report.step_ms, report.gap_ms)
        tell(
            share_of_speed=round(mean(memory + again) / store_ms, 4),
            off_fast_path=list(path.check().values()),
        )
        if torch.cuda.is_available():
            calls = fused_attention_calls(lambda: trainer.step([row], 1))
            tell(fused_attention_kernels={"forward": calls[0], "backward": calls[1]})


def tell(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 2) for value in values]


def from_memory(trainer: Trainer, row: TrainingRow, steps: int) -> list[float]:
    """Milliseconds from each step to the next, the row being on the device already."""
    return milliseconds(lambda: trainer.step([row], 1), steps, warm=2)


def from_store(
    trainer: Trainer, data: TrainingData, steps: int
) -> tuple[list[StepReport], list[float], float]:
    """Take steps as a rank does; of all but the first few the reports, the host's waits in ms, and the
    seconds that they took together.
    """
    clock, started = StepClock(data.world), 0.0
    reports: list[StepReport] = []
    waits: list[float] = []
    for number, (_, rows) in enumerate(data.steps(StepPlace(epoch=0, step_in_epoch=0), steps)):
        if number == WARM_STEPS:
            clock.drain()
            reports.clear()
            waits.clear()
            synchronise()
            started = time.perf_counter()
        asked = time.perf_counter()
        batch = [next(rows)]
        waits.append(1000 * (time.perf_counter() - asked))
        clock.begin()
        trainer.step(batch, 1)
        reports += clock.end(trainer.optimizer_step - 1, trainer.halted_at, lambda: False)
    reports += clock.drain()
    synchronise()
    return reports, waits, time.perf_counter() - started


if __name__ == "__main__":
    main()
