"""The layouts that `store.py` compares: how each writes and reads the samples, within a clock."""

from __future__ import annotations

import io
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
import zstandard
from safetensors.torch import load as load_safetensors
from safetensors.torch import load_file
from safetensors.torch import save as save_safetensors
from synthetic import synthetic_target
from torch import Tensor

from dflash_core.packing import plan_epoch
from dflash_core.records import CapturedSample, CaptureSpec, Sample
from storage.calibration import Calibration
from storage.cell import open_cell
from storage.codec import parse_codec
from storage.dataset import Dataset, DatasetSpec, create_dataset, open_dataset
from storage.objects import Store, open_store
from storage.reader import ReaderConfig, RowReader
from storage.shard_format import read_cells
from storage.writer import ShardWriter, WriterConfig

CODECS = ("lossless", "tolerance=0.1", "tolerance=0.3")
FILES = ("torch.save", "safetensors")
ROW_TOKENS = 4096
LEAD_IN, COUNTED = 3, 2
"""Epochs of a turn: until reading is as far ahead as it gets, and within the clock."""
States = list[dict[str, Tensor]]
"""One entry a sample: column -> bf16 [T, D]."""
Figures = dict[str, Any]


class Layout(NamedTuple):
    """One way to keep the samples in one place: what a process must know to write and to read them."""

    name: str
    uri: str
    states: Path
    """safetensors of all samples."""
    lengths: tuple[int, ...]
    columns: tuple[str, ...]
    width: int
    device: str
    threads: int
    fetch_threads: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def read_states(path: Path) -> States:
    found: dict[int, dict[str, Tensor]] = {}
    for name, states_TD in load_file(path).items():
        number, _, column = name.partition(".")
        found.setdefault(int(number), {})[column] = states_TD
    return [dict(sorted(found[number].items())) for number in sorted(found)]


@contextmanager
def clock(layout: Layout, result: Figures, times: int = 1) -> Iterator[None]:
    """Measure a block that handles all tokens so many times: seconds of one, and how much memory grew."""
    before = reset_peak()
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    result["seconds"] = round((time.perf_counter() - wall) / times, 4)
    result["cpu_s"] = round((time.process_time() - cpu) / times, 4)
    result["tokens_s"] = round(layout.tokens / result["seconds"])
    result["tokens_per_cpu_s"] = round(layout.tokens / result["cpu_s"])
    result["rss_MB"] = round((memory("VmHWM") - before) / 1e6)


def reset_peak() -> int:
    with suppress(OSError):  # some sandboxes forbid it
        Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


# Writing.


def write(layout: Layout) -> Figures:
    random = np.random.default_rng(0)
    samples = [
        Sample(
            sample_id=f"{number:06d}",
            token_ids_T=random.integers(0, 32_000, length).astype(np.int32),
            loss_mask_T=np.arange(length) > length // 4,
        )
        for number, length in enumerate(layout.lengths)
    ]
    store, states = open_store(layout.uri), read_states(layout.states)
    for columns in states:  # in memory before the clock runs, as after a forward
        for column, states_TD in columns.items():
            columns[column] = states_TD.to(layout.device, copy=True)
    result: Figures = {}
    if layout.name in FILES:
        with clock(layout, result):
            write_files(layout, store, samples, states)
        size = sum(info.size for info in store.list())
    else:
        dataset = prepare(layout, store, samples, states)
        with clock(layout, result):
            write_dataset(dataset, states, layout.threads)
        size = dataset.manifest().bytes
    return result | {"bytes_per_token": round(size / layout.tokens, 1)}


def write_files(layout: Layout, store: Store, samples: list[Sample], states: States) -> None:
    def write(number: int) -> None:
        sample = samples[number]
        content = {
            "token_ids": torch.from_numpy(sample.token_ids_T),
            "loss_mask": torch.from_numpy(sample.loss_mask_T),
            **{column: states_TD.cpu() for column, states_TD in states[number].items()},
        }
        if layout.name == "torch.save":
            buffer = io.BytesIO()
            torch.save(content, buffer)
            store.put_bytes(f"{number:06d}.pt", buffer.getvalue())
        else:
            store.put_bytes(f"{number:06d}.safetensors", save_safetensors(content))

    with ThreadPoolExecutor(layout.threads) as pool:
        list(pool.map(write, range(len(samples))))


