"""Measures how many tokens a second one process reads, and what that costs the work that runs beside it.

python benchmarks/reader.py --json
python benchmarks/reader.py --device cuda --tokens 49152 --row-tokens 49152 --threads 1,2,4,8,16 --json

Writes a data set of random states with realistic statistics (by default five taps of 5120 channels, the
shapes of a 27B target) to `--store`, a temporary folder unless given, then reads it over and over with each
number of decoding threads. Reported for each codec and number of threads: tokens_s, encoded_MB_s,
core_seconds_per_Mtoken (CPU time of the whole process, the pump and hashing included) and peak_rss_MB so
far.

On a GPU also: a loop of bf16 matrix products calibrated to last as long as a training step that eats
`--pace` tokens a second, alone and with the reader feeding it one row a step; step_loss is the part of the
speed that is lost.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from synthetic import synthetic_states

from dflash_core.records import CapturedSample, CaptureSpec, Sample, TargetSpec
from storage.codec import Calibration, parse_codec
from storage.dataset import Dataset, DatasetSpec, create_dataset
from storage.objects import open_store
from storage.reader import ReaderConfig, RowReader
from storage.writer import ShardWriter, WriterConfig

DISTINCT = 4
"""Documents of distinct states; the others repeat them (reading does not notice, making them takes long)."""


def write_dataset(arguments: argparse.Namespace, codec: str, root: str) -> tuple[Dataset, float]:
    """Create and write the data set; returns it and the tokens a second of the writer."""
    spec = DatasetSpec(
        target=TargetSpec(
            name="random",
            weights_sha256="0" * 64,
            tokenizer_sha256="0" * 64,
            model_type="qwen3",
            num_layers=64,
            hidden_size=arguments.width,
            vocab_size=1000,
            rope_theta=1e6,
        ),
        capture=CaptureSpec(tap_layer_ids=tuple(range(1, 1 + 12 * arguments.taps, 12))),
        codec=codec,
        input_sha256="0" * 64,
    )
    length = arguments.document_tokens
    tokens_T, mask_T = np.arange(length, dtype=np.int32) % 1000, np.ones(length, bool)
    samples = [
        Sample(sample_id=f"{i:06d}", token_ids_T=tokens_T, loss_mask_T=mask_T)
        for i in range(arguments.tokens // length)
    ]
    dataset = create_dataset(open_store(root), "random", spec, samples)
    device = arguments.device
    states = [
        {
            column: synthetic_states(length, arguments.width, 100 * i + j, device)
            for j, column in enumerate(dataset.columns)
        }
        for i in range(min(DISTINCT, len(samples)))
    ]
    if parse_codec(codec).needs_scales:
        calibration = Calibration()
        calibration.add(states[0])
        dataset.publish_scales(calibration.scales())
    config = WriterConfig(threads=arguments.writer_threads)
    started = time.perf_counter()
    for shard in dataset.missing():
        with ShardWriter(dataset, shard, None, config) as writer:
            for i, sample in enumerate(dataset.samples(shard)):
                writer.add(CapturedSample(sample=sample, states=states[i % len(states)]))
            writer.close()
    seconds = time.perf_counter() - started
    dataset.seal()
    return dataset, arguments.tokens / seconds


def endless_rows(dataset: Dataset, row_tokens: int, rows: int) -> list[np.ndarray | None]:
    """Rows of whole documents, over the data set again and again."""
    length = int(dataset.index.tokens_N[0])
    samples = np.arange(rows * (row_tokens // length)) % len(dataset.index)
    return list(samples.reshape(rows, -1))


def reader_of(arguments: argparse.Namespace, dataset: Dataset, threads: int, rows: int) -> RowReader:
    return RowReader(
        dataset,
        dataset.columns,
        endless_rows(dataset, arguments.row_tokens, rows),
        row_tokens=arguments.row_tokens,
        device=arguments.device,
        config=ReaderConfig(threads=threads, fetch_threads=arguments.fetch_threads),
    )


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def measure_speed(arguments: argparse.Namespace, dataset: Dataset, threads: int) -> dict[str, float]:
    """Read as fast as it goes for `--seconds`."""
    tokens = 0
    encoded = sum(record.size for record in dataset.records().values()) / dataset.plan.tokens
    with reader_of(arguments, dataset, threads, 1 << 16) as reader:
        for _ in range(2):
            next(reader)
        wait(arguments.device)
        started, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - started < arguments.seconds:
            packed, _ = next(reader)
            tokens += packed.num_tokens
        wait(arguments.device)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {
        "tokens_s": tokens / seconds,
        "encoded_MB_s": tokens * encoded / seconds / 1e6,
        "core_seconds_per_Mtoken": cpu / tokens * 1e6,
        "peak_rss_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


class MatrixLoop:
    """Stands for a training step: so many matrix products that they last as long as one."""

    def __init__(self, seconds: float) -> None:
        self.a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.a)
        self.repeats = 200
        self.step()
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.step()
        torch.cuda.synchronize()
        self.repeats = max(1, round(self.repeats * seconds / (time.perf_counter() - started)))

    def step(self) -> None:
        for _ in range(self.repeats):
            torch.mm(self.a, self.a, out=self.out)

    def run(self, steps: int, reader: RowReader | None) -> float:
        """Seconds for so many steps, the host never more than one step ahead."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        previous = None
        for _ in range(steps):
            if reader is not None:
                _, states_CE = next(reader)
                self.out[0, :64] = states_CE[0, :64]
            self.step()
            done = torch.cuda.current_stream().record_event()
            if previous is not None:
                previous.synchronize()
            previous = done
        torch.cuda.synchronize()
        return time.perf_counter() - started


