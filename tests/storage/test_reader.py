"""The reader gives what was written, row by row, in bounded memory; nothing corrupt ever becomes a tensor."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from dflash_core.configuration import UserError
from dflash_core.packing import pack_tokens, plan_epoch
from dflash_core.records import CapturedSample, CaptureSpec, Sample
from storage.codec import parse_codec
from storage.dataset import Dataset, ShardCorrupt, create_dataset, open_dataset
from storage.fetch import GroupFetcher, GroupKey
from storage.objects import StoreError, open_store
from storage.reader import ReaderConfig, RowReader
from storage.writer import ShardWriter
from tests.storage.made import (
    TARGET,
    WIDTH,
    capture,
    contents,
    made_dataset,
    made_samples,
    made_spec,
    made_states,
    write_missing,
)

ROW_TOKENS = 64
CODECS = ["lossless", "fp8", "tolerance=0.1", "tolerance=0.3"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Codec -> folder of a finished data set; read only."""
    folders = {}
    for codec in CODECS:
        dataset = made_dataset(tmp_path_factory.mktemp("store"), made_spec(codec), made_samples(25))
        write_missing(dataset)
        folders[codec] = Path(dataset.uri.removeprefix("file://"))
    return folders


def copied(stores: dict[str, Path], codec: str, tmp_path: Path) -> Dataset:
    """A data set of one's own, to damage."""
    return open_dataset(shutil.copytree(stores[codec], tmp_path / stores[codec].name))


def object_of(dataset: Dataset, shard: int) -> Path:
    return Path(dataset.uri.removeprefix("file://")) / dataset.record(shard).object


def planned_rows(dataset: Dataset, seed: int = 0) -> list[np.ndarray | None]:
    index = dataset.index
    groups = index.shard_N.astype(np.int64) * 1000 + index.row_group_N
    return list(plan_epoch(index.tokens_N, seed=seed, epoch=0, row_tokens=ROW_TOKENS, group_S=groups))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("columns", [(1, 3, 5), (5, 1)])
def test_rows_hold_the_states_of_their_samples(
    stores: dict[str, Path], codec: str, columns: tuple[int, ...]
) -> None:
    dataset = open_dataset(stores[codec])
    names = [f"layer_{i:03d}" for i in columns]
    samples = {s.sample_id: s for shard in range(len(dataset.plan.shards)) for s in dataset.samples(shard)}
    scales = dataset.scales() or {}
    rows = [*planned_rows(dataset), None, np.zeros(0, np.int64), np.array([3])]
    read = 0
    with RowReader(dataset, names, rows, row_tokens=ROW_TOKENS, device="cpu") as reader:
        for row, (packed, states_CE) in zip(rows, reader, strict=True):
            read += 1
            assert reader.rows_read == read
            chosen = [] if row is None else [samples[dataset.index.sample_ids[i].as_py()] for i in row]
            expected = pack_tokens(chosen, ROW_TOKENS)
            for field in ("token_ids_C", "loss_mask_C", "document_C", "position_C", "starts_N"):
                assert np.array_equal(getattr(packed, field), getattr(expected, field))
            assert packed.sample_ids == expected.sample_ids
            assert states_CE.shape == (ROW_TOKENS, len(names) * WIDTH) and states_CE.dtype == torch.bfloat16
            assert not states_CE[packed.num_tokens :].any()
            for i, sample in enumerate(chosen):
                span = slice(int(packed.starts_N[i]), int(packed.starts_N[i + 1]))
                made = made_states(sample, dataset.columns)
                for j, name in enumerate(names):
                    got = states_CE[span, j * WIDTH : (j + 1) * WIDTH]
                    if codec == "lossless":
                        assert torch.equal(got, made[name])
                    elif name in scales:
                        error = ((got.float() - made[name].float()) / scales[name]).square().mean().sqrt()
                        assert error < 1.5 * parse_codec(codec).tolerance
    assert read == len(rows)
    assert {i for row in rows[:-1] if row is not None for i in row} == set(range(len(samples)))


