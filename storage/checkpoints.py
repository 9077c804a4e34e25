"""Checkpoints on the object store: written beside training, committed last, found again, refused to another
run.

Layout below the run's folder: checkpoints/step-00000500-<sha256, 16 digits>.safetensors holds the tensors,
checkpoints/step-00000500.json is the commit record, written last: without it a checkpoint does not exist.
best.json names the best one by validation. Tensors are stored as they are (float32 weights and moments), in
safetensors' format.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from dflash_core.configuration import Config, UserError
from storage.ahead import read_ahead
from storage.local_objects import LocalStore
from storage.objects import ObjectExists, ObjectNotFound, Store, StoreError

log = logging.getLogger(__name__)

FOLDER = "checkpoints/"
BEST_KEY = "best.json"
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types in safetensors' header."""
COPY_BYTES = 16 << 20
UNFINISHED_S = 86_400.0
"""An upload that has not been finished for so long never will be."""


class Position(Config):
    """Where in the data and the schedule a run is."""

    optimizer_step: int
    """Finished optimizer steps."""
    epoch: int
    """Epoch of the next step."""
    step_in_epoch: int
    """Optimizer steps of that epoch already done."""


class CheckpointRecord(Config):
    """The commit record of one checkpoint."""

    position: Position
    identity: dict[str, Any]
    """Everything that must be equal for a run to continue from it."""
    notes: dict[str, Any]
    """For people: ranks, versions, validation numbers."""
    object: str
    """Key of the tensors."""
    size: int
    sha256: str


class Best(Config):
    """The best checkpoint so far."""

    optimizer_step: int
    score: float
    """Acceptance length on the validation samples."""


class CheckpointDamaged(UserError):
    """The tensors of a checkpoint are not what was written."""