def measure_loss(arguments: argparse.Namespace, dataset: Dataset, threads: int) -> dict[str, float]:
    """What reading at the pace of training takes from the step; timed in turns, so that clocks agree."""
    row_seconds = arguments.row_tokens / arguments.pace
    loop = MatrixLoop(row_seconds)
    steps = max(3, round(arguments.seconds / row_seconds))
    alone = beside = 0.0
    for _ in range(3):
        alone += loop.run(steps, None)
        with reader_of(arguments, dataset, threads, steps + 2) as reader:
            for _ in range(2):
                next(reader)
            beside += loop.run(steps, reader)
    return {
        "step_loss": 1 - alone / beside,
        "alone_step_ms": 1e3 * alone / steps / 3,
        "beside_step_ms": 1e3 * beside / steps / 3,
        "paced_tokens_s": arguments.row_tokens * steps * 3 / beside,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", help="where to write the data sets (default: a temporary folder)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--codecs", default="lossless,tolerance=0.1")
    parser.add_argument("--threads", default="1,2,4,8")
    parser.add_argument("--fetch-threads", type=int, default=8)
    parser.add_argument("--writer-threads", type=int, default=2)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8192, help="size of the data set")
    parser.add_argument("--document-tokens", type=int, default=2048)
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement")
    parser.add_argument("--pace", type=float, default=46_000.0, help="tokens a second of the step (GPU)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    report: dict[str, dict[str, Any]] = {}
    for codec in arguments.codecs.split(","):
        with tempfile.TemporaryDirectory() as folder:
            root = arguments.store or folder
            dataset, write_tokens_s = write_dataset(arguments, codec, root)
            size = sum(record.size for record in dataset.records().values())
            numbers: dict[str, Any] = {
                "bytes_per_token": size / dataset.plan.tokens,
                "write_tokens_s": write_tokens_s,
            }
            for threads in map(int, arguments.threads.split(",")):
                numbers[f"threads={threads}"] = measure_speed(arguments, dataset, threads)
                if arguments.device != "cpu":
                    numbers[f"threads={threads}"] |= measure_loss(arguments, dataset, threads)
                if not arguments.json:
                    print(codec, f"threads={threads}", numbers[f"threads={threads}"], flush=True)
            report[codec] = numbers
    if arguments.json:
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
