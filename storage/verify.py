"""Checks what lies on the store against the commit records, shard by shard, and forgets what is corrupt."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import ValidationError

from storage.ahead import ahead
from storage.codec import Codec, CodecError, parse_codec
from storage.dataset import Dataset, DatasetError, ShardCorrupt
from storage.dataset_spec import INDEX_KEY, RECORDS, SCALES_FILE, SHARDS, samples_key
from storage.objects import ObjectInfo, ObjectNotFound, ObjectTruncated
from storage.shard_format import (
    SCALES_KEY,
    RowGroupRecord,
    ShardRecord,
    check_chunk,
    mend,
    read_cells,
    read_head,
)

Depth = Literal["sizes", "bytes", "cells"]
"""How far to look: sizes of objects; every byte by its digest; every cell decoded, every token compared."""
State = Literal["good", "missing", "corrupt", "unchecked"]

_READ_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFinding:
    """What was found of one shard."""

    shard: int
    state: State
    """Missing: not extracted yet. Corrupt: has a record and does not hold what it says. Unchecked: holds what
    it says, and what it should say is not known, for its input is gone or damaged."""
    bytes: int = 0
    """Size of the object, as committed."""
    problem: str = ""


def verify_dataset(
    dataset: Dataset, depth: Depth = "bytes", shards: Sequence[int] | None = None, threads: int = 4
) -> Iterator[ShardFinding]:
    """Check shards (default: all) in parallel and yield what is found, in their order.

    Memory: one row group and 16 MiB a thread. Raises DatasetError when plan or seal are not this data set's,
    and when the scales are damaged (which would make every shard look corrupt).
    """
    check_scales(dataset)
    if dataset.sealed:
        dataset.manifest()
    wanted = range(len(dataset.plan.shards)) if shards is None else shards
    yield from ahead(lambda shard: verify_shard(dataset, shard, depth), wanted, threads=threads)


def verify_shard(dataset: Dataset, shard: int, depth: Depth = "bytes") -> ShardFinding:
    """Check one shard against its commit record and, once the seal was read, the record against the seal."""
    if not dataset.committed(shard):
        return ShardFinding(shard=shard, state="missing", problem="not extracted yet")
    try:
        record = dataset.record(shard)
    except (DatasetError, ShardCorrupt) as error:
        return ShardFinding(shard=shard, state="corrupt", problem=str(error))
    try:
        _check_size(dataset, record)
        if depth != "sizes":
            _check_bytes(dataset, record)
        if depth == "cells":
            _check_cells(dataset, record)
    except DatasetError as error:
        problem = f"cannot be compared with its input: {error}"
        return ShardFinding(shard=shard, state="unchecked", bytes=record.size, problem=problem)
    except (ShardCorrupt, ObjectNotFound, ObjectTruncated) as error:
        return ShardFinding(shard=shard, state="corrupt", bytes=record.size, problem=str(error))
    return ShardFinding(shard=shard, state="good", bytes=record.size)


def orphans(dataset: Dataset) -> list[ObjectInfo]:
    """Objects below shards/ that no record names: never read, left by workers that lost or were killed.

    One of a shard that is still missing may belong to a worker that is about to commit it.
    """
    named = {record.object for record in dataset.iter_records()}
    return [info for info in dataset.store.list(SHARDS) if info.key not in named]


def named_now(dataset: Dataset, key: str) -> bool:
    """Whether the record of an object's shard names it: a redo may give old content its old name again.

    True also of a damaged record, which names what nobody knows.
    """
    shard = key.removeprefix(SHARDS).partition("-")[0]
    try:
        return bool(json.loads(dataset.store.get(f"{RECORDS}{shard}.json"))["object"] == key)
    except ObjectNotFound:
        return False
    except (ValueError, KeyError, TypeError):
        return True


def damaged_inputs(dataset: Dataset, depth: Depth = "bytes", threads: int = 4) -> list[str]:
    """Keys of the index and of shards' samples that are gone or not as planned.

    The plan knows their digests alone, so "sizes" finds only what is gone, and reads nothing.
    """
    wanted = {samples_key(planned.shard): planned.samples_sha256 for planned in dataset.plan.shards}
    wanted[INDEX_KEY] = dataset.plan.index_sha256

    def good(key: str) -> bool:
        try:
            if depth == "sizes":
                dataset.store.head(key)
                return True
            return hashlib.sha256(dataset.store.get(key)).hexdigest() == wanted[key]
        except ObjectNotFound:
            return False

    with ThreadPoolExecutor(threads) as pool:
        return [key for key, is_good in zip(wanted, pool.map(good, wanted), strict=True) if not is_good]


def check_scales(dataset: Dataset) -> None:
    """Raise DatasetError when the scales are not those that the shards were written with."""
    wanted = _committed_scales(dataset)
    if wanted is not None and dataset.scales_sha256 != wanted:
        raise DatasetError(
            f"{dataset.uri}/{SCALES_FILE} is gone or damaged; every shard carries a copy: "
            f"`dflash shards repair {dataset.uri}` puts it back"
        )


def restore_scales(dataset: Dataset) -> bool:
    """Put damaged scales back from a shard's footer. Raises DatasetError when no copy is good."""
    wanted = _committed_scales(dataset)
    if wanted is None or dataset.scales_sha256 == wanted:
        return False
    for info in dataset.store.list(SHARDS):
        with (
            suppress(pa.ArrowException, OSError, ObjectNotFound, ObjectTruncated, ValueError),
            dataset.store.open(info.key) as file,
        ):
            metadata = pq.ParquetFile(file).metadata.metadata
            copy = base64.b64decode(metadata[SCALES_KEY.encode()])
            if hashlib.sha256(copy).hexdigest() == wanted:
                dataset.store.put_bytes(SCALES_FILE, copy, overwrite=True)
                return True
    raise DatasetError(f"no shard of {dataset.uri} holds a good copy of the scales")


