"""Measures the store against the layouts in common use: one torch.save or safetensors file a sample.

python benchmarks/store.py --json
python benchmarks/store.py --states FILE --json    # real states, of `benchmarks/codec.py --cache FILE`

The same samples are written and read in five ways (torch.save, safetensors, and the store with the codecs
lossless, tolerance=0.1 and tolerance=0.3) to

  local    a local folder
  s3       a real S3 server (SeaweedFS, started here: it competes for the same cores, and nothing is far)
  s3-far   the same server behind a relay that answers after 20 ms and carries 80 MB/s a connection

Reading follows the plan of a training epoch and fills packed rows [C, L*D] with the bf16 states of all
layers; `--threads` files, parts or row groups are on their way at a time in every layout (row groups of the
store: `--fetch-threads`, where that is given).

Reported for each: write and read tokens_s, cpu_s (of this process, without the server), bytes_per_token, and
rss_MB: how much the peak of resident memory grew. "read" of a local folder starts with nothing in the page
cache; "read_cached", and "read" from S3, are the mean of `--epochs` epochs after one that does not count.
"cpu_s_without_zstd" leaves out what zstandard takes to decode the same cells. `ratios` compares with the two
file layouts; above 1 the store is better. In common use nobody syncs such files to the disk; here every
layout does.

With `--device cuda` states come from the GPU and rows go there, the arithmetic of the codecs runs there, and
all phases share one process (rss_MB then says little).
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
import zstandard
from far import far_away
from safetensors.torch import load as load_safetensors
from safetensors.torch import load_file, save_file
from safetensors.torch import save as save_safetensors
from synthetic import synthetic_states
from torch import Tensor

from dflash_core.packing import plan_epoch
from dflash_core.records import CapturedSample, CaptureSpec, Sample, TargetSpec, tap_column
from storage.cell import HEADER, SECTION
from storage.codec import Calibration, parse_codec
from storage.dataset import Dataset, DatasetSpec, create_dataset, open_dataset
from storage.objects import Store, open_store
from storage.reader import ReaderConfig, RowReader
from storage.shard_format import read_cells
from storage.writer import ShardWriter, WriterConfig

CODECS = ("lossless", "tolerance=0.1", "tolerance=0.3")
FILES = ("torch.save", "safetensors")
ROW_TOKENS = 4096
PREFETCH_BYTES = 64 << 20
"""At most, and no more than half of the data set: every epoch reads all of it again."""
States = list[dict[str, Tensor]]
"""One entry a sample: column -> bf16 [T, D]."""


def main() -> None:
    options = parse_options()
    work = Path(tempfile.mkdtemp(prefix="store-bench-", dir=options.work))
    try:
        report = run(options, work)
    finally:
        shutil.rmtree(work)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        print_report(report)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--states", type=Path, help="safetensors of real states named <sample>.<column>")
    parser.add_argument("--tokens", type=int, default=24_000, help="of random states, without --states")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--length", type=int, default=300, help="mean tokens of a sample")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument(
        "--fetch-threads", type=int, help="row groups on their way at a time (default: --threads)"
    )
    parser.add_argument("--device", default="cpu", help="where states come from and go to")
    parser.add_argument("--stores", default="local,s3,s3-far")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--work", type=Path, help="folder for what is written (default: the temporary one)")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def run(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    states = read_states(options) if options.states else random_states(options)
    save_file({f"{i}.{c}": t for i, sample in enumerate(states) for c, t in sample.items()}, work / "states")
    tokens = sum(len(next(iter(sample.values()))) for sample in states)
    about = {
        "samples": len(states),
        "tokens": tokens,
        "columns": len(states[0]),
        "width": next(iter(states[0].values())).shape[1],
        "bf16_bytes_per_token": sum(t.numel() * 2 for s in states for t in s.values()) / tokens,
        "states": str(options.states.name) if options.states else "random, with the statistics of real ones",
        "cores": len(os.sched_getaffinity(0)),
        "threads": options.threads,
        "device": options.device,
    }
    del states
    results: dict[str, dict[str, Any]] = {}
    for store in options.stores.split(","):
        with address_of(store, work) as uri:
            names = (*FILES, *CODECS)
            results[store] = {name: measure(name, store, uri, work, options) for name in names}
    ratios = {store: ratios_of(of_store) for store, of_store in results.items()}
    return {"data": about, "results": results, "ratios": ratios}


@contextmanager
def address_of(store: str, work: Path) -> Iterator[str]:
    if store == "local":
        yield str(work / "local")
        return
    from tests.storage.seaweed import running_server

    (work / store).mkdir()
    with running_server(work / store) as server, ExitStack() as stack:
        endpoint = stack.enter_context(far_away(server.port)) if store == "s3-far" else server.endpoint
        os.environ.update(server.environment_through(endpoint))
        yield server.uri


def read_states(options: argparse.Namespace) -> States:
    found: dict[int, dict[str, Tensor]] = {}
    for name, states_TD in load_file(options.states).items():
        number, _, column = name.partition(".")
        found.setdefault(int(number), {})[column] = states_TD
    return [dict(sorted(found[number].items())) for number in sorted(found)]


def random_states(options: argparse.Namespace) -> States:
    random = np.random.default_rng(0)
    states: States = []
    while (done := sum(len(next(iter(sample.values()))) for sample in states)) < options.tokens:
        length = min(
            int(random.integers(options.length // 3, 5 * options.length // 3)), options.tokens - done
        )
        columns = [tap_column(layer) for layer in range(options.layers)]
        seeds = [1000 * len(states) + layer for layer in range(options.layers)]
        states.append(
            {
                c: synthetic_states(length, options.width, s, options.device).cpu()
                for c, s in zip(columns, seeds, strict=True)
            }
        )
    return states


# Measuring: each phase in a process of its own, so that its memory is its own.


def measure(name: str, store: str, uri: str, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    print(f"{store:>8} {name}", file=sys.stderr, flush=True)
    run = in_a_process if options.device == "cpu" else in_this_process
    result: dict[str, Any] = {"write": run(write_phase, name, uri, work, options)}
    result["bytes_per_token"] = result["write"].pop("bytes_per_token")
    epochs = options.epochs
    phases = {"read": 0, "read_cached": epochs} if store == "local" else {"read": epochs}
    for phase, counted in phases.items():
        result[phase] = run(read_phase, name, uri, work, options, counted)
    return result


def in_this_process(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    return work(*arguments)


def in_a_process(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


@contextmanager
def clock(tokens: int, times: int, result: dict[str, Any]) -> Iterator[None]:
    """Measure a block that does the same so many times: wall and processor time of one, growth of memory."""
    before = reset_peak()
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    result["seconds"] = round((time.perf_counter() - wall) / times, 3)
    result["cpu_s"] = round((time.process_time() - cpu) / times, 3)
    result["tokens_s"] = round(tokens / result["seconds"])
    result["tokens_per_cpu_s"] = round(tokens / result["cpu_s"])
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


def load_source(work: Path) -> tuple[list[Sample], States]:
    states = read_states(argparse.Namespace(states=work / "states"))
    random = np.random.default_rng(0)
    samples = []
    for number, columns in enumerate(states):
        length = len(next(iter(columns.values())))
        samples.append(
            Sample(
                sample_id=f"{number:06d}",
                token_ids_T=random.integers(0, 32_000, length).astype(np.int32),
                loss_mask_T=np.arange(length) > length // 4,
            )
        )
    return samples, states


def write_phase(name: str, uri: str, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    device, threads = options.device, options.threads
    samples, states = load_source(work)
    store = open_store(f"{uri}/{name.replace('=', '-')}")
    for columns in states:  # in memory before the clock runs, as after a forward
        for column, states_TD in columns.items():
            columns[column] = states_TD.to(device, copy=True)
    result: dict[str, Any] = {}
    tokens = sum(sample.num_tokens for sample in samples)
    if name in FILES:
        with clock(tokens, 1, result):
            write_files(name, store, samples, states, threads)
        size = sum(info.size for info in store.list())
    else:
        dataset = prepare(name, store, samples, states)
        with clock(tokens, 1, result):
            write_dataset(dataset, states, threads)
        size = dataset.manifest().bytes
    return result | {"bytes_per_token": round(size / tokens, 1)}


def write_files(name: str, store: Store, samples: list[Sample], states: States, threads: int) -> None:
    def write(number: int) -> None:
        sample = samples[number]
        content = {
            "token_ids": torch.from_numpy(sample.token_ids_T),
            "loss_mask": torch.from_numpy(sample.loss_mask_T),
            **{column: states_TD.cpu() for column, states_TD in states[number].items()},
        }
        if name == "torch.save":
            buffer = io.BytesIO()
            torch.save(content, buffer)
            store.put_bytes(f"{number:06d}.pt", buffer.getvalue())
        else:
            store.put_bytes(f"{number:06d}.safetensors", save_safetensors(content))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(len(samples))))


def prepare(codec: str, store: Store, samples: list[Sample], states: States) -> Dataset:
    columns = tuple(states[0])
    target = TargetSpec(
        name="benchmark",
        weights_sha256="0" * 64,
        tokenizer_sha256="0" * 64,
        model_type="qwen3",
        num_layers=64,
        hidden_size=states[0][columns[0]].shape[1],
        vocab_size=32_000,
        rope_theta=1e6,
    )
    taps = tuple(int(column.removeprefix("layer_")) for column in columns)
    spec = DatasetSpec(
        target=target,
        capture=CaptureSpec(tap_layer_ids=taps),
        codec=codec,
        input_sha256="0",
        shard_tokens=16_384,
        row_group_fill_bytes=0,  # a row group a sample, as it is where states are as wide as a 27B target's
    )
    dataset = create_dataset(store, "benchmark", spec, samples)
    if parse_codec(codec).needs_scales:
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


def read_phase(name: str, uri: str, work: Path, options: argparse.Namespace, epochs: int) -> dict[str, Any]:
    """Read one epoch, starting with nothing; or, with `epochs`, so many after one that does not count."""
    torch.set_num_threads(1)
    device, threads = options.device, options.threads
    where = f"{uri}/{name.replace('=', '-')}"
    samples, _ = load_source(work)
    lengths = [sample.num_tokens for sample in samples]
    rows = plan_epoch(np.array(lengths), seed=0, epoch=0, row_tokens=ROW_TOKENS)
    result: dict[str, Any] = {}
    if name in FILES:
        _, states = load_source(work)
        shape = (ROW_TOKENS, sum(t.shape[1] for t in states[0].values()))
        columns = tuple(states[0])
        del states
        row_CE = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        store = open_store(where)

        @contextmanager
        def reading() -> Iterator[Callable[[], None]]:
            all_rows = rows * (epochs + 2 if epochs else 1)
            with closing(read_files(name, store, all_rows, columns, row_CE, threads)) as filled:

                def read_epoch() -> None:
                    for _ in rows:
                        next(filled)

                yield read_epoch
    else:
        dataset = open_dataset(where)
        dataset.manifest()
        groups = dataset.index.shard_N.astype(np.int64) << 32 | dataset.index.row_group_N
        rows = plan_epoch(dataset.index.tokens_N, seed=0, epoch=0, row_tokens=ROW_TOKENS, group_S=groups)
        size = sum(record.size for record in dataset.records().values())
        prefetch_bytes = min(PREFETCH_BYTES, size // 2)
        fetches = options.fetch_threads or threads
        config = ReaderConfig(threads=threads, fetch_threads=fetches, prefetch_bytes=prefetch_bytes)

        @contextmanager
        def reading() -> Iterator[Callable[[], None]]:
            # It reads ahead when the clock starts, and as far when it stops.
            all_rows = rows * (epochs + 2 if epochs else 1)
            with RowReader(
                dataset, dataset.columns, all_rows, row_tokens=ROW_TOKENS, device=device, config=config
            ) as reader:

                def read_epoch() -> None:
                    for _, (_, states_CE) in zip(rows, reader, strict=False):
                        touch(states_CE)

                yield read_epoch

    if epochs:
        with reading() as read_epoch:
            read_epoch()
            with clock(sum(lengths), epochs, result):
                for _ in range(epochs):
                    read_epoch()
    else:
        forget_pages(Path(where))
        with clock(sum(lengths), 1, result), reading() as read_epoch:
            read_epoch()
    if name in FILES:
        return result
    zstd = seconds_of_zstd(dataset)
    without = max(result["cpu_s"] - zstd, 1e-3)
    return result | {
        "zstd_cpu_s": round(zstd, 3),
        "cpu_s_without_zstd": round(without, 3),
        "tokens_per_cpu_s_without_zstd": round(sum(lengths) / without),
    }


def read_files(
    name: str,
    store: Store,
    rows: list[np.ndarray],
    columns: tuple[str, ...],
    row_CE: Tensor,
    threads: int,
) -> Generator[None, None, None]:
    """What a loader of such files does: fetch and parse ahead in threads, copy into the row; a row a step."""

    def read(number: int) -> dict[str, Tensor]:
        if name == "torch.save":
            return torch.load(io.BytesIO(store.get(f"{number:06d}.pt")), weights_only=True)
        return load_safetensors(store.get(f"{number:06d}.safetensors"))

    host_CE = row_CE if row_CE.device.type == "cpu" else torch.zeros_like(row_CE, device="cpu").pin_memory()
    with ThreadPoolExecutor(threads) as pool:
        order = iter([int(number) for row in rows for number in row])
        ahead: deque[Future[dict[str, Tensor]]] = deque()
        for number in order:
            ahead.append(pool.submit(read, number))
            if len(ahead) >= 2 * threads:
                break
        for row in rows:
            start = 0
            for _ in row:
                found = ahead.popleft().result()
                if (following := next(order, None)) is not None:
                    ahead.append(pool.submit(read, following))
                stop = start + len(found["token_ids"])
                torch.cat([found[column] for column in columns], dim=1, out=host_CE[start:stop])
                start = stop
            touch(row_CE if host_CE is row_CE else row_CE.copy_(host_CE))
            yield


def touch(states_CE: Tensor) -> None:
    """Look at the row, so that it has to be there."""
    float(states_CE[:: ROW_TOKENS // 8].float().sum())


def forget_pages(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_of_zstd(dataset: Dataset) -> float:
    """Processor seconds that zstandard alone takes for all frames of all cells, on one thread."""
    decompressor, seconds = zstandard.ZstdDecompressor(), 0.0
    for record in dataset.records().values():
        for group in record.row_groups:
            for offset, size, _ in group.chunks[1:]:
                chunk = dataset.store.get_range(record.object, offset, size)
                frames = [frame for cell in read_cells(chunk, group.rows) for frame in frames_of(cell)]
                began = time.thread_time()
                for frame in frames:
                    decompressor.decompress(frame)
                seconds += time.thread_time() - began
    return seconds


def frames_of(cell: memoryview) -> list[memoryview]:
    count = cell[6]
    at = HEADER.size + count * SECTION.size + 4
    frames = []
    for number in range(count):
        size = SECTION.unpack_from(cell, HEADER.size + number * SECTION.size)[1]
        frames.append(cell[at : at + size])
        at += size
    return frames


# Reporting.


def ratios_of(results: dict[str, Any]) -> dict[str, Any]:
    """How many times better than each of the two file layouts; above 1 is better."""
    ratios: dict[str, Any] = {}
    for codec in CODECS:
        ours = results[codec]
        for files in FILES:
            theirs = results[files]
            found = {"smaller": theirs["bytes_per_token"] / ours["bytes_per_token"]}
            for phase in ("write", "read", "read_cached"):
                if phase in ours:
                    found[f"{phase}_tokens_s"] = ours[phase]["tokens_s"] / theirs[phase]["tokens_s"]
                    found[f"{phase}_per_cpu_s"] = theirs[phase]["cpu_s"] / ours[phase]["cpu_s"]
                if phase.startswith("read") and phase in ours:
                    without = ours[phase]["cpu_s_without_zstd"]
                    found[f"{phase}_per_cpu_s_without_zstd"] = theirs[phase]["cpu_s"] / without
            ratios.setdefault(codec, {})[f"over {files}"] = {k: round(v, 2) for k, v in found.items()}
    return ratios


def print_report(report: dict[str, Any]) -> None:
    print(json.dumps(report["data"]))
    for store, results in report["results"].items():
        print(f"\n{store:14} bytes/token   write tok/s  cpu s   read tok/s  cpu s  cached tok/s")
        for name, found in results.items():
            cached = found.get("read_cached", {}).get("tokens_s", "")
            print(
                f"{name:14} {found['bytes_per_token']:11,.0f} {found['write']['tokens_s']:13,} "
                f"{found['write']['cpu_s']:6.1f} {found['read']['tokens_s']:12,} "
                f"{found['read']['cpu_s']:6.1f} {cached:>13}"
            )
    print(json.dumps(report["ratios"], indent=1))


if __name__ == "__main__":
    main()
