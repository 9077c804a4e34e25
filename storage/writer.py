"""Writes one shard: takes captured samples in plan order, encodes them, commits the shard or nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

import torch
from pydantic import Field

from dflash_core.configuration import Config, UserError
from dflash_core.records import CapturedSample
from storage.codec import parse_codec
from storage.dataset import Dataset, DatasetError, ShardAlreadyCommitted
from storage.dataset_spec import shard_key, software_versions
from storage.host_copies import HostCopies, HostCopy
from storage.objects import ObjectExists, ObjectNotFound, StoreError
from storage.shard_format import (
    METADATA_KEY,
    SCALES_KEY,
    PlannedRow,
    RowGroupRecord,
    RowHead,
    ShardFile,
    ShardRecord,
    record_row_group,
)
from storage.symbols import ErrorSums

States = dict[str, torch.Tensor]
"""Column -> bf16 [T, D]."""
_VERIFY_BYTES = 16 << 20
_ENCODED_TOGETHER = 60 << 20
"""Bytes of symbols that are encoded and copied together: with outliers some 64 MB, a power of two, in which
page-locked memory is handed out."""


class WriterConfig(Config):
    """Resources of one shard writer."""

    threads: int = Field(default=2, ge=1)
    """Threads of the entropy coder."""
    pending_bytes: int = Field(default=2 << 30, ge=1)
    """`ShardWriter.add` waits while more bytes of symbols (and more than one row group) are on their way. A
    GPU stays busy when the symbols of a whole batch of the target fit: tokens x columns x width, twice that
    for lossless."""


class ShardWriter:
    """An open shard. `add` every planned sample in order, then `close`; without it nothing remains.

    with ShardWriter(dataset, shard) as writer:
        for batch in ...:
            writer.add(*batch)
        record = writer.close()

    `close` uploads; it may run in another thread while the next shard's writer takes samples.
    """

    def __init__(
        self,
        dataset: Dataset,
        shard: int,
        scratch_dir: Path | None = None,
        config: WriterConfig | None = None,
        *,
        replace: bool = False,
    ) -> None:
        """`replace` redoes a committed shard: the old one counts until the new one is committed, which fails
        when another worker has replaced it since this call.

        The unpublished file is nameless: it disappears with the process. It needs the room of one shard in
        `scratch_dir` (default: the store's own file system, or the system's temporary folder).
        Raises ShardAlreadyCommitted at once when the shard has a record and not `replace`;
        DatasetError when the codec needs scales that are not published.
        """
        self._dataset, self._shard, self._replace = dataset, shard, replace
        self._config = config or WriterConfig()
        self._codec = parse_codec(dataset.spec.codec)
        self._replaced = dataset.standing(shard) if replace else None
        self._refuse_committed()
        self._scales = dataset.scales()
        if self._codec.needs_scales and self._scales is None:
            raise DatasetError(f"{dataset.uri} has no scales yet: calibrate before writing shards")
        self._samples = dataset.samples(shard)
        self._rows = dataset.spec.plan_rows([sample.num_tokens for sample in self._samples])
        self._next_row = 0
        self._errors = {column: ErrorSums() for column in dataset.columns}
        self._column_bytes = dict.fromkeys(dataset.columns, 0)
        self._group: list[tuple[PlannedRow, int, dict[str, Future[Future[bytes]]]]] = []
        self._written: list[Future[Future[RowGroupRecord]]] = []
        self._broken = False
        self._room = _Room(self._config.pending_bytes)
        self._folder = scratch_dir or dataset.store.scratch_dir or Path(tempfile.gettempdir())
        self._file = _nameless_file(self._folder)
        self._parquet = ShardFile(self._file, dataset.columns, self._metadata())
        self._copies = HostCopies(self._codec)
        self._arrivals = ThreadPoolExecutor(1, "symbols-arrive")
        self._coders = ThreadPoolExecutor(self._config.threads, "entropy-coder")
        self._scribe = ThreadPoolExecutor(1, "shard-file")

    def add(self, *captured: CapturedSample) -> None:
        """Encode samples: states bf16 [T, D] on any device, one entry per data column.

        A GPU is not waited for: the arithmetic is enqueued on the current stream, behind what makes the
        states, and copies go beside it. So the next forward can be enqueued at once. Many samples in one call
        cost the host little more than one.
        Raises UserError naming the sample that is not the next of the plan or has a wrong shape or dtype;
        then none of the call is added.
        """
        self._raise_failed()
        for rows in self._together(self._rows_of(captured)):
            self._encode(rows)
            self._next_row += len(rows)

    def wait_for_device(self) -> None:
        """Return when the device is done with all that was added: its symbols are on the host, or failed.

        What went wrong is raised by `close`, which waits for no device after this.
        """
        self._arrivals.submit(lambda: None).result()  # one thread: behind all others

    def close(self) -> ShardRecord:
        """Finish the file, upload it, commit the record.

        Raises ShardAlreadyCommitted, StoreError; UserError when samples are missing.
        """
        try:
            if self._next_row < len(self._rows):
                waiting = self._samples[self._rows[self._next_row].sample].sample_id
                raise UserError(f"shard {self._shard} is not whole: sample {waiting!r} was not added")
            self._write_group()
            with self._scratch_errors():
                groups = tuple(written.result().result() for written in self._written)
                size, sha256 = self._parquet.finish()
            record = self._record(groups, size, sha256)
            self._refuse_committed()
            self._publish(record)
            self._dataset.commit(record, replacing=self._replaced)
            return record
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop everything that is not committed; idempotent."""
        self._room.open()
        self._scribe.shutdown(cancel_futures=True)
        self._arrivals.shutdown(cancel_futures=True)
        self._coders.shutdown(cancel_futures=True)
        self._parquet.abandon()
        self._file.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    # On the caller's thread.

    def _rows_of(self, samples: Sequence[CapturedSample]) -> list[tuple[PlannedRow, States]]:
        """The rows that these samples fill, and what stands in each."""
        found: list[tuple[PlannedRow, States]] = []
        place = self._next_row
        for captured in samples:
            self._check(captured, place)
            sample = self._rows[place].sample
            while place < len(self._rows) and self._rows[place].sample == sample:
                row = self._rows[place]
                cut = {name: captured.states[name][row.start : row.stop] for name in self._dataset.columns}
                found.append((row, cut))
                place += 1
        return found

    def _check(self, captured: CapturedSample, next_row: int) -> None:
        given, where = captured.sample, f"sample {captured.sample.sample_id!r} of shard {self._shard}"
        if next_row == len(self._rows):
            raise UserError(f"{where}: the shard is whole already")
        expected = self._samples[self._rows[next_row].sample]
        if given.sample_id != expected.sample_id:
            raise UserError(f"{where}: the plan wants {expected.sample_id!r} next; add samples in plan order")
        if given.num_tokens != expected.num_tokens or (given.token_ids_T != expected.token_ids_T).any():
            raise UserError(f"{where}: its tokens are not those of the plan")
        if set(captured.states) != set(self._dataset.columns):
            raise UserError(
                f"{where}: columns {sorted(captured.states)}, not {sorted(self._dataset.columns)}"
            )
        shape = (expected.num_tokens, self._dataset.spec.target.hidden_size)
        for column, states_TD in captured.states.items():
            if tuple(states_TD.shape) != shape or states_TD.dtype != torch.bfloat16:
                found = f"{states_TD.dtype} {tuple(states_TD.shape)}"
                raise UserError(f"{where}: {column} must be bfloat16 {shape}, not {found}")

    def _together(
        self, rows: Sequence[tuple[PlannedRow, States]]
    ) -> Iterator[Sequence[tuple[PlannedRow, States]]]:
        """Yield rows that are encoded together: at most `_ENCODED_TOGETHER` bytes, and at least one row."""
        start, size, width = 0, 0, self._dataset.spec.target.hidden_size
        for end, (row, states) in enumerate(rows):
            of_row = len(states) * self._codec.symbol_bytes(row.stop - row.start, width)
            if end > start and size + of_row > _ENCODED_TOGETHER:
                yield rows[start:end]
                start, size = end, 0
            size += of_row
        if start < len(rows):
            yield rows[start:]

    def _encode(self, rows: Sequence[tuple[PlannedRow, States]]) -> None:
        columns = self._dataset.columns
        cells = [
            (states[column], self._scale(column, states[column].device))
            for _, states in rows
            for column in columns
        ]
        copies = self._copies.start(cells)
        self._room.take(sum(copy.size for copy in copies))
        in_order = iter(copies)
        for row, _ in rows:
            if row.row == 0:
                self._write_group()
            of_row = {column: next(in_order) for column in columns}
            arriving = {
                column: self._arrivals.submit(self._arrive, copy, column) for column, copy in of_row.items()
            }
            self._group.append((row, sum(copy.size for copy in of_row.values()), arriving))

    def _scale(self, column: str, device: torch.device) -> torch.Tensor | None:
        if self._scales is None:
            return None
        scale_D = self._scales[column]
        if scale_D.device != device:
            # From page-locked memory, or the caller would wait until its forward is done.
            pinned_D = scale_D.pin_memory() if device.type == "cuda" else scale_D
            self._scales[column] = scale_D = pinned_D.to(device, non_blocking=True)
        return scale_D

    def _write_group(self) -> None:
        """Hand the row group that is whole to the thread that owns the file."""
        if self._group:
            self._room.hand_over(sum(held for _, held, _ in self._group))
            self._written.append(self._scribe.submit(self._write, self._group))
            self._group = []

    def _raise_failed(self) -> None:
        with self._scratch_errors():
            for written in self._written:
                if written.done():
                    written.result()

    @contextmanager
    def _scratch_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"writing shard {self._shard} of {self._dataset.uri} before its upload, in {self._folder}, "
                f"failed: {error.strerror or error}; give it room for one shard, or another scratch folder"
            ) from None

    # On the thread that waits for the device; one, so that errors are always added in the same order.

    def _arrive(self, copy: HostCopy, column: str) -> Future[bytes]:
        symbols = self._copies.finish(copy)
        self._errors[column] += symbols.error
        return self._coders.submit(self._codec.to_bytes, symbols)

    # On the thread that owns the file.

    def _write(
        self, group: list[tuple[PlannedRow, int, dict[str, Future[Future[bytes]]]]]
    ) -> Future[RowGroupRecord]:
        columns = self._dataset.columns
        try:
            if self._broken:
                raise RuntimeError("an earlier row group of this shard could not be written")
            cells = {
                column: [futures[column].result().result() for _, _, futures in group] for column in columns
            }
            for column, of_column in cells.items():
                self._column_bytes[column] += sum(map(len, of_column))
            rows = [row for row, _, _ in group]
            self._broken = True
            offset, size = self._parquet.write_row_group(list(self._heads(rows)), cells)
            self._broken = False
        finally:
            self._room.give(sum(held for _, held, _ in group))
        first_row = self._rows.index(rows[0])
        tokens = sum(row.stop - row.start for row in rows)
        return self._coders.submit(self._read_back, offset, size, first_row, len(rows), tokens)

    def _heads(self, rows: list[PlannedRow]) -> Iterator[RowHead]:
        for row in rows:
            sample = self._samples[row.sample]
            tokens, mask = sample.token_ids_T[row.start : row.stop], sample.loss_mask_T[row.start : row.stop]
            yield RowHead(sample.sample_id, row.part, row.parts, row.start, tokens, mask)

    def _read_back(self, offset: int, size: int, first_row: int, rows: int, tokens: int) -> RowGroupRecord:
        data = memoryview(os.pread(self._file.fileno(), size, offset))
        return record_row_group(data, offset, first_row, rows, tokens, len(self._dataset.columns))

    # Committing.

    def _metadata(self) -> dict[str, str]:
        dataset = self._dataset
        about = {
            "fingerprint": dataset.fingerprint,
            "shard": self._shard,
            "spec": dataset.spec.model_dump(mode="json"),
            "versions": software_versions(),
        }
        metadata = {METADATA_KEY: json.dumps(about, sort_keys=True)}
        if self._codec.needs_scales:
            metadata[SCALES_KEY] = base64.b64encode(dataset.scales_bytes or b"").decode()
        return metadata

    def _record(self, groups: tuple[RowGroupRecord, ...], size: int, sha256: str) -> ShardRecord:
        errors = self._errors
        return ShardRecord(
            fingerprint=self._dataset.fingerprint,
            shard=self._shard,
            object=shard_key(self._shard, sha256),
            size=size,
            sha256=sha256,
            samples=len(self._samples),
            rows=len(self._rows),
            tokens=sum(sample.num_tokens for sample in self._samples),
            supervised=int(sum(sample.loss_mask_T.sum() for sample in self._samples)),
            columns=self._dataset.columns,
            row_groups=groups,
            relative_error={column: sums.relative_error for column, sums in errors.items()},
            error_sums={
                column: (e.squared_error, e.squared_value, e.scaled_squared_error, e.scaled_values)
                for column, e in errors.items()
            },
            column_bytes=self._column_bytes,
            scales_sha256=self._dataset.scales_sha256 if self._codec.needs_scales else None,
            versions=software_versions(),
        )

    def _refuse_committed(self) -> None:
        """Look early: a shard that is committed needs neither the target nor an upload."""
        if not self._replace and self._dataset.committed(self._shard):
            raise ShardAlreadyCommitted(f"shard {self._shard} of {self._dataset.uri} is committed already")

    def _publish(self, record: ShardRecord) -> None:
        """Upload under a name that carries the content's hash: one that is there is equal, or damaged."""
        store = self._dataset.store
        try:
            store.put_file(record.object, self._file)
        except ObjectExists:
            if not self._stored_well(record):
                store.put_file(record.object, self._file, overwrite=True)

    def _stored_well(self, record: ShardRecord) -> bool:
        store, sha256 = self._dataset.store, hashlib.sha256()
        try:
            if store.head(record.object).size != record.size:
                return False
            for start in range(0, record.size, _VERIFY_BYTES):
                size = min(_VERIFY_BYTES, record.size - start)
                sha256.update(store.get_range(record.object, start, size))
        except ObjectNotFound:
            return False
        return sha256.hexdigest() == record.sha256


class _Room:
    """Counts bytes of symbols on their way to the file; the caller waits while there are too many.

    Bytes of the row group that is still being filled are never waited for: nobody could free them.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._filling, self._handed, self._open = limit, 0, 0, False
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._open or not self._handed or self._filling + self._handed + size <= self._limit
            )
            self._filling += size

    def hand_over(self, size: int) -> None:
        with self._changed:
            self._filling, self._handed = self._filling - size, self._handed + size

    def give(self, size: int) -> None:
        with self._changed:
            self._handed -= size
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()


def _nameless_file(folder: Path) -> BinaryIO:
    """Open a file without a name for writing and reading: it cannot outlive the process that forgets it."""
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):  # a file system without such files
            descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666)
            return cast(BinaryIO, os.fdopen(descriptor, "w+b", buffering=0))
    return cast(BinaryIO, tempfile.TemporaryFile(dir=folder, buffering=0))