def prepare(layout: Layout, store: Store, samples: list[Sample], states: States) -> Dataset:
    taps = tuple(int(column.removeprefix("layer_")) for column in layout.columns)
    spec = DatasetSpec(
        target=synthetic_target(layout.width),
        capture=CaptureSpec(tap_layer_ids=taps),
        codec=layout.name,
        input_sha256="0",
        shard_tokens=16_384,
        row_group_fill_bytes=0,  # a row group a sample, as it is where states are as wide as a 27B target's
    )
    dataset = create_dataset(store, "benchmark", spec, samples)
    if parse_codec(layout.name).needs_scales:
        calibration = Calibration()
        for number in range(max(1, len(dataset.calibration_samples()) // 3)):
            calibration.add(states[number])
        dataset.publish_scales(calibration.scales())
    return dataset


def write_dataset(dataset: Dataset, states: States, threads: int) -> None:
    for shard in dataset.missing():
        with ShardWriter(dataset, shard, None, WriterConfig(threads=threads)) as writer:
            for sample in dataset.samples(shard):
                writer.add(CapturedSample(sample=sample, states=states[int(sample.sample_id)]))
            writer.close()
    dataset.seal()


# Reading.


class Files:
    """Reads one of the file layouts."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._store = layout, open_store(layout.uri)
        self.rows = plan_epoch(np.array(layout.lengths), seed=0, epoch=0, row_tokens=ROW_TOKENS)
        shape = (ROW_TOKENS, layout.width * len(layout.columns))
        self._row_CE = torch.zeros(shape, dtype=torch.bfloat16, device=layout.device)
        on_host = layout.device == "cpu"
        self._host_CE = self._row_CE if on_host else torch.zeros(shape, dtype=torch.bfloat16).pin_memory()

    def open(self, epochs: int) -> AbstractContextManager[Iterator[Tensor]]:
        return closing(self._filled(self.rows * epochs))

    def _filled(self, rows: list[np.ndarray]) -> Generator[Tensor, None, None]:
        """Do what a loader of such files does: fetch and parse ahead in threads, copy into the row."""
        threads, columns, host_CE = self._layout.threads, self._layout.columns, self._host_CE
        with ThreadPoolExecutor(threads) as pool:
            order = iter([int(number) for row in rows for number in row])
            ahead = deque(pool.submit(self._read, number) for number in islice(order, 2 * threads))
            for row in rows:
                start = 0
                for _ in row:
                    found = ahead.popleft().result()
                    if (following := next(order, None)) is not None:
                        ahead.append(pool.submit(self._read, following))
                    stop = start + len(found["token_ids"])
                    torch.cat([found[column] for column in columns], dim=1, out=host_CE[start:stop])
                    start = stop
                yield host_CE if host_CE is self._row_CE else self._row_CE.copy_(host_CE)

    def _read(self, number: int) -> dict[str, Tensor]:
        if self._layout.name == "torch.save":
            return torch.load(io.BytesIO(self._store.get(f"{number:06d}.pt")), weights_only=True)
        return load_safetensors(self._store.get(f"{number:06d}.safetensors"))


class Shards:
    """Reads a data set of the store."""

    def __init__(self, layout: Layout) -> None:
        self._device, self._dataset = layout.device, open_dataset(layout.uri)
        self._dataset.manifest()
        index = self._dataset.index
        groups = index.shard_N.astype(np.int64) << 32 | index.row_group_N
        self.rows = plan_epoch(index.tokens_N, seed=0, epoch=0, row_tokens=ROW_TOKENS, group_S=groups)
        size = sum(record.size for record in self._dataset.records().values())
        self._config = ReaderConfig(
            threads=layout.threads,
            fetch_threads=layout.fetch_threads,
            # No more than half of the data set: every epoch reads all of it again.
            prefetch_bytes=min(ReaderConfig().prefetch_bytes, size // 2),
        )

    @contextmanager
    def open(self, epochs: int) -> Iterator[Iterator[Tensor]]:
        with RowReader(
            self._dataset,
            self._dataset.columns,
            self.rows * epochs,
            row_tokens=ROW_TOKENS,
            device=self._device,
            config=self._config,
        ) as reader:
            yield (states_CE for _, states_CE in reader)

    def seconds_of_zstd(self) -> float:
        """Processor seconds that zstandard alone takes for all frames of all cells, on one thread."""
        decompressor, seconds = zstandard.ZstdDecompressor(), 0.0
        for record in self._dataset.records().values():
            for group in record.row_groups:
                data = memoryview(self._dataset.store.get_range(record.object, group.offset, group.size))
                chunks = [data[start - group.offset :][:size] for start, size, _ in group.chunks[1:]]
                cells = [cell for chunk in chunks for cell in read_cells(chunk, group.rows)]
                frames = [frame for cell in cells for frame in open_cell(cell).frames]
                began = time.thread_time()
                for frame in frames:
                    decompressor.decompress(frame)
                seconds += time.thread_time() - began
        return seconds


@cache
def source_of(layout: Layout) -> Files | Shards:
    """Open a layout, once in a process."""
    return Files(layout) if layout.name in FILES else Shards(layout)


def read_from_disk(layout: Layout) -> Figures:
    """Read epochs in the middle of a run whose data no page cache holds.

    Dropping what a row has left in the page cache takes time, four times as much where four times as much was
    read; where memory is short the kernel takes it.
    """
    with ExitStack() as stack:
        paths = (path for path in Path(layout.uri).rglob("*") if path.is_file())
        files = [stack.enter_context(path.open("rb")) for path in paths]
        for file in files:
            os.fsync(file.fileno())
        return read_cached(layout, lambda: forget_pages(files))


def read_cached(layout: Layout, before_row: Callable[[], None] = lambda: None) -> Figures:
    """Read epochs in the middle of a run: reading is as far ahead when the clock starts as when it stops."""
    source, result = source_of(layout), Figures()

    def read_epochs(number: int) -> None:
        for _ in range(number * len(source.rows)):
            before_row()
            touch(next(filled))

    with source.open(LEAD_IN + COUNTED + 1) as filled:
        read_epochs(LEAD_IN)
        with clock(layout, result, COUNTED):
            read_epochs(COUNTED)
    return result | without_zstd(layout, source, result)


def without_zstd(layout: Layout, source: Files | Shards, result: Figures) -> Figures:
    if isinstance(source, Files):
        return {}
    zstd = source.seconds_of_zstd()
    without = max(result["cpu_s"] - zstd, 1e-3)
    return {
        "zstd_cpu_s": round(zstd, 4),
        "cpu_s_without_zstd": round(without, 4),
        "tokens_per_cpu_s_without_zstd": round(layout.tokens / without),
    }


def touch(states_CE: Tensor) -> None:
    """Look at the row, so that it has to be there."""
    float(states_CE[:: ROW_TOKENS // 8].float().sum())


def forget_pages(files: Sequence[BinaryIO]) -> None:
    """Drop these files from the page cache."""
    for file in files:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
