"""Measures extraction by one worker process a GPU, through the worker pool of the flow, without Prefect.

python benchmarks/fleet.py --shape qwen3-8b --gpus 1,2,4 --shards-per-gpu 8

A target of random weights is written to disk once (as far as its last tap), random chats are planned as a
data set, every worker does two shards to warm up, then the rest is timed: from token ids on the store to
committed shards. Prints one JSON line for each number of GPUs: tokens/s, efficiency against one GPU, how busy
the host was. All share one compile cache, so only the first compiles. On a machine without GPUs, `--gpus 0`
runs one worker on the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import transformers

from benchmarks.capture import SHAPES, calm
from dflash_core.records import Sample
from dflash_core.target import TargetConfig, default_tap_ids, describe_target
from flows.config import ExtractConfig
from flows.extract_steps import ShardRunner, open_pool
from flows.launch import JobError, Message, WorkerPool
from storage.dataset import Dataset, DatasetSpec, create_dataset
from storage.objects import open_store
from tests.tiny import tiny_tokenizer

WARM_SHARDS = 2
"""Shards a worker does before the clock starts."""

Watch = Callable[[WorkerPool, int, int], Any]
"""Is called with the pool, how many timed shards have ended (0: all workers are warm), and of how many."""


def write_target(shape: str, folder: Path) -> None:
    """Write configuration, tokenizer and random weights up to the last tap."""
    class_name, values = SHAPES[shape]
    config = getattr(transformers, class_name)(**values)
    whole = config.num_hidden_layers
    last = default_tap_ids(whole)[-1] + 1
    config.num_hidden_layers = last
    if getattr(config, "layer_types", None):
        all_types, config.layer_types = config.layer_types, config.layer_types[:last]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.AutoModelForCausalLM.from_config(config)
        torch.set_default_dtype(default)
    calm(model)  # or the parity gate refuses it
    model.save_pretrained(folder)
    del model
    config.num_hidden_layers = whole
    if getattr(config, "layer_types", None):
        config.layer_types = all_types
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    if device == "cuda":
        torch.cuda.empty_cache()


def chats(tokens: int, seed: int) -> list[Sample]:
    """Random chats of realistic lengths (log-normal, median 1,100, 32 to 4,096), so many tokens in all."""
    draw = np.random.default_rng(seed)
    samples: list[Sample] = []
    while tokens > 0:
        length = int(np.clip(draw.lognormal(np.log(1100), 0.8), 32, 4096))
        ids = draw.integers(0, 256, length).astype(np.int32)
        samples.append(
            Sample(sample_id=f"chat-{len(samples)}", token_ids_T=ids, loss_mask_T=np.ones(length, bool))
        )
        tokens -= length
    return samples


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What the workers do, and where the shards go."""

    target: TargetConfig
    store: Path
    codec: str
    shard_tokens: int
    threads: int
    """Entropy coders of one worker."""

    def plan(self, name: str, shards: int, seed: int) -> Dataset:
        """Plan a data set of so many shards; the same arguments give the same plan."""
        spec, capture = describe_target(self.target)
        dataset_spec = DatasetSpec(
            target=spec,
            capture=capture,
            codec=self.codec,
            input_sha256="0" * 64,
            shard_tokens=self.shard_tokens,
        )
        samples = chats(shards * self.shard_tokens, seed)
        return create_dataset(open_store(str(self.store)), name, dataset_spec, samples)

    def extract(
        self, dataset: Dataset, slots: Sequence[str], watch: Watch = lambda *_: None
    ) -> tuple[dict[str, Any], tuple[float, float]]:
        """Extract a data set that has no shards yet, and time all but the first shards of each worker.

        Returns the figures, and when the timed part began and ended.
        """
        shards = dataset.missing()
        if len(shards) < len(dataset.plan.shards):
            raise RuntimeError(f"{dataset.uri} has shards already, which nobody would capture")
        first, timed = shards[: WARM_SHARDS * len(slots)], shards[WARM_SHARDS * len(slots) :]
        ended = itertools.count(1)
        with (
            open_pool(self._configuration(slots), dataset) as pool,
            ThreadPoolExecutor(pool.capacity) as threads,
        ):
            runner = ShardRunner(pool, redo=False)

            def capture(shard: int) -> Message:
                result = {**attempt(runner, shard), "ended": time.monotonic()}
                watch(pool, next(ended), len(timed))
                return result

            started = time.monotonic()
            runner.prepare(tell, len(shards))
            list(threads.map(lambda shard: attempt(runner, shard), first))
            warm_up = time.monotonic() - started
            watch(pool, 0, len(timed))
            began = time.monotonic()
            with HostWatch() as host:
                results = list(threads.map(capture, timed))
            seconds = time.monotonic() - began
        starts = sum(worker.starts for worker in pool.workers)
        if starts == len(slots) and any(result["found"] for result in results):
            raise RuntimeError(f"another run writes to {dataset.uri}: some of the timed shards are its")
        done = sum(result["tokens"] for result in results)
        figures = {
            "gpus": sum(slot != "cpu" for slot in slots),
            "workers": len(slots),
            "codec": self.codec,
            "tokens": done,
            "seconds": round(seconds, 2),
            "tokens_per_second": round(done / seconds, 1),
            "tokens_per_second_per_worker": round(done / seconds / len(slots), 1),
            **pace(results, len(slots)),
            "capturing_share": round(sum(r["seconds"] for r in results) / (seconds * len(slots)), 4),
            "encoded_mb_per_second": round(sum(r["bytes"] for r in results) / seconds / 1e6, 1),
            "warm_up_seconds": round(warm_up, 1),
            "workers_started": starts,
            "cache_state": (pool.cache or {}).get("state"),
            "budgets": sorted({result["token_budget"] for result in results if not result["found"]}),
            **host.summary(),
        }
        return figures, (began, began + seconds)

    def _configuration(self, slots: Sequence[str]) -> ExtractConfig:
        workers = {"slots": tuple(slots), "writer": {"threads": self.threads}}
        return ExtractConfig.model_validate(
            {
                "store": str(self.store),
                "chats": ["none"],
                "target": self.target.model_dump(),
                "codec": self.codec,
                "workers": workers,
                "cache": {"uri": str(self.store.parent / "compile-cache")},
            }
        )


