"""Measures both stages on one host the way a project runs them: some GPUs extract, others train. JSON lines.

python benchmarks/topology.py --shape qwen3-8b --extract 0 --train 1 --phases extract,train,both

A target of random weights, random chats of realistic lengths, a folder as the store, the presets of configs/,
the very worker pool, ranks and compile cache of the flows. Phases:

    one      extraction on the first of the GPUs alone: what efficiency is measured against
    extract  extraction on all of them
    kill     the same plan once more, one worker killed with -9 half-way: objects must be identical
    single   training on the first training GPU alone, from the shards of `extract`
    train    training on all of them, the compile cache restored as on another machine
    both     extraction and training at the same time
    hours    from the rates above: what 902,000 samples over six epochs take, offline and online

"A against B" is A's rate a GPU as a share of B's: efficiency, or what `both` leaves of each stage.

Phases can be spread over commands with the same --folder, which keeps the target, the compile caches, the
shards of `extract` and, in findings.json, all figures; a phase that is run again begins anew. All of them for
27B on eight H200 take about 21 minutes and 150 GB of disk:

    run="python benchmarks/topology.py --extract 0,1,2,3,4 --train 5,6,7 --folder /tmp/topology --phases"
    $run one             # 300 s: target written 90, loaded 60, compiled 55, scales and warm-up 20, timed 50
    $run extract,single  # 340 s: loads 90, warm-up 50, timed 50; ranks 20, compiled 45, steps 35, saved 30
    $run kill,train      # 370 s: as extract, one load and two shards more 110; ranks 30, steps 35, saved 30
    $run both,hours      # 260 s: as extract, the training beside it; saved 30
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

from benchmarks.fleet import WARM_SHARDS, Fleet, Watch, chats, write_target
from dflash_core.target import TargetConfig
from flows.config import ExtractConfig, TrainConfig, load_config
from flows.launch import Message, WorkerPool
from flows.ranks import RanksFailed
from flows.train_steps import TrainingLog, open_training_data, train
from storage.compile_session import CompileCacheConfig
from storage.dataset import Dataset, open_dataset

PHASES = ("one", "extract", "kill", "single", "train", "both", "hours")
AGAINST = {"extract": "one", "train": "single", "both-extract": "extract", "both-train": "train"}
"""Findings, and what they are compared with."""
RATES = {"share": "tokens_per_second", "steady_share": "steady_tokens_per_second"}
SAMPLES, EPOCHS = 902_000, 6
"""Size of the training run that online figures are known of."""
SHAPES = ("qwen3.6-27b", "qwen3-8b", "tiny")
TINY_EXTRACTION = ExtractConfig.model_validate(
    {
        "store": "none",
        "chats": ["none"],
        "target": {"path": "none", "batch_tokens": 4096},
        "shard_tokens": 8192,
    }
)
TINY_TRAINING = TrainConfig.model_validate(
    {
        "dataset": "none",
        "target": "none",
        "output": "none",
        "drafter": {
            "block_size": 8,
            "num_layers": 1,
            "intermediate_size": 64,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 16,
        },
        "training": {"row_tokens": 4096, "anchors_per_row": 32, "loss": {"gamma": 4.0}, "compile": False},
    }
)


def presets(shape: str) -> tuple[ExtractConfig, TrainConfig]:
    """How targets of this shape are captured, and drafters for them trained."""
    if shape == "tiny":
        return TINY_EXTRACTION, TINY_TRAINING
    folder = Path(__file__).resolve().parent.parent / "configs" / shape
    extraction = load_config(ExtractConfig, folder / "extract.yaml")
    return extraction, load_config(TrainConfig, folder / "train.yaml")


class Beside:
    """What a training and an extraction at the same time tell each other."""

    def __init__(self) -> None:
        self.training_runs, self.extraction_is_over = threading.Event(), threading.Event()
        self.stopping = False


class Topology:
    """The target, the folder, and the measurements so far."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        of_command = ("phases", "folder")
        settings = {name: value for name, value in vars(arguments).items() if name not in of_command}
        self.file = folder / "findings.json"
        self.kept = {"settings": settings, "found": {}}
        if self.file.exists():
            self.kept = json.loads(self.file.read_text())
        if other := [name for name in settings if settings[name] != self.kept["settings"].get(name)]:
            raise SystemExit(f"{folder} holds figures of another {', '.join(other)}: name another --folder")
        self.found: dict[str, dict[str, Any]] = self.kept["found"]
        self.timed = (0.0, float("inf"))
        """When the timed part of the last extraction began and ended."""
        path = folder / f"target-{arguments.shape}"
        if not (path / "config.json").exists():
            began = time.monotonic()
            write_target(arguments.shape, path)
            self.say("target", seconds=time.monotonic() - began)
        self.target = TargetConfig(path=str(path), mask_token=319, batch_tokens=arguments.batch_tokens)

    def say(self, name: str, **found: Any) -> None:
        """Keep and print findings."""
        self.found[name] = {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}
        self.file.write_text(json.dumps(self.kept, indent=1))
        print(json.dumps({"phase": name, "shape": self.arguments.shape, **self.found[name]}), flush=True)

    def run(self, phase: str) -> None:
        """Run a phase, forgetting what it found before, and compare what can be compared now."""
        stale = [name for name in self.found if name.startswith(phase) or phase in name.split()]
        for name in [*stale, *(["hours"] if phase in ("extract", "train") else [])]:
            self.found.pop(name, None)
        known = set(self.found)
        extract, train = self.arguments.extract, self.arguments.train
        runs: dict[str, Callable[[], Any]] = {
            "one": lambda: self.extract("one", extract[:1]),
            "extract": lambda: self.extract("extract", extract),
            "kill": self.kill,
            "single": lambda: self.train("single", train[:1]),
            "train": lambda: self.train("train", train),
            "both": self.both,
            "hours": self.hours,
        }
        runs[phase]()
        for name, other in AGAINST.items():
            if {name, other} <= self.found.keys() and not {name, other} <= known:
                one, two = self.found[name], self.found[other]
                shares = {
                    share: one[rate] / one["workers"] / two[rate] * two["workers"]
                    for share, rate in RATES.items()
                    if one.get(rate) and two.get(rate)
                }
                self.say(f"{name} against {other}", **shares)

    def kill(self) -> None:
        """Extract the same plan once more and kill the busiest worker half-way."""

        def watch(pool: WorkerPool, ended: int, timed: int) -> None:
            if ended == timed // 2:
                busy = sorted(pool.workers, key=lambda worker: -worker.jobs)
                os.kill(next(worker.pid for worker in busy if worker.pid is not None), signal.SIGKILL)

        slots = self.arguments.extract
        undisturbed = objects(self.data())
        identical = self.extract("kill", slots, watch) == undisturbed
        self.say("kill: objects", identical=identical, count=len(undisturbed))
        if not identical:
            raise RuntimeError("the objects differ from those of the undisturbed run")
        if self.found["kill"]["workers_started"] <= len(slots):
            raise RuntimeError("no worker was started again: more --shards-per-gpu")

    def both(self) -> None:
        """Train from an earlier data set while another one is extracted."""
        beside = Beside()
        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(self.train, "both-train", self.arguments.train, beside)
            training.add_done_callback(lambda _: beside.training_runs.set())
            try:
                self.extract("both-extract", self.arguments.extract, lambda *_: beside.training_runs.wait())
            finally:
                beside.extraction_is_over.set()
            training.result()

    def hours(self) -> None:
        """Put the rates beside the online design, where every epoch pays for the target again."""
        if missing := [phase for phase in ("extract", "train") if phase not in self.found]:
            raise RuntimeError(f"there are no figures yet of: {', '.join(missing)}")
        samples = chats(10**7, seed=2)
        each = sum(sample.num_tokens for sample in samples) / len(samples)
        tokens = SAMPLES * each
        extract, trained = (
            self.found[phase].get("steady_tokens_per_second") or self.found[phase]["tokens_per_second"]
            for phase in ("extract", "train")
        )
        extraction, training = tokens / extract / 3600, EPOCHS * tokens / trained / 3600
        online = min(extract, trained)
        self.say(
            "hours",
            samples=SAMPLES,
            epochs=EPOCHS,
            tokens_per_sample=each,
            extraction_hours=extraction,
            training_hours=training,
            offline_hours=extraction + training,
            online_tokens_per_second=online,
            online_hours=EPOCHS * tokens / online / 3600,
        )

    def data(self) -> Dataset:
        """What `extract` wrote."""
        if "extract" not in self.found:
            raise RuntimeError(f"the phase extract has not been run with --folder {self.folder}")
        return open_dataset(self.folder / "extract")

    def extract(self, phase: str, slots: Sequence[str], watch: Watch = lambda *_: None) -> dict[int, str]:
        """Extract into an empty store on these GPUs; time all but the first shards of each worker.

        Returns the objects' names. Only the store of `extract` stays.
        """
        arguments, store = self.arguments, self.folder / phase
        shutil.rmtree(store, ignore_errors=True)
        fleet = Fleet(
            target=self.target,
            store=store,
            codec=arguments.codec,
            shard_tokens=arguments.shard_tokens,
            threads=arguments.threads,
        )
        try:
            dataset = fleet.plan("topology", (arguments.shards_per_gpu + WARM_SHARDS) * len(slots), seed=1)
            figures, self.timed = fleet.extract(dataset, slots, watch)
            dataset.seal()
            names = objects(dataset)
        finally:
            if phase != "extract":
                shutil.rmtree(store, ignore_errors=True)
        self.say(phase, **figures)
        return names

    def train(self, phase: str, gpus: Sequence[str], beside: Beside | None = None) -> None:
        """Train for --steps optimizer steps, one row a rank, with no compile cache on the machine.

        With `beside`, train until the extraction is over; only steps in its timed part count.
        """
        dataset, output = self.data(), self.folder / f"drafter-{phase}"
        local_root = self.folder / "compile-local"  # part of the caches' identity: the same in all phases
        for folder in (output, local_root):
            shutil.rmtree(folder, ignore_errors=True)
        caches = str(self.folder / "compile-cache")
        _, preset = presets(self.arguments.shape)
        training = {
            "rows_per_step": max(1, len(gpus)),
            "epochs": 1000,
            "max_steps": self.arguments.steps if beside is None else 10**6,
            "validation_fraction": 0.0,
            "log_every": 5,
            "checkpoint_every": 10**6,
        }
        config = preset.model_copy(
            update={
                "dataset": dataset.uri,
                "target": self.target.path,
                "output": str(output),
                "gpus": tuple(gpus),
                "training": preset.training.model_copy(update=training),
                "cache": CompileCacheConfig(uri=caches, local_root=str(local_root)),
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
        ranks = max(1, len(gpus))
        self.say(
            phase,
            gpus=len(gpus),
            workers=ranks,
            step_ms=step_ms,
            data_wait_ms=wait_ms,
            tokens_per_second=per_row * ranks * 1000 / (step_ms + wait_ms),
            row_fill=per_row / config.training.row_tokens,
            memory_peak_gib=rows[-1].get("memory_peak_gib"),
            cache_state=(log.cache or {}).get("state"),
            nothing_compiled=(log.cache or {}).get("nothing_compiled"),
            off_fast_path=[m["reasons"] for m in said if m["kind"] == "off_fast_path"],
            steps_counted=len(rows) * config.training.log_every,
            seconds=seconds,
        )
        shutil.rmtree(output)


def objects(dataset: Dataset) -> dict[int, str]:
    """Name of each shard's object, which carries its hash."""
    return {shard: record.object for shard, record in dataset.records().items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the phases asked for; one that fails says so, and the others go on. Returns how many failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0])
    parser.add_argument("--extract", default="0", help="GPUs that extract, or cpu")
    parser.add_argument("--train", default="1", help="GPUs that train, or cpu")
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--shards-per-gpu", type=int, default=8)
    parser.add_argument("--shard-tokens", type=int, help="default: the preset's")
    parser.add_argument("--batch-tokens", type=int, help="default: the preset's")
    parser.add_argument("--codec", help="default: the preset's")
    parser.add_argument("--threads", type=int, default=4, help="entropy coders of one worker")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="for all that is kept; default: a temporary one")
    arguments = parser.parse_args(argv)
    preset, _ = presets(arguments.shape)
    arguments.shard_tokens = arguments.shard_tokens or preset.shard_tokens
    arguments.batch_tokens = arguments.batch_tokens or preset.target.batch_tokens
    arguments.codec = arguments.codec or preset.codec
    arguments.extract = arguments.extract.split(",")
    arguments.train = [gpu for gpu in arguments.train.split(",") if gpu != "cpu"]
    phases = arguments.phases.split(",")
    if unknown := set(phases) - set(PHASES):
        parser.error(f"unknown phases: {', '.join(sorted(unknown))}")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="dflash-topology-"))
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    try:
        bench = Topology(arguments, folder)
        for phase in (name for name in PHASES if name in phases):
            try:
                bench.run(phase)
            except Exception as error:  # noqa: BLE001  the other phases are worth having
                failed += 1
                bench.say(f"{phase}: failed", error=f"{type(error).__name__}: {str(error)[:800]}")
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder)
    return failed


if __name__ == "__main__":
    sys.exit(main())