@pytest.mark.parametrize("codec", CODECS)
def test_without_numba_rows_are_the_same(
    stores: dict[str, Path], codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    dataset = open_dataset(stores[codec])

    def read() -> list[torch.Tensor]:
        rows = planned_rows(dataset)
        with RowReader(dataset, dataset.columns, rows, row_tokens=ROW_TOKENS, device="cpu") as reader:
            return [states_CE.view(torch.int16).clone() for _, states_CE in reader]

    in_one_pass = read()
    monkeypatch.setattr("storage.codec.cpu_kernels", lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(in_one_pass, read(), strict=True))


@pytest.mark.parametrize("kept", ["before_final_norm", "after_final_norm"])
def test_the_last_hidden_state_is_a_column_that_says_which_it_is(tmp_path: Path, kept: str) -> None:
    spec = made_spec(
        "lossless", capture=CaptureSpec.model_validate({"tap_layer_ids": (1, 3), "last_hidden": kept})
    )
    made = made_dataset(tmp_path, spec, made_samples(10))
    write_missing(made)
    dataset = open_dataset(made.uri)
    assert dataset.columns == ("layer_001", "layer_003", "last_hidden")
    assert dataset.spec.capture.last_hidden == kept
    assert f'"last_hidden": "{kept}"' in pq.read_metadata(object_of(dataset, 0)).metadata[b"dflash"].decode()
    samples = [s for shard in range(len(dataset.plan.shards)) for s in dataset.samples(shard)]
    rows = [np.array([i]) for i in range(len(samples))]
    with RowReader(dataset, ["last_hidden"], rows, row_tokens=ROW_TOKENS, device="cpu") as reader:
        for sample, (_, states_CE) in zip(samples, reader, strict=True):
            states_TD = made_states(sample, dataset.columns)["last_hidden"]
            assert torch.equal(states_CE[: sample.num_tokens].view(torch.int16), states_TD.view(torch.int16))


def test_memory_and_threads_do_not_change_what_is_read(stores: dict[str, Path]) -> None:
    dataset = open_dataset(stores["tolerance=0.1"])
    rows = planned_rows(dataset)
    seen = []
    for config in (
        ReaderConfig(threads=1, fetch_threads=1, prefetch_bytes=1),
        ReaderConfig(threads=3, fetch_threads=2, prefetch_bytes=20_000),
        ReaderConfig(threads=8),
    ):
        with RowReader(
            dataset, dataset.columns, rows, row_tokens=ROW_TOKENS, device="cpu", config=config
        ) as reader:
            seen.append([(packed.sample_ids, states_CE.clone()) for packed, states_CE in reader])
    for other in seen[1:]:
        for (ids, states), (other_ids, other_states) in zip(seen[0], other, strict=True):
            assert ids == other_ids and torch.equal(states, other_states)


def test_a_row_stays_as_it_is_until_the_next_is_asked_for(stores: dict[str, Path]) -> None:
    dataset = open_dataset(stores["lossless"])
    with RowReader(
        dataset, dataset.columns, planned_rows(dataset), row_tokens=ROW_TOKENS, device="cpu"
    ) as reader:
        for _, states_CE in reader:
            copy = states_CE.clone()
            threading.Event().wait(0.02)
            assert torch.equal(copy, states_CE)


def test_a_reader_that_starts_late_gives_the_rest(stores: dict[str, Path]) -> None:
    dataset = open_dataset(stores["lossless"])
    rows = planned_rows(dataset)
    whole = [s.clone() for _, s in RowReader(dataset, dataset.columns, rows, row_tokens=64, device="cpu")]
    rest = [s.clone() for _, s in RowReader(dataset, dataset.columns, rows[3:], row_tokens=64, device="cpu")]
    assert all(torch.equal(a, b) for a, b in zip(whole[3:], rest, strict=True))


def test_leaving_early_stops_every_thread(stores: dict[str, Path]) -> None:
    dataset = open_dataset(stores["lossless"])
    before = threading.active_count()
    for rows_taken in (0, 1, 3):
        reader = RowReader(
            dataset, dataset.columns, planned_rows(dataset), row_tokens=ROW_TOKENS, device="cpu"
        )
        for _ in range(rows_taken):
            next(reader)
        reader.close()
        reader.close()
        assert threading.active_count() == before
        with pytest.raises(StopIteration):
            next(reader)


@pytest.mark.parametrize("codec", ["lossless", "tolerance=0.1"])
def test_a_flipped_byte_never_becomes_a_tensor(stores: dict[str, Path], tmp_path: Path, codec: str) -> None:
    dataset = copied(stores, codec, tmp_path)
    record, path = dataset.record(1), object_of(dataset, 1)
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    for group in record.row_groups:
        at = int(random.integers(group.offset, group.offset + group.size))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(ShardCorrupt, match=r"shard 1 .*rows? \d+.*dflash shards repair"):
            for _ in RowReader(
                dataset, dataset.columns, planned_rows(dataset), row_tokens=ROW_TOKENS, device="cpu"
            ):
                pass
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ShardCorrupt, match=r"shard 1 .*dflash shards repair"):
        list(RowReader(dataset, dataset.columns, planned_rows(dataset), row_tokens=ROW_TOKENS, device="cpu"))
    path.unlink()
    with pytest.raises(ShardCorrupt, match=r"shard 1 .*dflash shards repair"):
        list(RowReader(dataset, dataset.columns, planned_rows(dataset), row_tokens=ROW_TOKENS, device="cpu"))


