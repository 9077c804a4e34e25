"""Trains from shards through the store's reader, and compares with the same step fed from memory. Prints
JSON.

python benchmarks/train_from_store.py --setting 27B --steps 20 --codec tolerance=0.1

Writes a data set of random states with realistic statistics in the shapes of `benchmarks/train_step.py` to a
temporary folder, then takes optimizer steps whose rows come from it as in a real run (`flows.train_data`):
fetched, decoded, packed, anchors drawn and tile tables built beside the step. `data_wait_ms` is the time
between two steps on the device.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
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
from dflash_core.training import Trainer
from flows.train_data import StepPlace, TrainingData


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--setting", default="27B", choices=SETTINGS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--codec", default="tolerance=0.1")
    parser.add_argument("--rows", type=int, default=2, help="rows in the data set, read again and again")
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
        written_s = time.perf_counter() - started
        taps = dataset.spec.capture.tap_layer_ids
        shape = {**setting["drafter"], "tap_layer_ids": taps, "target_num_layers": 64}
        watch = Watch.from_environment().start()
        trainer, row, facts = build({**setting, "drafter": shape}, 4096, {}, world)
        training = trainer.config.model_copy(update={"validation_fraction": 0.0, "epochs": 1 << 20})
        data = TrainingData(dataset, trainer.drafter.config, training, world)
        trainer.step([row], 1)
        if torch.cuda.is_available():
            watch.forbid("error")
        fixed = milliseconds(lambda: trainer.step([row], 1), arguments.steps, warm=3)
        reports, wall_s = from_store(trainer, data, arguments.steps + 4)
        result: dict[str, Any] = {
            "setting": arguments.setting,
            "codec": arguments.codec,
            "encoded_bytes_per_token": round(
                sum(r.size for r in dataset.records().values()) / dataset.plan.tokens
            ),
            "seconds_to_write": round(written_s, 1),
            "from_memory_ms": round(median(fixed), 2),
            **rates(reports, wall_s, facts, median(fixed)),
            "off_fast_path": FastPath(median(fixed)).check([r.step_ms for r in reports], []),
        }
        if torch.cuda.is_available():
            calls = fused_attention_calls(lambda: trainer.step([row], 1))
            result["fused_attention_kernels"] = {"forward": calls[0], "backward": calls[1]}
        print(json.dumps(result, indent=1))


def from_store(trainer: Trainer, data: TrainingData, steps: int) -> tuple[list[StepReport], float]:
    """Take steps as a rank does; the reports of all but the first four, and the seconds that these took."""
    clock, reports, started = StepClock(data.world), [], 0.0
    for number, (_, rows) in enumerate(data.steps(StepPlace(epoch=0, step_in_epoch=0), steps)):
        if number == 4:
            reports += clock.drain()
            reports.clear()
            synchronise()
            started = time.perf_counter()
        batch = [next(rows)]
        clock.begin()
        trainer.step(batch, 1)
        report = clock.end(trainer.optimizer_step - 1, trainer.halted_at, False)
        reports += [report] if report is not None else []
    reports += clock.drain()
    synchronise()
    return reports, time.perf_counter() - started


def rates(reports: list[StepReport], wall_s: float, facts: dict[str, Any], fixed_ms: float) -> dict[str, Any]:
    """What the run did, by the wall clock and by the device's."""
    wall_ms = 1000 * wall_s / len(reports)
    return {
        "from_store_ms": round(wall_ms, 2),
        "share_of_speed": round(fixed_ms / wall_ms, 4),
        "step_ms": round(median(r.step_ms for r in reports), 2),
        "data_wait_ms": [round(r.gap_ms, 2) for r in reports],
        "context_tokens_per_s": round(facts["context_tokens"] / wall_ms * 1000),
    }


if __name__ == "__main__":
    main()
