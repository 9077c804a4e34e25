"""Rows planned from lengths, and cells found in raw bytes, against pyarrow's reader and the obvious loops."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from storage.cell import CellHeader, CodecError, Kind, Layout, pack_cell
from storage.shard_format import (
    RowHead,
    ShardCorrupt,
    ShardFile,
    ShardRecord,
    open_cells,
    plan_rows,
    read_cells,
    read_head,
    record_row_group,
)
from tests.storage.made import made_dataset, made_samples, made_spec, write_missing

COLUMNS = ("layer_001", "layer_004")


@pytest.mark.parametrize("max_tokens, fill_tokens", [(7, 3), (7, 7), (1, 1), (100, 20), (5, 0)])
def test_planned_rows_keep_their_promises(max_tokens: int, fill_tokens: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 200).tolist()
    rows = plan_rows(lengths, max_tokens, fill_tokens)
    for sample, length in enumerate(lengths):
        parts = [row for row in rows if row.sample == sample]
        assert [p.part for p in parts] == list(range(len(parts))) and {p.parts for p in parts} == {len(parts)}
        assert [parts[0].start, *(p.stop for p in parts)] == [0, *(p.start for p in parts[1:]), length]
        assert [p.row_group for p in parts] == list(
            range(parts[0].row_group, parts[0].row_group + len(parts))
        )
        assert all(p.row == 0 for p in parts[1:])
    for number, (_, grouped) in enumerate(itertools.groupby(rows, lambda row: row.row_group)):
        group = list(grouped)
        assert {row.row_group for row in group} == {number}
        assert [row.row for row in group] == list(range(len(group)))
        sizes = [row.stop - row.start for row in group]
        assert sum(sizes) <= max_tokens and (len(group) == 1 or sum(sizes[:-1]) < fill_tokens)


def test_a_sample_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 1"):
        plan_rows([3, 0], 8, 4)


def random_cell(random: np.random.Generator, width: int) -> bytes:
    header = CellHeader(kind=Kind.LOSSLESS, layout=Layout.BYTES, tokens=1, width=width, outliers=0, step=0.0)
    return pack_cell(header, np.frombuffer(random.bytes(header.payload_bytes), np.uint8))


def written(path: Path, group_sizes: list[int], longest: int) -> tuple[list, list]:
    """A shard file of random rows: per row group its record, heads and cells."""
    random = np.random.default_rng(1)
    records, content = [], []
    with path.open("w+b", buffering=0) as file:
        shard = ShardFile(file, COLUMNS, {"dflash": "{}"})
        for rows in group_sizes:
            heads = [
                RowHead(
                    f"chat {i} é",
                    i,
                    i + 1,
                    7 * i,
                    random.integers(-5, 9, i % 9).astype(np.int32),
                    random.random(i % 9) < 0.5,
                )
                for i in range(rows)
            ]
            cells = {
                c: [random_cell(random, int(random.integers(1, longest))) for _ in range(rows)]
                for c in COLUMNS
            }
            offset, size = shard.write_row_group(heads, cells)
            data = memoryview(os.pread(file.fileno(), size, offset))
            records.append(record_row_group(data, offset, 0, rows, 0, len(COLUMNS)))
            content.append((heads, cells))
        size, _ = shard.finish()
        assert size == path.stat().st_size
    return records, content


@pytest.mark.parametrize(
    "group_sizes, longest", [([1], 9), ([3, 1, 70], 3_000), ([5_000], 50), ([2], 2_000_000)]
)
def test_cells_are_found_where_pyarrow_finds_them(
    tmp_path: Path, group_sizes: list[int], longest: int
) -> None:
    records, content = written(tmp_path / "shard", group_sizes, longest)
    data, parquet = (tmp_path / "shard").read_bytes(), pq.ParquetFile(tmp_path / "shard")
    assert parquet.num_row_groups == len(records)
    for number, (record, (heads, cells)) in enumerate(zip(records, content, strict=True)):
        table = parquet.read_row_group(number)
        chunks = [data[offset : offset + size] for offset, size, _ in record.chunks]
        assert sum(map(len, chunks)) == record.size and record.chunks[0][0] == record.offset
        found = read_head(chunks[0], record.rows)
        assert [head[:4] for head in found] == [head[:4] for head in heads]
        for name, position in (("sample_id", 0), ("part", 1), ("parts", 2), ("first_token", 3)):
            assert table[name].to_pylist() == [head[position] for head in heads]
        for a, b in zip(found, heads, strict=True):
            assert (a.token_ids_T == b.token_ids_T).all() and (a.loss_mask_T == b.loss_mask_T).all()
        for chunk, column in zip(chunks[1:], COLUMNS, strict=True):
            assert [bytes(cell) for cell in read_cells(chunk, record.rows)] == cells[column]
            assert table[column].to_pylist() == cells[column]


def test_same_rows_same_bytes(tmp_path: Path) -> None:
    written(tmp_path / "a", [3, 9], 100)
    written(tmp_path / "b", [3, 9], 100)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_page_that_is_not_ours_is_refused() -> None:
    with pytest.raises((ValueError, IndexError)):
        read_cells(os.urandom(200), 3)
    header = bytes.fromhex("1500 1521 1521 2c15 0215 0015 0615 0600 00")  # its size: -17
    with pytest.raises(ValueError, match="chunk"):
        read_cells(header, 1)


@pytest.mark.parametrize("codec", ["lossless", "tolerance=0.1"])
def test_no_flipped_byte_and_no_other_cell_passes_for_what_was_written(tmp_path: Path, codec: str) -> None:
    dataset = made_dataset(tmp_path, made_spec(codec), made_samples(8, longest=9))
    write_missing(dataset)
    record = dataset.record(0)
    rows, chunk = record.row_groups[0].rows, 2
    offset, size, _ = record.row_groups[0].chunks[chunk]
    whole = dataset.store.get_range(record.object, offset, size)

    def read(data: bytes) -> list[bytes]:
        contents = []
        for cell in open_cells(record, 0, chunk, data, dataset.uri):
            contents.append(np.zeros(cell.header.payload_bytes, np.uint8))
            cell.unpack(contents[-1])
        return [content.tobytes() for content in contents]

    written, unnoticed = read(whole), 0
    assert len(written) == rows > 1
    for at in range(size):
        for mask in (1, 0x80, 0xFF):
            with contextlib.suppress(ShardCorrupt, CodecError):
                assert read(whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :]) == written
                unnoticed += 1
    assert unnoticed < 30  # in Parquet's page header, where it says nothing that matters
    for cut in (0, 1, size // 2, size - 1):
        with pytest.raises((ShardCorrupt, CodecError)):
            read(whole[:cut])
    views = read_cells(whole, rows)
    for others in (views[::-1], [views[0]] * rows):
        swapped = whole[: size - sum(len(view) + 4 for view in views)]  # the page's header
        swapped += b"".join(len(view).to_bytes(4, "little") + view for view in others)
        assert len(swapped) == size or others[0] is others[1]
        with pytest.raises((ShardCorrupt, CodecError)):
            read(swapped)
    with pytest.raises(ShardCorrupt):
        open_cells(record, 0, 1, whole, dataset.uri)  # another column's


def test_a_record_round_trips() -> None:
    record = ShardRecord(
        fingerprint="f",
        shard=3,
        object="shards/x",
        size=1,
        sha256="s",
        samples=1,
        rows=1,
        tokens=1,
        supervised=0,
        columns=("layer_001",),
        row_groups=(),
        relative_error={"layer_001": 0.1},
        error_sums={"layer_001": (0.1, 2.0, 0.3, 7.0)},
        column_bytes={"layer_001": 5},
        scales_sha256=None,
        versions={},
    )
    assert ShardRecord.model_validate_json(record.model_dump_json()) == record