def attempt(runner: ShardRunner, shard: int) -> Message:
    """Try a shard until it succeeds, as the flow does, at most three times."""
    for left in (2, 1, 0):
        try:
            return runner.attempt(shard, tell)
        except JobError as error:
            print(f"shard {shard}: {error}", file=sys.stderr, flush=True)
            if not left:
                raise
    raise AssertionError


def pace(results: Sequence[Message], workers: int) -> dict[str, float | None]:
    """The rate while each of so many workers has work, and stalls: seconds between the ends of two shards.

    Steady: of each worker from the end of its first shard to that of its last before any worker ended its
    very last, so that neither the start of a run nor its tail, in which some have nothing left, counts.
    """
    ends = [
        sorted((result["ended"], result["tokens"]) for result in results if result["worker"] == name)
        for name in {result["worker"] for result in results}
    ]
    over = min(each[-1][0] for each in ends)
    gaps = [
        [(end - before, tokens, end <= over) for (before, _), (end, tokens) in itertools.pairwise(each)]
        for each in ends
    ]
    between = [seconds for each in gaps for seconds, *_ in each]
    steady = [[(seconds, tokens) for seconds, tokens, counts in each if counts] for each in gaps]
    rates = [sum(t for _, t in each) / sum(s for s, _ in each) for each in steady if each]
    return {
        "steady_tokens_per_second": round(sum(rates), 1) if len(rates) == workers else None,
        "seconds_between_shards": round(median(between), 2) if between else None,
        "longest_between_shards": round(max(between), 2) if between else None,
    }


class HostWatch:
    """Samples how busy the host's CPUs and disks are and how much memory is in use, from /proc."""

    def __enter__(self) -> HostWatch:
        self._stop = threading.Event()
        self._used_gib: list[float] = []
        self._before, self._disk_before = self._cpu(), disk_bytes()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._seconds = time.monotonic() - self._began
        self._busy, self._disk_after = self._cpu() - self._before, disk_bytes()

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
            total, free = (int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
            self._used_gib.append((total - free) / 2**20)

    @staticmethod
    def _cpu() -> float:
        """CPU seconds of all processes so far: user, nice, system, irq, softirq."""
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
        return (sum(fields[:3]) + sum(fields[5:7])) / os.sysconf("SC_CLK_TCK")

    def summary(self) -> dict[str, float]:
        """Cores that were busy on average, what disks read and wrote, and the most memory in use."""
        read, written = (
            after - before for before, after in zip(self._disk_before, self._disk_after, strict=True)
        )
        return {
            "disk_read_mb_per_second": round(read / self._seconds / 1e6, 1),
            "disk_write_mb_per_second": round(written / self._seconds / 1e6, 1),
            "busy_cores": round(self._busy / self._seconds, 2),
            "host_memory_gib": round(max(self._used_gib, default=0.0), 1),
        }


def disk_bytes() -> tuple[int, int]:
    """Bytes that all processes have read from block devices and written to them so far."""
    read = written = 0
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if Path(f"/sys/block/{fields[2]}").exists() and not fields[2].startswith(("loop", "ram")):
            read, written = read + int(fields[5]) * 512, written + int(fields[9]) * 512
    return read, written


def tell(message: Message) -> None:
    """Show what workers say, on stderr."""
    if message["kind"] in ("log", "stderr"):
        print(message["text"], file=sys.stderr, flush=True)


def main() -> None:
    """Measure each number of GPUs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--gpus", default="1", help="numbers of GPUs, e.g. 1,2,4")
    parser.add_argument("--shards-per-gpu", type=int, default=8)
    parser.add_argument("--shard-tokens", type=int, default=65_536)
    parser.add_argument("--batch-tokens", type=int, default=32_768)
    parser.add_argument("--codec", default="tolerance=0.1")
    parser.add_argument("--threads", type=int, default=4, help="entropy coders of one worker")
    parser.add_argument("--folder", type=Path, help="for target and shards; default: a temporary one")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="dflash-fleet-"))
    path = folder / f"target-{arguments.shape}"
    if not (path / "config.json").exists():
        write_target(arguments.shape, path)
    target = TargetConfig(path=str(path), mask_token=319, batch_tokens=arguments.batch_tokens)
    alone: float | None = None
    try:
        for gpus in map(int, arguments.gpus.split(",")):
            slots = tuple(str(i) for i in range(gpus)) or ("cpu",)
            fleet = Fleet(
                target=target,
                store=folder / f"store-{gpus}",
                codec=arguments.codec,
                shard_tokens=arguments.shard_tokens,
                threads=arguments.threads,
            )
            shards = len(slots) * (arguments.shards_per_gpu + WARM_SHARDS)
            figures, _ = fleet.extract(fleet.plan(f"fleet-{gpus}", shards, seed=gpus), slots)
            shutil.rmtree(fleet.store)
            each = figures["tokens_per_second_per_worker"]
            alone = alone or each
            result = {"shape": arguments.shape, **figures, "efficiency": round(each / alone, 4)}
            print(json.dumps(result), flush=True)
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
