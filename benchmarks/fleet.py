"""Measures extraction by one worker process a GPU, through the worker pool of the flow, without Prefect.

python benchmarks/fleet.py --shape qwen3-8b --gpus 1,2,4 --shards-per-gpu 8

A target of random weights is written to disk once (as far as its last tap), random chats are planned as a
data set, every worker does two shards to warm up, then the rest is timed: from token ids on the store to
committed shards. Prints one JSON line for each number of GPUs: tokens/s, efficiency against one GPU, how busy
the host was. On a machine without GPUs, `--gpus 0` runs one worker on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import transformers

from benchmarks.capture import SHAPES
from dflash_core.records import Sample
from dflash_core.target import TargetConfig, default_tap_ids, describe_target
from flows.config import ExtractConfig
from flows.extract_steps import ShardRunner, open_pool
from flows.launch import Message
from storage.dataset import Dataset, DatasetSpec, create_dataset
from storage.objects import open_store
from tests.tiny import tiny_tokenizer

WARM_SHARDS = 2
"""Shards a worker does before the clock starts."""


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


def plan(arguments: argparse.Namespace, target: TargetConfig, workers: int, store: Path) -> Dataset:
    """Plan a data set with work for so many workers."""
    spec, capture = describe_target(target)
    shards = workers * (arguments.shards_per_gpu + WARM_SHARDS)
    dataset_spec = DatasetSpec(
        target=spec,
        capture=capture,
        codec=arguments.codec,
        input_sha256="0" * 64,
        shard_tokens=arguments.shard_tokens,
    )
    samples = chats(shards * arguments.shard_tokens, workers)
    return create_dataset(open_store(str(store)), f"fleet-{workers}", dataset_spec, samples)


def measure(arguments: argparse.Namespace, target: TargetConfig, gpus: int, store: Path) -> dict[str, Any]:
    """Run one fleet and time it."""
    slots = tuple(str(i) for i in range(gpus)) or ("cpu",)
    dataset = plan(arguments, target, len(slots), store)
    config = ExtractConfig.model_validate(
        {
            "store": str(store),
            "chats": ["none"],
            "target": target.model_dump(),
            "codec": arguments.codec,
            "workers": {"slots": slots, "writer": {"threads": arguments.threads, "pending_bytes": 2 << 30}},
        }
    )
    tokens = {planned.shard: planned.tokens for planned in dataset.plan.shards}
    shards = sorted(tokens)
    warm, timed = shards[: WARM_SHARDS * len(slots)], shards[WARM_SHARDS * len(slots) :]
    with open_pool(config, dataset) as pool, ThreadPoolExecutor(pool.capacity) as threads:
        runner = ShardRunner(pool, redo=False)
        began = time.monotonic()
        runner.prepare(tell, len(shards))
        list(threads.map(lambda shard: runner.attempt(shard, tell), warm))
        started = time.monotonic()
        with HostWatch() as host:
            results = list(threads.map(lambda shard: runner.attempt(shard, tell), timed))
        seconds = time.monotonic() - started
    return {
        "shape": arguments.shape,
        "gpus": gpus,
        "codec": arguments.codec,
        "tokens": sum(tokens[shard] for shard in timed),
        "seconds": round(seconds, 2),
        "tokens_per_second": round(sum(tokens[shard] for shard in timed) / seconds, 1),
        "mb_per_second": round(sum(result["bytes"] for result in results) / seconds / 1e6, 1),
        "warm_up_seconds": round(started - began, 1),
        "budgets": sorted({result.get("token_budget", 0) for result in results}),
        **host.summary(),
    }


class HostWatch:
    """Samples how busy the host's CPUs are and how much memory is in use, from /proc."""

    def __enter__(self) -> HostWatch:
        self._stop = threading.Event()
        self._used_gib: list[float] = []
        self._before = self._cpu()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._seconds = time.monotonic() - self._began
        self._busy = self._cpu() - self._before

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
        """Cores that were busy on average, and the most memory in use."""
        return {
            "busy_cores": round(self._busy / self._seconds, 2),
            "host_memory_gib": round(max(self._used_gib, default=0.0), 1),
        }


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
            store = folder / f"store-{gpus}"
            result = measure(arguments, target, gpus, store)
            shutil.rmtree(store)
            each = result["tokens_per_second"] / max(gpus, 1)
            alone = alone or each
            print(json.dumps({**result, "efficiency": round(each / alone, 4)}), flush=True)
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
