"""A data set on a store: its identity, the plan of its shards, one commit record a shard, and the seal over all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from dflash_core.configuration import Config, UserError
from dflash_core.records import CaptureSpec, Sample, TargetSpec
from storage.objects import Store
from storage.shard_format import FORMAT_VERSION, ShardRecord


class DatasetError(UserError):
    """The data set is not there, unfinished, or not the one that was meant."""


class ShardAlreadyCommitted(UserError):
    """Another worker committed this shard first; what this one wrote has been removed."""


class ShardCorrupt(UserError):
    """Bytes of a shard are missing or wrong: the message names shard and row group and the command that repairs it."""


class DatasetSpec(Config):
    """Everything that changes the content of a data set. Its fingerprint is the data set's identity."""

    target: TargetSpec
    capture: CaptureSpec
    codec: str = "tolerance=0.1"
    """"lossless", "fp8" or "tolerance=<relative error>"."""
    input_sha256: str
    """Fingerprint of the chats."""
    chat: dict[str, Any] = {}
    """The chat settings (JSON), template and maximal length included."""
    duplicate_ids: Literal["error", "drop"] = "error"
    """What to do with a second sample of the same id."""
    shard_tokens: int = 65_536
    """A shard takes whole samples until the next would pass this number."""
    row_group_bytes: int = 64 << 20
    """No row group holds more than so many bytes of bf16 states (before encoding); longer samples are cut in parts."""
    row_group_fill_bytes: int = 4 << 20
    """Short samples share a row group until it holds so many bytes of bf16 states."""
    calibration_tokens: int = 65_536
    """Scales come from the first samples of the data set, up to so many tokens."""
    format_version: int = FORMAT_VERSION

    @property
    def fingerprint(self) -> str:
        """64 hex digits."""
        raise NotImplementedError


class PlannedShard(Config):
    """One shard of the plan."""

    shard: int
    samples: int
    tokens: int
    supervised: int
    rows: int
    row_groups: int
    samples_sha256: str
    """Of samples/NNNNN.parquet, its input."""


class Plan(Config):
    """All shards, as a function of the samples alone: any number of workers writes the same ones."""

    fingerprint: str
    samples: int
    tokens: int
    supervised: int
    duplicates_dropped: int
    index_sha256: str
    shards: tuple[PlannedShard, ...]


class Manifest(Config):
    """Written last; its presence says that the data set is complete."""

    fingerprint: str
    plan_sha256: str
    scales_sha256: str | None
    shards: tuple[dict[str, Any], ...]
    """shard, object, size, sha256, tokens, record_sha256."""
    tokens: int
    bytes: int
    relative_error: dict[str, float]
    column_bytes: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Index:
    """Where each sample lies; N samples in plan order."""

    sample_ids: Any
    """pyarrow string array [N]; index.sample_ids[i].as_py()"""
    shard_N: np.ndarray
    """int32"""
    row_group_N: np.ndarray
    """int32: row group of part 0; part p lies in row group + p."""
    row_N: np.ndarray
    """int32: row of part 0 inside its row group; later parts are row 0 of theirs."""
    parts_N: np.ndarray
    """int32"""
    tokens_N: np.ndarray
    """int32"""
    supervised_N: np.ndarray
    """int32: tokens whose loss mask is set."""


class Dataset:
    """An existing data set. Cheap to open: plan and index are read on first use."""

    store: Store
    """Store whose root is the data set's folder."""
    name: str
    spec: DatasetSpec
    fingerprint: str

    @property
    def uri(self) -> str: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def index(self) -> Index: ...

    @property
    def columns(self) -> tuple[str, ...]:
        """Data columns in stored order."""
        ...

    def samples(self, shard: int) -> list[Sample]:
        """Read the input of one shard, in plan order (digest checked)."""
        ...

    def calibration_samples(self) -> list[Sample]:
        """The fixed subset that scales are computed from: the first samples, up to spec.calibration_tokens."""
        ...

    def scales(self) -> dict[str, torch.Tensor] | None:
        """Column -> float32 [D], or None when not published yet (or not needed by the codec)."""
        ...

    def publish_scales(self, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Publish the scales once; returns those that count: another worker's, when it was first."""
        ...

    def missing(self) -> list[int]:
        """Shards without a commit record (one listing)."""
        ...

    def record(self, shard: int) -> ShardRecord:
        """Read one commit record. Raises DatasetError when the shard is not committed or belongs to another data set."""
        ...

    def records(self, threads: int = 16) -> dict[int, ShardRecord]:
        """Read all commit records, in parallel."""
        ...

    def commit(self, record: ShardRecord, *, replace: bool = False) -> None:
        """Make a shard exist. Its object must be in the store already.

        Raises ShardAlreadyCommitted when somebody was first (the caller's object is removed unless it is the very
        same one). `replace` puts the record in the place of the present one and then removes the old object.
        """
        ...

    def seal(self) -> Manifest:
        """Write manifest.json once every planned shard has a record; idempotent; rewrites it after a redo.

        Raises DatasetError naming the missing shards.
        """
        ...

    @property
    def sealed(self) -> bool: ...

    def manifest(self) -> Manifest:
        """Read the seal and check that it belongs to this data set. Raises DatasetError when unsealed."""
        ...


def create_dataset(
    store: Store, name: str, spec: DatasetSpec, samples: Iterable[Sample], scratch_dir: Path | None = None
) -> Dataset:
    """Create `<name>-<fingerprint[:12]>/` from a stream of samples, or finish (or return) the same one.

    Memory is bounded by one shard's tokens; a killed creation is finished by calling again with the same stream.
    Raises DatasetError: duplicate ids, no sample, or a stream that differs from what was already written.
    """
    raise NotImplementedError


def open_dataset(uri: str | Path, expected: DatasetSpec | None = None) -> Dataset:
    """Open the data set at `uri` (its own folder, or a folder that holds exactly one).

    Raises DatasetError when there is none, when its creation did not finish, or when `expected` differs: the message
    names the differing fields.
    """
    raise NotImplementedError