def test_a_shard_in_the_place_of_another_is_refused(stores: dict[str, Path], tmp_path: Path) -> None:
    """Each is whole, and holds chats of this very data set."""
    dataset = copied(stores, "lossless", tmp_path)
    first, second = object_of(dataset, 0), object_of(dataset, 1)
    spare = tmp_path / "spare"
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    for shard in (0, 1):
        rows = [np.flatnonzero(dataset.index.shard_N == shard)[:1]]
        with (
            RowReader(dataset, dataset.columns, rows, row_tokens=ROW_TOKENS, device="cpu") as reader,
            pytest.raises(ShardCorrupt, match=rf"shard {shard} .*rows? \d+.*dflash shards repair"),
        ):
            next(reader)


def test_rows_before_the_corrupt_one_are_still_read(stores: dict[str, Path], tmp_path: Path) -> None:
    dataset = copied(stores, "lossless", tmp_path)
    rows = [np.array([0]), np.array([1]), np.array([len(dataset.index) - 1])]
    last = int(dataset.index.shard_N[-1])
    record, path = dataset.record(last), object_of(dataset, last)
    data = bytearray(path.read_bytes())
    for group in record.row_groups:
        data[group.offset + group.size - 1] ^= 1
    path.write_bytes(bytes(data))
    reader = RowReader(dataset, dataset.columns, rows, row_tokens=ROW_TOKENS, device="cpu")
    next(reader)
    next(reader)
    with pytest.raises(ShardCorrupt):
        next(reader)


def test_mistakes_are_named(stores: dict[str, Path], tmp_path: Path) -> None:
    dataset = open_dataset(stores["lossless"])
    with pytest.raises(UserError, match="does not hold layer_002"):
        RowReader(dataset, ["layer_001", "layer_002"], [], row_tokens=ROW_TOKENS, device="cpu")
    too_long = [np.arange(20)]
    with pytest.raises(UserError, match="do not fit"):
        list(RowReader(dataset, dataset.columns, too_long, row_tokens=ROW_TOKENS, device="cpu"))
    unscaled = made_dataset(tmp_path / "b", made_spec("lossless"), made_samples(3))
    with pytest.raises((UserError, StoreError), match="not extracted yet"):
        list(RowReader(unscaled, unscaled.columns, [np.array([0])], row_tokens=ROW_TOKENS, device="cpu"))


def test_fetching_holds_no_more_than_it_may_and_reads_a_shared_group_once(stores: dict[str, Path]) -> None:
    dataset = open_dataset(stores["lossless"])
    reads: list[tuple[str, int]] = []
    read_into = dataset.store.read_into

    def counted(key: str, start: int, buffer: memoryview) -> None:
        reads.append((key, start))
        read_into(key, start, buffer)

    dataset.store.read_into = counted  # type: ignore[method-assign]
    keys = [GroupKey(shard, group) for shard in range(3) for group in range(2)]
    sizes = {key: dataset.record(key.shard).row_groups[key.row_group].size for key in keys}
    limit = sum(sizes[key] for key in keys[:3])

    def uses() -> Iterator[GroupKey]:
        for key in keys:
            yield from (key, key)

    fetcher = GroupFetcher(dataset, dataset.columns, uses(), threads=2, limit_bytes=limit)
    held: list[GroupKey] = []
    for key in [key for key in keys for _ in range(2)]:
        fetched = fetcher.take(must=False)
        while fetched is None:
            fetcher.release(held.pop(0))
            fetched = fetcher.take(must=not held)
        assert fetched.result().record.shard == key.shard
        held.append(key)
        assert fetcher.held_bytes <= limit
    fetcher.close()
    assert len(reads) == len(set(reads)) == len(keys)


