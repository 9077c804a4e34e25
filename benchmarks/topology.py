"""Measures both stages on one host the way a project runs them: some GPUs extract, others train. JSON lines.

python benchmarks/topology.py --shape qwen3.6-27b --extract 0,1,2,3,4 --train 5,6,7
python benchmarks/topology.py --shape qwen3-8b --extract 0 --train 1 --phases extract,train,both

A target of random weights, random chats of realistic lengths, a folder as the store, the very worker pool,
ranks and compile cache of the flows. Phases:

    one      extraction on the first of the GPUs alone: what efficiency is measured against
    extract  extraction on all of them
    kill     the same plan once more, one worker killed with -9 in the middle: objects must be identical
    single   training on the first training GPU alone, from the shards of `extract`
    train    training on all of them, the compile cache restored
    both     extraction and training at the same time
    hours    from the rates above: what 902,000 samples over six epochs take, offline and online
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fleet import WARM_SHARDS, Fleet, chats, write_target
from dflash_core.target import TargetConfig
from flows.config import TrainConfig
from flows.launch import Message, WorkerPool
from flows.ranks import RanksFailed
from flows.train_steps import TrainingLog, open_training_data, train
from storage.dataset import Dataset

PHASES = ("one", "extract", "kill", "single", "train", "both", "hours")
SAMPLES, EPOCHS = 902_000, 6
"""Size of the training run that online figures are known of."""
DRAFTERS: dict[str, dict[str, Any]] = {
    "qwen3.6-27b": {
        "drafter": {
            "block_size": 32,
            "num_layers": 5,
            "intermediate_size": 17408,
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 128,
            "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
            "sliding_window": 2048,
        },
        "training": {"row_tokens": 49152, "anchors_per_row": 1024, "loss": {"gamma": 10.0}},
    },
    "qwen3-8b": {
        "drafter": {
            "block_size": 16,
            "num_layers": 5,
            "intermediate_size": 12288,
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 128,
        },
        "training": {"row_tokens": 12288, "anchors_per_row": 2048, "loss": {"gamma": 7.0}},
    },
    "tiny": {
        "drafter": {
            "block_size": 8,
            "num_layers": 1,
            "intermediate_size": 64,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 16,
        },
        "training": {"row_tokens": 4096, "anchors_per_row": 32, "loss": {"gamma": 4.0}, "compile": False},
    },
}
"""Drafter and training of the presets in configs/."""


class Beside:
    """What a training and an extraction at the same time tell each other."""

    def __init__(self) -> None:
        self.training_runs, self.extraction_is_over = threading.Event(), threading.Event()
        self.stopping = False


class Topology:
    """The target, the folder, and the measurements so far."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.found: dict[str, dict[str, Any]] = {}
        self.timed = (0.0, float("inf"))
        """When the timed part of the last extraction began and ended."""
        path = folder / f"target-{arguments.shape}"
        if not (path / "config.json").exists():
            self.say("target", seconds=timed(lambda: write_target(arguments.shape, path)))
        self.target = TargetConfig(path=str(path), mask_token=319, batch_tokens=arguments.batch_tokens)

    def say(self, phase: str, **found: Any) -> None:
        """Keep and print the findings of a phase."""
        rounded = {name: round(v, 4) if isinstance(v, float) else v for name, v in found.items()}
        self.found[phase] = rounded
        print(json.dumps({"phase": phase, "shape": self.arguments.shape, **rounded}), flush=True)

    def extract(
        self, phase: str, slots: Sequence[str], warmed: Callable[[WorkerPool], Any] = lambda _: None
    ) -> Dataset:
        """Extract a fresh data set on these GPUs and time all but the first shards of each worker."""
        arguments = self.arguments
        fleet = Fleet(
            target=self.target,
            store=self.folder / phase,
            codec=arguments.codec,
            shard_tokens=arguments.shard_tokens,
            threads=arguments.threads,
        )
        shards = (arguments.shards_per_gpu + WARM_SHARDS) * len(arguments.extract)
        dataset = fleet.plan("topology", shards, seed=1)
        figures, self.timed = fleet.extract(dataset, slots, warmed)
        dataset.seal()
        self.say(phase, **figures)
        return dataset

    def train(self, phase: str, dataset: Dataset, gpus: Sequence[str], beside: Beside | None = None) -> None:
        """Train for --steps optimizer steps, one row a rank.

        With `beside`, train until the extraction is over; only steps in its timed part count.
        """
        output = self.folder / f"drafter-{phase}"
        shape = DRAFTERS[self.arguments.shape]
        training = {
            **shape["training"],
            "rows_per_step": max(1, len(gpus)),
            "epochs": 1000,
            "max_steps": self.arguments.steps if beside is None else 10**6,
            "validation_fraction": 0.0,
            "log_every": 5,
            "checkpoint_every": 10**6,
        }
        config = TrainConfig.model_validate(
            {
                "dataset": dataset.uri,
                "target": self.target.path,
                "output": str(output),
                "gpus": tuple(gpus),
                "drafter": shape["drafter"],
                "training": training,
                "cache": {"uri": str(self.folder / "compile-cache"), "local_root": str(self.folder / phase)},
            }
        )
        output.mkdir()
        log, said = TrainingLog(), []
        when: dict[int, float] = {}

        def keep(message: Message) -> None:
            said.append(message)
            if message["kind"] == "metrics":
                when[message["step"]] = time.monotonic()
                if beside is not None and len(when) > 1:
                    beside.training_runs.set()
                if beside is not None and beside.extraction_is_over.is_set() and not beside.stopping:
                    beside.stopping = True
                    with suppress(ProcessLookupError):
                        os.kill(next(m["pid"] for m in said if m["kind"] == "started"), signal.SIGTERM)
            if message["kind"] == "stderr":
                print(message["text"], file=sys.stderr, flush=True)

        opened, drafter = open_training_data(config)
        began = time.monotonic()
        try:
            train(config, opened, drafter, output, log, keep)
        except RanksFailed:
            if beside is None or log.stopped_at is None:
                raise
        seconds = time.monotonic() - began
        rows = [row for row in log.metrics if row.get("step_ms") is not None]
        rows = rows[1:] or rows  # the first holds the steps that compile
        if beside is not None:
            rows = [row for row in rows if self.timed[0] < when[row["step"]] < self.timed[1]]
            if not rows:
                raise RuntimeError("no rate was read while extraction ran: more --shards-per-gpu")
        step_ms = median(row["step_ms"] for row in rows)
        wait_ms = median(row["data_wait_ms"] for row in rows)
        started = next(m for m in said if m["kind"] == "started")
        per_row = dataset.plan.tokens / started["rows_per_epoch"]
        self.say(
            phase,
            gpus=len(gpus),
            step_ms=step_ms,
            data_wait_ms=wait_ms,
            tokens_per_second=per_row * max(1, len(gpus)) * 1000 / (step_ms + wait_ms),
            row_fill=per_row / shape["training"]["row_tokens"],
            memory_peak_gib=rows[-1].get("memory_peak_gib"),
            cache_state=(log.cache or {}).get("state"),
            nothing_compiled=(log.cache or {}).get("nothing_compiled"),
            off_fast_path=[m["reasons"] for m in said if m["kind"] == "off_fast_path"],
            steps_counted=len(rows) * training["log_every"],
            seconds=seconds,
        )
        shutil.rmtree(output)

    def both(self, dataset: Dataset) -> None:
        """Train from an earlier data set while another one is extracted."""
        beside = Beside()
        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(self.train, "both: train", dataset, self.arguments.train, beside)
            training.add_done_callback(lambda _: beside.training_runs.set())
            try:
                self.extract("both: extract", self.arguments.extract, lambda _: beside.training_runs.wait())
            finally:
                beside.extraction_is_over.set()
            training.result()
        for part, alone in (("both: extract", "extract"), ("both: train", "train")):
            if alone in self.found:
                before, now = (self.found[name]["tokens_per_second"] for name in (alone, part))
                self.say(f"{part} loses", share=1 - now / before)

    def hours(self) -> None:
        """Put the rates beside the online design, where every epoch pays for the target again."""
        extract, trained = self.found.get("extract"), self.found.get("train")
        if not extract or not trained:
            return
        each = sum(s.num_tokens for s in chats(10**7, seed=2)) / len(chats(10**7, seed=2))
        tokens = SAMPLES * each
        extraction, training = (tokens / r["tokens_per_second"] / 3600 for r in (extract, trained))
        online = min(extract["tokens_per_second"], trained["tokens_per_second"])
        self.say(
            "hours",
            samples=SAMPLES,
            epochs=EPOCHS,
            tokens_per_sample=each,
            extraction_hours=extraction,
            training_hours=EPOCHS * training,
            offline_hours=extraction + EPOCHS * training,
            online_tokens_per_second=online,
            online_hours=EPOCHS * tokens / online / 3600,
        )


