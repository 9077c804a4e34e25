"""Measures the planning of a data set: chats to tokens, to the input of each shard, to a plan.

python benchmarks/plan.py --chats 200000

Chats of realistic lengths (log-normal, median about 1,100 tokens, two to six turns of English words) are
written to a .jsonl file and planned into a local folder with the tokenizer and template of the demo's target,
or those of --target. Prints JSON: chats/s and tokens/s, chats by processor second, resident memory before and
at its peak, the seconds that the fingerprint of the file takes, and those of opening the finished plan again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import tokenizers
import transformers

from flows.config import ExtractConfig
from flows.extract_plan import plan_dataset
from storage.chats import input_fingerprint

ROOT = Path(__file__).resolve().parent.parent
WORDS_MEDIAN, WORDS_SPREAD, WORDS_MOST = 800, 0.8, 3000


def write_chats(path: Path, count: int) -> None:
    """Write so many different chats."""
    prompts = (ROOT / "configs/demo/prompts_train.jsonl").read_text().splitlines()
    text = " ".join(turn["content"] for line in prompts for turn in json.loads(line)["messages"])
    words = np.array(text.split(), dtype=object)
    draw = np.random.default_rng(0)
    with path.open("w") as file:
        for i in range(count):
            length = int(np.clip(draw.lognormal(np.log(WORDS_MEDIAN), WORDS_SPREAD), 20, WORDS_MOST))
            turns = 2 * int(draw.integers(1, 4))
            parts = np.array_split(words[draw.integers(0, len(words), length)], turns)
            messages = [
                {"role": "assistant" if turn % 2 else "user", "content": " ".join(part)}
                for turn, part in enumerate(parts)
            ]
            file.write(json.dumps({"id": f"chat-{i}", "messages": messages}) + "\n")


def memory_mb(name: str) -> float:
    """VmRSS (now) or VmHWM (the most so far) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(name))


def measure(folder: Path, target: Path, chats: int) -> dict[str, Any]:
    """Write the chats and plan them in this folder."""
    path = folder / "chats.jsonl"
    write_chats(path, chats)
    values = {
        "store": str(folder / "store"),
        "chats": [str(path)],
        "target": {"path": str(target), "num_taps": 5},
        "chat": {"max_length": 4096},
    }
    config = ExtractConfig.model_validate(values)
    began = time.monotonic()
    input_fingerprint(config.chats)
    fingerprint = time.monotonic() - began
    before = memory_mb("VmRSS")
    began, processor = time.monotonic(), time.process_time()
    plan = plan_dataset(config).plan
    seconds, processor = time.monotonic() - began, time.process_time() - processor
    peak = memory_mb("VmHWM")
    began = time.monotonic()
    plan_dataset(config)
    return {
        "chats": chats,
        "kept": plan.samples,
        "tokens": plan.tokens,
        "shards": len(plan.shards),
        "input_mb": round(path.stat().st_size / 1e6),
        "seconds": round(seconds, 1),
        "chats_per_s": round(chats / seconds),
        "tokens_per_s": round(plan.tokens / seconds),
        "processor_s": round(processor, 1),
        "chats_per_processor_s": round(chats / processor),
        "rss_before_mb": round(before),
        "rss_peak_mb": round(peak),
        "fingerprint_s": round(fingerprint, 2),
        "open_again_s": round(time.monotonic() - began, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chats", type=int, default=200_000)
    parser.add_argument("--target", type=Path, help="folder of a target with tokenizer and template")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dflash-plan-"))
    try:
        target = args.target or folder / "target"
        # In another process, whose memory is not ours.
        subprocess.run([sys.executable, "-m", "flows.demo_target", str(target)], cwd=ROOT, check=True)
        result = measure(folder, target, args.chats)
    finally:
        shutil.rmtree(folder)
    names = {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__}
    versions = {"python": platform.python_version(), **names}
    print(json.dumps({**result, "cores": os.cpu_count(), "versions": versions}, indent=1))


if __name__ == "__main__":
    main()