class Checkpoints:
    """The checkpoints of one run. One rank saves, in the background, one at a time; all may read.

    Old ones are removed without asking anybody: ranks read before the first save and after the last. Two runs
    must not write to one folder at a time, for each would remove what the other wrote for later steps.
    """

    def __init__(
        self, store: Store, identity: Mapping[str, Any], *, keep: int, scratch: Path | None = None
    ) -> None:
        """`store` is the run's folder. `identity` is JSON-like; `keep` latest checkpoints stay, and the best
        one.

        `scratch` is a local folder for the file being written or read; None: the store's, or the system's.
        """
        if keep < 1:
            raise ValueError("keep at least one checkpoint")
        self._store, self._identity, self._keep = store, json.loads(json.dumps(dict(identity))), keep
        self._scratch = scratch
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._staged: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    # Writing.

    def save(
        self,
        position: Position,
        tensors: Mapping[str, Tensor],
        notes: Mapping[str, Any],
    ) -> torch.cuda.Event | None:
        """Copy the tensors and write them in the background; waits for the write before only.

        An error of the previous write is raised here or by `wait`. Tensors on a GPU are copied beside its
        other work: whoever changes them must first let his stream wait for the event that is returned.
        """
        self.wait()
        copied, ready = self._stage(tensors)
        plain: dict[str, Any] = json.loads(json.dumps(dict(notes)))
        self._writing = self._pool.submit(self._write, position, copied, plain, ready)
        return ready

    def mark_best(self, scored: Best) -> None:
        """Take this checkpoint for the best one if its score is higher than that of the best so far.

        Waits until it is written. Raises StoreError.
        """
        self.wait()
        best = self.best()
        if best is None or scored.score > best.score:
            self._store.put_bytes(BEST_KEY, scored.model_dump_json().encode(), overwrite=True)

    def wait(self) -> None:
        """Wait until what was saved is on the store. Raises StoreError."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """Wait, then end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()
            self._staged.clear()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; where an error is on its way already, one of the last write is only logged."""
        try:
            self.close()
        except StoreError as failed:
            if error is None:
                raise
            log.error("the last checkpoint could not be written: %s", failed)

    def _stage(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
        """Copy to host memory; from a GPU into page-locked buffers that are kept, on a stream of its own,
        after all work that is queued now.
        """
        copied, on_gpu = {}, {name: t.detach() for name, t in tensors.items() if t.is_cuda}
        for name, tensor in tensors.items():
            if name not in on_gpu:
                copied[name] = tensor.detach().clone().contiguous()
                continue
            buffer = self._staged.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copied[name] = self._staged[name] = buffer
        if not on_gpu:
            return copied, None
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, tensor in on_gpu.items():
                copied[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
            return copied, self._stream.record_event(torch.cuda.Event(blocking=True))

    def _write(
        self,
        position: Position,
        tensors: dict[str, Tensor],
        notes: dict[str, Any],
        ready: torch.cuda.Event | None,
    ) -> None:
        if ready is not None:
            ready.synchronize()
        step = position.optimizer_step
        with tempfile.TemporaryFile(dir=self._scratch_folder()) as file:
            with self._scratch_errors():
                sha256, size = write_safetensors(file, tensors)
            key = f"{_stem(step)}-{sha256[:16]}.safetensors"
            try:
                self._store.put_file(key, file)
            except ObjectExists:  # of a run that was here before, and perhaps damaged since
                if self._digest(key) != sha256:
                    self._store.put_file(key, file, overwrite=True)
        record = CheckpointRecord(
            position=position, identity=self._identity, notes=notes, object=key, size=size, sha256=sha256
        )
        best = self.best()
        if best is None or best.optimizer_step >= step:  # gone, or this run continues from before it
            self._store.delete(BEST_KEY)
            best = None
        # A resumed run may reach a step again that an abandoned one has committed: the later one counts.
        self._store.put_bytes(f"{_stem(step)}.json", record.model_dump_json().encode(), overwrite=True)
        self._retire(best, key)

    def _scratch_folder(self) -> Path | None:
        """Where files lie meanwhile: on the file system of a local store, so that publishing one is a link
        and no copy.
        """
        folder = self._scratch or self._store.scratch_dir
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextmanager
    def _scratch_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            folder = self._scratch_folder() or tempfile.gettempdir()
            raise StoreError(
                f"a checkpoint of {self._store.uri} needs room in {folder}: {error.strerror or error}; make "
                "some, or set TMPDIR to another folder if it is not the store's"
            ) from None

    def _retire(self, best: Best | None, written: str) -> None:
        """Remove all but the latest and the best; the record goes first, so no record is without its
        tensors. Later ones than the one just written are damaged: the run would have continued from them.
        """
        steps, now = self.steps(), _step_of(written)
        kept = {step for step in steps if step <= now}
        kept = set(sorted(kept)[-self._keep :]) | ({best.optimizer_step} if best else set())
        for step in steps:
            if step not in kept:
                self._store.delete(f"{_stem(step)}.json")
        for info in list(self._store.list(FOLDER)):
            if not info.key.endswith(".safetensors"):
                continue
            replaced = _step_of(info.key) == now and info.key != written
            if replaced or _step_of(info.key) not in kept:
                self._store.delete(info.key)
        with suppress(
            StoreError, OSError
        ):  # what a killed rank had begun to upload is invisible, and paid for
            self._store.abort_unfinished(FOLDER, older_than=UNFINISHED_S)

    # Reading.

    def steps(self) -> list[int]:
        """Optimizer steps of which there is a committed checkpoint, ascending."""
        keys = (info.key for info in self._store.list(FOLDER))
        return sorted(_step_of(key) for key in keys if key.endswith(".json"))

    def best(self) -> Best | None:
        """The best checkpoint, None when nothing was validated yet, or it is deleted or damaged."""
        try:
            best = Best.model_validate_json(self._store.get(BEST_KEY))
        except ObjectNotFound:
            return None
        except ValidationError:
            log.warning(
                "%s/%s is damaged and does not count: no checkpoint is the best", self._store.uri, BEST_KEY
            )
            return None
        return best if best.optimizer_step in self.steps() else None

    def record(self, step: int) -> CheckpointRecord:
        """Read a commit record. Raises ObjectNotFound, CheckpointDamaged."""
        try:
            return CheckpointRecord.model_validate_json(self._store.get(f"{_stem(step)}.json"))
        except ValidationError as error:
            raise CheckpointDamaged(
                f"{self._store.uri}/{_stem(step)}.json is no checkpoint record "
                f"({error.error_count()} faults); delete it"
            ) from None

    def latest(self) -> tuple[CheckpointRecord, dict[str, Tensor]] | None:
        """Load the newest intact checkpoint on the CPU; None when there is none at all.

        A damaged one is skipped and named in the log. Raises UserError naming the differing keys when it is
        of another configuration, CheckpointDamaged when there are checkpoints and none is intact.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                record = self.record(step)
                self._check_identity(record)
                return record, self.load(record)
            except CheckpointDamaged as damage:
                log.warning("%s; trying the one before", damage)
        if steps:
            raise CheckpointDamaged(
                f"none of the checkpoints of {self._store.uri} is intact; delete them to start anew"
            )
        return None

    def load(self, record: CheckpointRecord) -> dict[str, Tensor]:
        """Read the tensors of a checkpoint on the CPU, digest checked. Raises CheckpointDamaged.

        Range reads go in parallel; beside the tensors some 150 MB are held. A local store's file is then
        mapped where it lies, what comes from a bucket lies in a scratch file.
        """
        if isinstance(self._store, LocalStore):
            self._check_digest(record)
            return load_file(self._store.path(record.object))
        folder = self._scratch_folder()
        with tempfile.TemporaryFile(dir=folder) as file:  # without a name: a killed process leaves nothing
            self._check_digest(record, file)
            return load_file(f"/proc/self/fd/{file.fileno()}")

    def _check_digest(self, record: CheckpointRecord, copy: BinaryIO | None = None) -> None:
        where = f"checkpoint {self._store.uri}/{record.object}"
        try:
            digest = self._digest(record.object, copy)
        except ObjectNotFound:
            raise CheckpointDamaged(f"{where} is gone") from None
        if digest != record.sha256:
            raise CheckpointDamaged(f"{where} is damaged: its sha256 is not that of its record")

    def _digest(self, key: str, copy: BinaryIO | None = None) -> str:
        """Return the sha256 of an object, which is copied on the way."""
        digest = hashlib.sha256()
        for data in read_ahead(self._store, key, self._store.head(key).size):
            digest.update(data)
            if copy is not None:
                with self._scratch_errors():
                    copy.write(data)
        if copy is not None:
            with self._scratch_errors():
                copy.flush()
        return digest.hexdigest()

    def _check_identity(self, record: CheckpointRecord) -> None:
        differing = differences(record.identity, self._identity)
        if differing:
            step = record.position.optimizer_step
            raise UserError(
                f"the checkpoint of step {step} in {self._store.uri} belongs to another configuration:\n  "
                + "\n  ".join(differing)
                + "\nuse the old values; or another output, which training.init_from: FOLDER begins with the "
                "weights of an exported drafter"
            )


def write_safetensors(file: BinaryIO, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    """Write contiguous CPU tensors in safetensors' format without a copy in memory; return sha256 and size.

    Format (safetensors README): little-endian u64 length of the header, the header in JSON (name -> dtype,
    shape, data_offsets), then the data.
    """
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    for data in (struct.pack("<Q", len(text)), text):
        digest.update(data)
        file.write(data)
    for tensor in tensors.values():
        view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        for start in range(0, len(view), COPY_BYTES):
            part = view[start : start + COPY_BYTES]
            digest.update(part)
            file.write(part)
    file.flush()
    os.fsync(file.fileno())
    return digest.hexdigest(), 8 + len(text) + offset


def differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> list[str]:
    """Name every key whose value differs, as "key: old -> new"."""
    found = []
    for key in sorted({*old, *new}):
        where = f"{path}{key}"
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{where}.")
        elif a != b:
            found.append(f"{where}: {json.dumps(a)} -> {json.dumps(b)}")
    return found


def _stem(step: int) -> str:
    return f"{FOLDER}step-{step:08d}"


def _step_of(key: str) -> int:
    return int(key.removeprefix(f"{FOLDER}step-")[:8])
