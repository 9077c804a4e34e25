"""Turns a stream of samples into the input of each shard, the index and the plan; resumable."""

from __future__ import annotations

import hashlib
import io
import sqlite3
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dflash_core.records import Sample
from storage.dataset_spec import (
    INDEX_KEY,
    PLAN_KEY,
    SPEC_KEY,
    DatasetError,
    DatasetSpec,
    Plan,
    PlannedShard,
    samples_key,
)
from storage.objects import ObjectExists, Store

Clash = Callable[[Sample, str], None]
"""Is told of a sample that is left out because another chat, read at the place given, has its id."""

_UPLOADS = 8
_INDEX_ROWS = 65_536

_SAMPLES_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
        pa.field("loss_mask", pa.list_(pa.field("element", pa.bool_(), nullable=False)), nullable=False),
    ]
)
_INDEX_NUMBERS = ("shard", "row_group", "row", "parts", "tokens", "supervised")
_INDEX_SCHEMA = pa.schema(
    [pa.field("sample_id", pa.string(), nullable=False)]
    + [pa.field(name, pa.int32(), nullable=False) for name in _INDEX_NUMBERS]
)


def write_plan(
    store: Store,
    spec: DatasetSpec,
    samples: Iterable[Sample],
    scratch_dir: Path | None,
    created: list[str],
    clash: Clash | None,
) -> Plan:
    """Write samples/, index.parquet and, last, plan.json below the data set's root.

    Holds a few shards' tokens in memory, whatever the number of samples (ids that were seen wait in a scratch
    database). Every object is a function of the stream, so a killed creation is finished by the same call.
    Keys that this call creates are added to `created`, whether it succeeds or not. `clash`: `create_dataset`.
    Raises DatasetError: no sample, an id twice, or a stream that differs from what was already written;
    ObjectNotFound when somebody removes the data set meanwhile.
    """
    ids = _SeenIds(scratch_dir, drop=spec.duplicate_ids == "drop", clash=clash)
    with (
        tempfile.TemporaryFile(dir=scratch_dir) as file,
        closing(_IndexWriter(file)) as index,
        closing(ids),
        closing(_Uploads(store, created)) as uploads,
    ):
        shards = [
            uploads.add(index.add(number, spec, shard), shard)
            for number, shard in enumerate(_in_shards(ids.fresh(samples), spec.shard_tokens))
        ]
        planned = tuple(shard.result() for shard in shards)
        index.finish()
        index_sha256 = _publish_same(store, INDEX_KEY, file, created)
    if not planned:
        raise DatasetError(
            f"the input gives not one sample, so {store.uri} would be empty: see that it holds chats, and "
            "that the settings of `chat` and `limit` leave some of them"
        )
    plan = Plan(
        fingerprint=spec.fingerprint,
        samples=sum(shard.samples for shard in planned),
        tokens=sum(shard.tokens for shard in planned),
        supervised=sum(shard.supervised for shard in planned),
        duplicates_dropped=ids.dropped,
        index_sha256=index_sha256,
        shards=planned,
    )
    store.head(SPEC_KEY)  # gone with what was written before, had somebody removed the data set meanwhile
    _publish_same(store, PLAN_KEY, plan.model_dump_json(indent=1).encode(), created)
    return plan


def read_samples(data: bytes) -> list[Sample]:
    """Read samples/NNNNN.parquet; arrays are views of the table."""
    table = pq.read_table(pa.BufferReader(data)).combine_chunks()
    names = table["sample_id"].to_pylist()
    tokens, masks = table["token_ids"].combine_chunks(), table["loss_mask"].combine_chunks()
    ends = tokens.offsets.to_numpy()
    token_ids, loss_mask = tokens.values.to_numpy(), masks.values.to_numpy(zero_copy_only=False)
    return [
        Sample(sample_id=name, token_ids_T=token_ids[start:stop], loss_mask_T=loss_mask[start:stop])
        for name, start, stop in zip(names, ends[:-1], ends[1:], strict=True)
    ]


