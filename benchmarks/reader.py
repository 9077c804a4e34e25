"""Measures how many tokens a second one process reads, and what that costs the work that runs beside it.

python benchmarks/reader.py --json
python benchmarks/reader.py --device cuda --tokens 49152 --row-tokens 49152 --threads 1,2,4,8,16 --json
python benchmarks/reader.py --device cuda --tokens 49152 --row-tokens 49152 --threads 8 --diagnose --json

Writes a data set of random states with realistic statistics (by default five taps of 5120 channels, the
shapes of a 27B target) to `--store`, a temporary folder unless given, then reads it over and over with each
number of decoding threads. The reader may hold half of the data set, so that every row is fetched and
verified again. Reported for each codec and number of threads: tokens_s, encoded_MB_s, core_seconds_per_Mtoken
(CPU time of the whole process, the pump and hashing included) and peak_rss_MB so far.

On a GPU also: a loop of bf16 matrix products calibrated to last as long as a training step that eats `--pace`
tokens a second, alone, with the reader feeding it one row a step, and alone again; each turn takes `--steps`
steps (half as many alone with `--diagnose`), timed on the GPU. step_loss is the part of the speed that is
lost, step_loss_median the same by the median step; feed_ms is what asking for a row takes on the host.
`--diagnose` measures parts of the reader in the same way: "host" fetches and decodes but leaves the GPU in
peace, "copies" copies the same symbols to the GPU for every row, "arithmetic" only makes states of symbols
that are there.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from synthetic import synthetic_states, synthetic_target
from torch import Tensor

from dflash_core.packing import pack_tokens
from dflash_core.records import CapturedSample, CaptureSpec, Sample
from storage.calibration import Calibration
from storage.cell import Cell
from storage.codec import parse_codec
from storage.dataset import Dataset, DatasetSpec, create_dataset
from storage.objects import open_store
from storage.pieces import Piece, RowEnd, Staging, pieces_of
from storage.reader import ReaderConfig, RowReader
from storage.rows import DevicePiece, DeviceRow, DeviceStates
from storage.writer import ShardWriter, WriterConfig

Reader = TypeVar("Reader", bound=RowReader)
DISTINCT = 4
"""Documents of distinct states; the others repeat them (reading does not notice, making them takes long)."""


def write_dataset(arguments: argparse.Namespace, codec: str, root: str) -> tuple[Dataset, float]:
    """Create and write the data set; returns it and the tokens a second of the writer."""
    spec = DatasetSpec(
        target=synthetic_target(arguments.width),
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


def reader_of(arguments: argparse.Namespace, dataset: Dataset, threads: int, kind: type[Reader]) -> Reader:
    size = sum(record.size for record in dataset.records().values())
    return kind(
        dataset,
        dataset.columns,
        endless_rows(dataset, arguments.row_tokens, 1 << 16),
        row_tokens=arguments.row_tokens,
        device=arguments.device,
        config=ReaderConfig(
            threads=threads, fetch_threads=arguments.fetch_threads, prefetch_bytes=min(1 << 30, size // 2)
        ),
    )


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def measure_speed(arguments: argparse.Namespace, dataset: Dataset, threads: int) -> dict[str, float]:
    """Read as fast as it goes for `--seconds`."""
    tokens = 0
    encoded = sum(record.size for record in dataset.records().values()) / dataset.plan.tokens
    with reader_of(arguments, dataset, threads, RowReader) as reader:
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

    def run(self, steps: int, feed: Callable[[], Tensor] | None = None) -> Turn:
        """Run so many steps, each with a row of `feed`; the host is never more than one step ahead."""
        torch.cuda.synchronize()
        marks, feed_s = [_mark()], 0.0
        for _ in range(steps):
            if feed is not None:
                started = time.perf_counter()
                states_CE = feed()
                feed_s += time.perf_counter() - started
                self.out[0, :64] = states_CE[0, :64]
            self.step()
            marks[-1].synchronize()
            marks.append(_mark())
        torch.cuda.synchronize()
        return Turn([a.elapsed_time(b) for a, b in pairwise(marks)], 1e3 * feed_s / steps)


class Turn(NamedTuple):
    """What so many steps took."""

    step_ms: list[float]
    feed_ms: float


def _mark() -> torch.cuda.Event:
    return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True, blocking=True))


class IdleRow(DeviceRow):
    """Leaves the GPU alone."""

    def copy(self, decoded: DevicePiece) -> None:
        """Copy nothing."""

    def states(self) -> Tensor:
        return self._target.states_CE


class HostReader(RowReader):
    """Fetches and decodes, and stops there."""

    row: type[DeviceRow] = IdleRow

    def _new_memory(self) -> list[DeviceRow]:
        assert self._copies is not None
        target = DeviceStates(self._shape)
        return [self.row(self._shape, target, self._copies) for _ in range(2)]


class CopiedRow(DeviceRow):
    """Makes no states."""

    def states(self) -> Tensor:
        self._copied.wait(self._current())
        self._used.record(self._current())
        return self._target.states_CE


class CopyReader(HostReader):
    """Copies the pieces of one decoded row for every row."""

    row = CopiedRow

    def _fill_rows(self) -> None:
        pieces: list[DevicePiece] = []
        packed = pack_tokens([], self._row_tokens)
        while not self._closed.is_set():
            row = self._new_row(must=True)
            assert row is not None and isinstance(row.memory, DeviceRow)
            pieces = pieces or decoded_row(self, row.memory)
            for decoded in pieces:
                row.memory.copy(decoded)
            row.memory.end(self._row_tokens)
            self._ready.put((packed, row.memory))


class KeepingRow:
    """Keeps what it is given to write, decoded, each piece in memory of its own."""

    def __init__(self, row: DeviceRow) -> None:
        self._row = row
        self.pieces: list[DevicePiece] = []

    def write(self, piece: Piece, cells: Sequence[Cell], staging: Staging) -> None:
        """Decode and keep a piece."""
        self.pieces.append(self._row.decode(piece, cells, Staging(pinned=True)))


def decoded_row(reader: RowReader, row: DeviceRow) -> list[DevicePiece]:
    """Decode the first row of a reader that has not begun."""
    sink = KeepingRow(row)
    for item in pieces_of(reader._dataset, reader._rows, reader._row_tokens):
        if isinstance(item, RowEnd):
            break
        fetched = reader._fetcher.take(must=True)
        assert fetched is not None
        reader._decoder.start(item, fetched, sink).result()
        reader._fetcher.release(item.key)
    return sink.pieces


@contextmanager
def fed_by(reader: RowReader) -> Iterator[Callable[[], Tensor]]:
    """Give the rows of a reader that is in full swing."""
    with reader:
        for _ in range(2):
            next(reader)
        while reader._ready.empty():  # the first step must not wait for the reader's start
            time.sleep(0.01)
        yield lambda: next(reader)[1]


@contextmanager
def fed_by_arithmetic(reader: HostReader) -> Iterator[Callable[[], Tensor]]:
    """Give one row again and again, made of its symbols each time."""
    with reader:
        reader.row = DeviceRow
        memory = reader._new_memory()[0]
        memory.begin()
        for decoded in decoded_row(reader, memory):
            memory.copy(decoded)
        memory.end(reader._row_tokens)
        memory.states()
        yield memory.states


def measure_loss(arguments: argparse.Namespace, dataset: Dataset, threads: int) -> dict[str, Any]:
    """What reading at the pace of training takes from the step; in turns, so that clocks agree."""
    loop = MatrixLoop(arguments.row_tokens / arguments.pace)

    def reader(kind: type[Reader]) -> Reader:
        return reader_of(arguments, dataset, threads, kind)

    ways = {"reader": lambda: fed_by(reader(RowReader))}
    if arguments.diagnose:
        ways = {
            "host": lambda: fed_by(reader(HostReader)),
            "copies": lambda: fed_by(reader(CopyReader)),
            "arithmetic": lambda: fed_by_arithmetic(reader(HostReader)),
        } | ways
    report: dict[str, Any] = {}
    alone_steps = arguments.steps // (2 if arguments.diagnose else 1)
    alone = loop.run(alone_steps).step_ms
    for name, way in ways.items():
        with way() as feed:
            step_ms, feed_ms = loop.run(arguments.steps, feed)
        before, alone = alone, loop.run(alone_steps).step_ms
        around = before + alone
        report[name] = {
            "step_loss": 1 - mean(around) / mean(step_ms),
            "step_loss_median": 1 - median(around) / median(step_ms),
            "feed_ms": feed_ms,
            "step_ms": [round(ms, 1) for ms in step_ms],
            "alone_step_ms": [round(ms, 1) for ms in around],
            "paced_tokens_s": 1e3 * arguments.row_tokens / mean(step_ms),
        }
    return report.pop("reader") | ({"parts": report} if report else {})


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
    parser.add_argument("--steps", type=int, default=8, help="of each turn beside the step (GPU)")
    parser.add_argument("--diagnose", action="store_true", help="also measure parts of the reader (GPU)")
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