def _committed_scales(dataset: Dataset) -> str | None:
    """Digest of the scales that the shards were written with; None without shards or scales."""
    for info in dataset.store.list(RECORDS):
        with suppress(ValidationError):
            record = ShardRecord.model_validate_json(dataset.store.get(info.key))
            if record.fingerprint == dataset.fingerprint:
                return record.scales_sha256
    return None


def _check_size(dataset: Dataset, record: ShardRecord) -> None:
    size = dataset.store.head(record.object).size
    if size != record.size:
        text = f"shard {record.shard}: {record.object} has {size} bytes, not {record.size}"
        raise ShardCorrupt(f"{text}; {mend(dataset.uri)}")


def _check_bytes(dataset: Dataset, record: ShardRecord) -> None:
    """Hash the object as a whole; only when that fails, look for the row group and column."""
    sha256 = hashlib.sha256()
    buffer = memoryview(bytearray(min(_READ_BYTES, record.size)))
    for start in range(0, record.size, _READ_BYTES):
        view = buffer[: min(_READ_BYTES, record.size - start)]
        dataset.store.read_into(record.object, start, view)
        sha256.update(view)
    if sha256.hexdigest() == record.sha256:
        return
    for number, group in enumerate(record.row_groups):
        _read_row_group(dataset, record, number, group)
    raise ShardCorrupt(
        f"shard {record.shard}: {record.object} differs outside of its rows; {mend(dataset.uri)}"
    )


def _read_row_group(
    dataset: Dataset, record: ShardRecord, number: int, group: RowGroupRecord
) -> list[memoryview]:
    """Read one row group's chunks, checked."""
    data = memoryview(dataset.store.get_range(record.object, group.offset, group.size))
    chunks = []
    for position, (offset, size, _) in enumerate(group.chunks):
        chunk = data[offset - group.offset : offset - group.offset + size]
        check_chunk(record, number, position, chunk, dataset.uri)
        chunks.append(chunk)
    return chunks


def _check_cells(dataset: Dataset, record: ShardRecord) -> None:
    """Compare ids, tokens and masks with the shard's input, and decode every cell.

    Raises ShardCorrupt, DatasetError when it is the input that is gone or damaged.
    """
    samples, codec = dataset.samples(record.shard), parse_codec(dataset.spec.codec)
    scales = dataset.scales() or {}
    rows = iter(dataset.spec.plan_rows([sample.num_tokens for sample in samples]))
    for number, group in enumerate(record.row_groups):
        head, *columns = _read_row_group(dataset, record, number, group)
        for found in read_head(head, group.rows):
            row = next(rows)
            sample = samples[row.sample]
            same = found[:4] == (sample.sample_id, row.part, row.parts, row.start)
            same = same and (found.token_ids_T.tolist() == sample.token_ids_T[row.start : row.stop].tolist())
            if not same or (found.loss_mask_T != sample.loss_mask_T[row.start : row.stop]).any():
                text = f"shard {record.shard}: row {sample.sample_id!r} is not the planned one"
                raise ShardCorrupt(f"{text}; {mend(dataset.uri)}")
        for name, chunk in zip(record.columns, columns, strict=True):
            for cell in read_cells(chunk, group.rows):
                _decode(codec, cell, scales.get(name), record, f"{name} of row group {number}")


def _decode(
    codec: Codec, cell: memoryview, scale_D: torch.Tensor | None, record: ShardRecord, where: str
) -> None:
    try:
        symbols = codec.from_bytes(cell)
        states_TD = torch.empty(symbols.header.tokens, symbols.header.width, dtype=torch.bfloat16)
        codec.decode_on_device(symbols, scale_D, states_TD)
    except CodecError as error:
        raise ShardCorrupt(f"shard {record.shard}: a cell of {where} cannot be decoded: {error}") from None