def _in_shards(samples: Iterable[Sample], shard_tokens: int) -> Iterator[list[Sample]]:
    """Cut the stream: a shard takes samples until the next would pass `shard_tokens`."""
    shard: list[Sample] = []
    held = 0
    for sample in samples:
        if shard and held + sample.num_tokens > shard_tokens:
            yield shard
            shard, held = [], 0
        shard.append(sample)
        held += sample.num_tokens
    if shard:
        yield shard


class _SeenIds:
    """Ids of all samples so far, on disk: exact, and small in memory however many there are.

    Beside each stand a checksum of the tokens and where the chat was read. The file loses its name at once,
    so that it cannot outlive the process.
    """

    def __init__(self, scratch_dir: Path | None, drop: bool, clash: Clash | None) -> None:
        self._drop, self._clash, self.dropped = drop, clash, 0
        with tempfile.TemporaryDirectory(prefix="dflash-plan-", dir=scratch_dir) as folder:
            self._open(Path(folder) / "ids.sqlite")

    def _open(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.execute("pragma journal_mode = off")
        self._database.execute("pragma synchronous = off")
        self._database.execute("pragma cache_size = -65536")
        # With row numbers: rows are appended, and only their ids lie in random order.
        self._database.execute("create table seen (id blob primary key, tokens integer, place blob)")
        self._database.execute("begin")

    def fresh(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Pass each id once. Raises DatasetError on the second, unless it is to be left out."""
        for sample in samples:
            key = hashlib.blake2b(_utf8(sample.sample_id), digest_size=16).digest()
            tokens = zlib.crc32(sample.token_ids_T.tobytes())
            row = (key, tokens, sample.where.encode(errors="backslashreplace"))
            if self._database.execute("insert or ignore into seen values (?, ?, ?)", row).rowcount:
                yield _checked(sample)
            else:
                self._leave_out(sample, key, tokens)

    def _leave_out(self, sample: Sample, key: bytes, tokens: int) -> None:
        found = self._database.execute("select tokens, place from seen where id = ?", (key,)).fetchone()
        same, first = found[0] == tokens, found[1].decode()
        if self._drop and same:
            self.dropped += 1
        elif self._drop and self._clash is not None:
            self._clash(sample, first)
        else:
            samples = "samples" if same else "different samples"
            places = f" ({first} and {sample.where})" if first else ""
            mend = ", or set duplicate_ids: drop to keep the first" if same else ""
            raise DatasetError(
                f"two {samples} have the id {sample.sample_id!r}{places}; give each its own{mend}"
            )

    def close(self) -> None:
        self._database.close()


def _utf8(sample_id: str) -> bytes:
    try:
        return sample_id.encode()
    except UnicodeEncodeError:
        raise DatasetError(
            f"the sample id {sample_id!r} is not Unicode text: give the chat another"
        ) from None


def _checked(sample: Sample) -> Sample:
    tokens, mask = sample.token_ids_T, sample.loss_mask_T
    if tokens.ndim != 1 or tokens.dtype != np.int32 or mask.dtype != np.bool_ or mask.shape != tokens.shape:
        raise DatasetError(
            f"sample {sample.sample_id!r}: token ids must be int32 [T] and the loss mask bool [T], not "
            f"{tokens.dtype} {tokens.shape} and {mask.dtype} {mask.shape}"
        )
    if not len(tokens):
        raise DatasetError(f"sample {sample.sample_id!r} has no tokens")
    return sample


class _IndexWriter:
    """index.parquet, written as the shards are cut."""

    def __init__(self, file: IO[bytes]) -> None:
        self._writer = pq.ParquetWriter(file, _INDEX_SCHEMA, compression="zstd", store_schema=False)
        self._ids: list[str] = []
        self._numbers: list[tuple[int, ...]] = []

    def add(self, number: int, spec: DatasetSpec, samples: list[Sample]) -> PlannedShard:
        """Enter the samples of one shard; returns its plan without the digest of its samples."""
        rows = spec.plan_rows([sample.num_tokens for sample in samples])
        supervised = [int(sample.loss_mask_T.sum()) for sample in samples]
        for row in rows:
            if row.part == 0:
                sample = samples[row.sample]
                self._ids.append(sample.sample_id)
                self._numbers.append(
                    (number, row.row_group, row.row, row.parts, sample.num_tokens, supervised[row.sample])
                )
        if len(self._ids) >= _INDEX_ROWS:
            self._flush()
        return PlannedShard(
            shard=number,
            samples=len(samples),
            tokens=sum(sample.num_tokens for sample in samples),
            supervised=sum(supervised),
            rows=len(rows),
            row_groups=rows[-1].row_group + 1,
            samples_sha256="",
        )

    def _flush(self) -> None:
        if self._ids:
            numbers = np.array(self._numbers, dtype=np.int32).T
            arrays = [pa.array(self._ids, pa.string()), *(pa.array(column) for column in numbers)]
            self._writer.write_table(pa.Table.from_arrays(arrays, schema=_INDEX_SCHEMA))
            self._ids, self._numbers = [], []

    def finish(self) -> None:
        self._flush()
        self._writer.close()

    def close(self) -> None:
        """Let go of the file, finished or not."""
        self._writer.close()


class _Uploads:
    """Puts the samples of a few shards at a time; `add` waits when too many are on their way."""

    def __init__(self, store: Store, created: list[str]) -> None:
        self._store, self._created = store, created
        self._pool = ThreadPoolExecutor(_UPLOADS)
        self._pending: deque[Future[PlannedShard]] = deque()

    def add(self, planned: PlannedShard, samples: list[Sample]) -> Future[PlannedShard]:
        while len(self._pending) >= 2 * _UPLOADS:
            self._pending.popleft().result()
        future = self._pool.submit(self._put, planned, samples)
        self._pending.append(future)
        return future

    def _put(self, planned: PlannedShard, samples: list[Sample]) -> PlannedShard:
        key, data = samples_key(planned.shard), _encode_samples(samples)
        sha256 = _publish_same(self._store, key, data, self._created)
        return planned.model_copy(update={"samples_sha256": sha256})

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _encode_samples(samples: list[Sample]) -> bytes:
    ends = np.cumsum([0, *(sample.num_tokens for sample in samples)], dtype=np.int32)

    def nested(parts: list[np.ndarray], field: pa.Field) -> Any:
        return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(parts)), type=field.type)

    columns = [
        pa.array([sample.sample_id for sample in samples], pa.string()),
        nested([sample.token_ids_T for sample in samples], _SAMPLES_SCHEMA.field("token_ids")),
        nested([sample.loss_mask_T for sample in samples], _SAMPLES_SCHEMA.field("loss_mask")),
    ]
    sink = io.BytesIO()
    table = pa.Table.from_arrays(columns, schema=_SAMPLES_SCHEMA)
    pq.write_table(table, sink, compression="zstd", use_dictionary=False, store_schema=False)
    return sink.getvalue()


def _publish_same(store: Store, key: str, data: bytes | IO[bytes], created: list[str]) -> str:
    """Create an object, or make sure that the one that is there says the same; returns its sha256."""
    try:
        if isinstance(data, bytes):
            store.put_bytes(key, data)
        else:
            store.put_file(key, cast(BinaryIO, data))
        created.append(key)
    except ObjectExists:
        there, here = store.get(key), data if isinstance(data, bytes) else _from_start(data).read()
        if there != here and not _same_table(there, here):
            raise DatasetError(
                f"{store.uri}/{key} is damaged or was written from other samples than these, as "
                "when chats change under the same fingerprint: choose another name, or remove this data set"
            ) from None
        return hashlib.sha256(there).hexdigest()
    if isinstance(data, bytes):
        return hashlib.sha256(data).hexdigest()
    return hashlib.file_digest(_from_start(data), "sha256").hexdigest()


def _from_start(file: IO[bytes]) -> Any:
    file.seek(0)
    return file


def _same_table(left: bytes, right: bytes) -> bool:
    """Another version of the Parquet library may write the same rows in other bytes."""
    if not (left.startswith(b"PAR1") and right.startswith(b"PAR1")):
        return False
    try:
        return bool(pq.read_table(pa.BufferReader(left)).equals(pq.read_table(pa.BufferReader(right))))
    except (pa.ArrowException, OSError):  # damaged
        return False