def objects(dataset: Dataset) -> dict[int, str]:
    """Name of each shard's object, which carries its hash."""
    return {shard: record.object for shard, record in dataset.records().items()}


def timed(work: Callable[[], Any]) -> float:
    """Seconds that it takes."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


def main() -> None:
    """Run the phases asked for; one that fails says so, and the others go on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(DRAFTERS), default="qwen3.6-27b")
    parser.add_argument("--extract", default="0", help="GPUs that extract, or cpu")
    parser.add_argument("--train", default="1", help="GPUs that train, or cpu")
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--shards-per-gpu", type=int, default=8)
    parser.add_argument("--shard-tokens", type=int, default=131_072)
    parser.add_argument("--batch-tokens", type=int, default=32_768)
    parser.add_argument("--codec", default="tolerance=0.1")
    parser.add_argument("--threads", type=int, default=4, help="entropy coders of one worker")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kill-after", type=float, default=8.0, help="seconds")
    parser.add_argument("--folder", type=Path, help="for target and shards; default: a temporary one")
    arguments = parser.parse_args()
    arguments.extract = arguments.extract.split(",")
    arguments.train = [gpu for gpu in arguments.train.split(",") if gpu != "cpu"]
    phases = arguments.phases.split(",")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="dflash-topology-"))
    bench = Topology(arguments, folder)
    data: dict[str, Dataset] = {}

    def kill_soon(pool: WorkerPool) -> None:
        victim = next(pid for worker in pool.workers if (pid := worker.pid) is not None)
        threading.Timer(arguments.kill_after, os.kill, (victim, signal.SIGKILL)).start()

    def kill() -> None:
        again = bench.extract("kill", arguments.extract, kill_soon)
        bench.say("kill: objects", identical=objects(again) == objects(data["extract"]))

    runs: dict[str, Callable[[], None]] = {
        "one": lambda: data.update(one=bench.extract("one", arguments.extract[:1])),
        "extract": lambda: data.update(extract=bench.extract("extract", arguments.extract)),
        "kill": kill,
        "single": lambda: bench.train("single", data["extract"], arguments.train[:1]),
        "train": lambda: bench.train("train", data["extract"], arguments.train),
        "both": lambda: bench.both(data["extract"]),
        "hours": bench.hours,
    }
    try:
        for phase in (name for name in runs if name in phases):
            try:
                runs[phase]()
            except Exception as error:  # noqa: BLE001  the other phases are worth having
                bench.say(f"{phase}: failed", error=f"{type(error).__name__}: {str(error)[:800]}")
        for many, one in (("extract", "one"), ("train", "single")):
            if many in bench.found and one in bench.found:
                rates = [
                    bench.found[name]["tokens_per_second"] / max(1, bench.found[name]["gpus"])
                    for name in (many, one)
                ]
                bench.say(f"{many}: efficiency", share=rates[0] / rates[1])
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