def test_only_the_wanted_columns_are_read(stores: dict[str, Path]) -> None:
    dataset = open_dataset(stores["lossless"])
    rows: list[np.ndarray | None] = [np.arange(4)]
    sizes: list[int] = []
    read_into = dataset.store.read_into

    def counted(key: str, start: int, buffer: memoryview) -> None:
        sizes.append(len(buffer))
        read_into(key, start, buffer)

    dataset.store.read_into = counted  # type: ignore[method-assign]
    list(RowReader(dataset, dataset.columns, rows, row_tokens=200, device="cpu"))
    everything, requests = sum(sizes), len(sizes)
    sizes.clear()
    list(RowReader(dataset, dataset.columns[:1], rows, row_tokens=200, device="cpu"))
    assert sum(sizes) < 0.5 * everything and len(sizes) == requests
    sizes.clear()
    list(RowReader(dataset, dataset.columns[2:], rows, row_tokens=200, device="cpu"))
    assert sum(sizes) < 0.5 * everything and len(sizes) == 2 * requests


def test_reading_from_s3_is_reading_from_a_folder(stores: dict[str, Path], s3_uri: str) -> None:
    local = open_dataset(stores["tolerance=0.1"])
    remote = open_store(s3_uri)
    for key, data in contents(local.store).items():
        remote.put_bytes(f"{stores['tolerance=0.1'].name}/{key}", data)
    rows = planned_rows(local)
    with (
        RowReader(local, local.columns, rows, row_tokens=ROW_TOKENS, device="cpu") as expected,
        RowReader(open_dataset(s3_uri), local.columns, rows, row_tokens=ROW_TOKENS, device="cpu") as found,
    ):
        for (_, a), (_, b) in zip(expected, found, strict=True):
            assert torch.equal(a, b)


def test_records_of_another_seal_are_refused(stores: dict[str, Path], tmp_path: Path) -> None:
    dataset = copied(stores, "lossless", tmp_path)
    path = Path(dataset.uri.removeprefix("file://")) / "records" / "00000.json"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ShardCorrupt, match="not the one that was sealed"):
        list(RowReader(dataset, dataset.columns, [np.array([0])], row_tokens=ROW_TOKENS, device="cpu"))


_MEMORY = """
import sys, time
from pathlib import Path
import numpy as np, torch
from storage.dataset import open_dataset
from storage.reader import ReaderConfig, RowReader
torch.set_num_threads(1)
dataset = open_dataset(sys.argv[1])
config = ReaderConfig(threads=2, fetch_threads=2, prefetch_bytes=8 << 20)
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
def read(samples):
    rows = [np.array([i]) for i in samples]
    with RowReader(dataset, dataset.columns, rows, row_tokens=1000, device="cpu", config=config) as reader:
        for _ in reader:
            time.sleep(0.02)  # a step; meanwhile the reader fetches as far ahead as it may
read(range(2))
before = peak()
read(range(len(dataset.index)))
print((peak() - before) // 1024)
"""


def test_memory_does_not_grow_with_the_data_set(tmp_path: Path) -> None:
    """150 MB of shards through a room of 8 MiB: the warm peak grows by less than 30 MiB."""
    spec = made_spec(
        "lossless",
        target=TARGET.model_copy(update={"hidden_size": 1024}),
        capture=CaptureSpec(tap_layer_ids=(1, 3)),
        shard_tokens=10_000,
        row_group_bytes=4 << 20,
        row_group_fill_bytes=2 << 20,
    )
    ones = np.ones(1000, np.int32)
    samples = [Sample(sample_id=str(i), token_ids_T=ones, loss_mask_T=ones == 1) for i in range(60)]
    dataset = create_dataset(open_store(tmp_path), "made", spec, samples)
    states = {column: torch.randn(1000, 1024).bfloat16() for column in dataset.columns}
    for shard in dataset.missing():
        with ShardWriter(dataset, shard) as writer:
            for sample in dataset.samples(shard):
                writer.add(CapturedSample(sample=sample, states=states))
            writer.close()
    dataset.seal()
    assert dataset.manifest().bytes > 150e6
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, dataset.uri],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert int(done.stdout) < 30, done.stdout


def test_a_process_that_forgets_its_reader_still_ends(stores: dict[str, Path]) -> None:
    program = f"""
import numpy as np
from storage.dataset import open_dataset
from storage.reader import RowReader
dataset = open_dataset({str(stores["lossless"])!r})
reader = RowReader(dataset, dataset.columns, [np.array([i]) for i in range(20)], row_tokens=64, device="cpu")
next(reader)
raise SystemExit(7)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 7


def test_capture_helper_is_what_the_writer_stored(stores: dict[str, Path]) -> None:
    """Guards the comparison above: the made-up states are not all equal."""
    dataset = open_dataset(stores["lossless"])
    states = capture(dataset.samples(0)[0], dataset).states
    assert not torch.equal(states[dataset.columns[0]], states[dataset.columns[1]])
