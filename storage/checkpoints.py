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
import re
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
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
NAME = re.compile(FOLDER + r"step-(\d{8,})(?:\.json|-[0-9a-f]{16}\.safetensors)")
"""Keys that are ours; whatever else lies below the folder is left alone."""
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

    Old ones are removed without asking anybody: ranks read before the first save and after the last. What
    `latest` finds belongs to the run, as does what it saves; where something else appears, another run writes
    to the same folder, and this one is refused.
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
        self._jobs: list[Future[None]] = []
        self._failed: list[tuple[int, Exception]] = []
        """Steps of the latest writes if they failed, and why."""
        self._scores: list[Best] = []
        """Of which the store has not been told."""
        self._known: set[str] = set()
        """Keys that belong to this run."""
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

        A write that fails is named in the log, and the next one takes place all the same; after two in a row
        it is waited for. Raises StoreError when that fails too; UserError when the write before met a
        checkpoint of another run. Tensors on a GPU are copied beside its other work: whoever changes them
        must first let his stream wait for the event that is returned.
        """
        self._settle()
        last_try = len(self._failed) > 1
        copied, ready = self._stage(tensors)
        plain: dict[str, Any] = json.loads(json.dumps(dict(notes)))
        write = partial(self._write, position, copied, plain, ready)
        self._jobs.append(self._pool.submit(self._try_to_write, position.optimizer_step, write))
        if last_try:
            self.wait()
        return ready

    def mark_best(self, scored: Best) -> None:
        """Take this checkpoint for the best one if its score is higher than that of the best so far; in the
        background, as soon as it is written.

        When the store cannot be told now, it is with the next checkpoint, or by `wait`.
        """
        self._jobs.append(self._pool.submit(self._try_to_mark, scored))

    def wait(self) -> None:
        """Wait until what was saved is on the store.

        Raises StoreError when the last checkpoint, or which one is the best, could not be written; UserError
        when there are checkpoints of another run.
        """
        self._settle()
        if self._failed:
            failed, self._failed = self._failed, []
            steps = ", ".join(str(step) for step, _ in failed)
            raise StoreError(
                f"{self._store.uri} has no checkpoint of step {steps}, a new run continues from the one "
                f"before: {failed[-1][1]}"
            ) from None
        self._tell_scores()

    def _settle(self) -> None:
        """Wait for the thread; raises what it does not try again."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()

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
        except UserError as failed:
            if error is None:
                raise
            log.error("%s", failed)

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

    def _try_to_write(self, step: int, write: Callable[[], None]) -> None:
        try:
            write()
        except (StoreError, OSError) as error:
            self._failed.append((step, error))
            log.warning("the checkpoint of step %d could not be written: %s", step, error)
        except UserError as error:
            log.error("%s", error)  # the run hears of it when it comes back here
            raise
        else:
            self._failed.clear()

    def _write(
        self,
        position: Position,
        tensors: dict[str, Tensor],
        notes: dict[str, Any],
        ready: torch.cuda.Event | None,
    ) -> None:
        if ready is not None:
            ready.synchronize()
        self._refuse_others()
        self._tell_scores()
        step = position.optimizer_step
        with tempfile.TemporaryFile(dir=self._scratch_folder()) as file:
            with self._scratch_errors():
                sha256, size = write_safetensors(file, tensors)
            key = f"{_stem(step)}-{sha256[:16]}.safetensors"
            self._known.add(key)
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
        commit = f"{_stem(step)}.json"
        known = commit in self._known
        self._known.add(commit)  # before: it may be there though the store did not say so
        try:
            self._store.put_bytes(commit, record.model_dump_json().encode(), overwrite=known)
        except ObjectExists:
            self._known.remove(commit)
            self._refuse_others()
            raise
        try:
            self._retire(best, key, step)
        except StoreError as error:  # the new one counts in any case
            log.warning("old checkpoints will be removed with a later one: %s", error)

    def _refuse_others(self) -> None:
        """Raise UserError when there are checkpoints that this run neither found nor wrote."""
        steps = _steps(key for key in self._keys() if key not in self._known)
        if steps:
            raise UserError(
                f"{self._store.uri}/{FOLDER} has checkpoints that this run neither wrote nor found when it "
                f"began (step {', '.join(map(str, steps))}): another run writes to the same output. They "
                "were left alone; end one of the two runs and start again, or give one another output"
            )

    def _try_to_mark(self, scored: Best) -> None:
        self._scores.append(scored)
        try:
            self._tell_scores()
        except StoreError as error:
            log.warning("the score of step %d is not told yet: %s", scored.optimizer_step, error)

    def _tell_scores(self) -> None:
        """Note the best checkpoint; scores of those that were not written count for nothing."""
        while self._scores:
            scored, best = self._scores[0], self.best()
            known = f"{_stem(scored.optimizer_step)}.json" in self._known
            written = known and scored.optimizer_step in self.steps()
            if written and (best is None or scored.score > best.score):
                self._store.put_bytes(BEST_KEY, scored.model_dump_json().encode(), overwrite=True)
            del self._scores[0]

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

    def _retire(self, best: Best | None, written: str, now: int) -> None:
        """Remove all of this run's but the latest and the best; records go first, so none is without its
        tensors. Later ones than the one just written are damaged: the run would have continued from them.
        """
        ours = [key for key in self._keys() if key in self._known]
        kept = {step for step in _steps(ours) if step <= now}
        kept = set(sorted(kept)[-self._keep :]) | ({best.optimizer_step} if best else set())
        for key in sorted(ours, key=_holds_tensors):
            replaced = _holds_tensors(key) and _step_of(key) == now and key != written
            if replaced or _step_of(key) not in kept:
                self._store.delete(key)
        with suppress(
            StoreError, OSError
        ):  # what a killed rank had begun to upload is invisible, and paid for
            self._store.abort_unfinished(FOLDER, older_than=UNFINISHED_S)

    # Reading.

    def steps(self) -> list[int]:
        """Optimizer steps of which there is a committed checkpoint, ascending."""
        return _steps(self._keys())

    def _keys(self) -> list[str]:
        """Keys of all records and tensors."""
        return [info.key for info in self._store.list(FOLDER) if NAME.fullmatch(info.key)]

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

        A damaged one is skipped and named in the log. What is there is this run's from now on. Raises
        UserError naming the differing keys when it is of another configuration, CheckpointDamaged when there
        are checkpoints and none is intact.
        """
        keys = self._keys()
        self._known.update(keys)
        steps = _steps(keys)
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


def _holds_tensors(key: str) -> bool:
    return key.endswith(".safetensors")


def _step_of(key: str) -> int:
    match = NAME.fullmatch(key)
    assert match is not None
    return int(match[1])


def _steps(keys: Iterable[str]) -> list[int]:
    """Steps whose records are among these keys, ascending."""
    return sorted(_step_of(key) for key in keys if not _holds_tensors(key))
