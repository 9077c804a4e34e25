"""What a data set is, as data: its identity, the plan of its shards, its seal, the names of its objects."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from pydantic import Field, field_validator

from dflash_core.configuration import Config, UserError, fingerprint
from dflash_core.records import CaptureSpec, TargetSpec
from storage.codec import parse_codec
from storage.shard_format import FORMAT_VERSION, FormatVersion, PlannedRow, plan_rows

SPEC_KEY, PLAN_KEY, INDEX_KEY = "dataset.json", "plan.json", "index.parquet"
SCALES_FILE, MANIFEST_KEY = "scales.safetensors", "manifest.json"
RECORDS, SHARDS, SAMPLES = "records/", "shards/", "samples/"


class DatasetError(UserError):
    """The data set is not there, unfinished, or not the one that was meant."""


class DatasetSpec(Config):
    """Everything that changes the content of a data set. Its fingerprint is the data set's identity."""

    target: TargetSpec
    capture: CaptureSpec
    codec: str = "tolerance=0.1"
    """"lossless", "fp8" or "tolerance=<relative error>"."""
    input_sha256: str
    """Fingerprint of the chats."""
    chat: dict[str, Any] = Field(default_factory=dict)
    """The chat settings (JSON), template and maximal length included."""
    duplicate_ids: Literal["error", "drop"] = "error"
    """What to do with a second sample of the same id (see `create_dataset`)."""
    shard_tokens: int = Field(default=65_536, ge=1)
    """A shard takes whole samples until the next would pass this number."""
    row_group_bytes: int = Field(default=64 << 20, ge=1)
    """No row group holds more than so many bytes of bf16 states (before encoding); longer samples are cut."""
    row_group_fill_bytes: int = Field(default=4 << 20, ge=0)
    """Short samples share a row group until it holds so many bytes of bf16 states: larger ones make fewer and
    longer requests, but are read again where a shuffled epoch comes back to them and memory is short."""
    calibration_tokens: int = Field(default=65_536, ge=1)
    """Scales come from the first samples of the data set, up to so many tokens."""
    format_version: FormatVersion = FORMAT_VERSION

    @field_validator("codec")
    @classmethod
    def _one_name_for_one_codec(cls, codec: str) -> str:
        parsed = parse_codec(codec)
        return f"tolerance={parsed.tolerance:g}" if parsed.tolerance else parsed.name

    @property
    def fingerprint(self) -> str:
        """64 hex digits."""
        return fingerprint(self)

    @property
    def token_bytes(self) -> int:
        """Bytes of bf16 states that one token has in all data columns."""
        return 2 * self.target.hidden_size * len(self.capture.columns)

    @property
    def row_group_tokens(self) -> int:
        """Most tokens in a row group."""
        return max(1, self.row_group_bytes // self.token_bytes)

    def plan_rows(self, lengths: Sequence[int]) -> list[PlannedRow]:
        """Rows and row groups of a shard whose samples have these lengths."""
        return plan_rows(lengths, self.row_group_tokens, -(-self.row_group_fill_bytes // self.token_bytes))


class PlannedShard(Config):
    """One shard of the plan."""

    shard: int
    samples: int
    tokens: int
    supervised: int
    """Tokens whose loss mask is set."""
    rows: int
    row_groups: int
    samples_sha256: str
    """Of samples/NNNNN.parquet, the shard's input."""


class Plan(Config):
    """All shards, as a function of the samples alone: any number of workers writes the same ones."""

    fingerprint: str
    samples: int
    tokens: int
    supervised: int
    duplicates_dropped: int
    index_sha256: str
    shards: tuple[PlannedShard, ...]


class SealedShard(Config):
    """What the manifest says of one shard."""

    shard: int
    object: str
    size: int
    sha256: str
    tokens: int
    record_sha256: str
    """Of records/NNNNN.json."""


class Manifest(Config):
    """Written last; its presence says that the data set is complete."""

    fingerprint: str
    plan_sha256: str
    scales_sha256: str | None
    samples: int
    tokens: int
    bytes: int
    """Of all shard objects."""
    relative_error: dict[str, float]
    """Column -> error over the whole data set (see `ShardRecord`)."""
    column_bytes: dict[str, int]
    shards: tuple[SealedShard, ...]


def dataset_folder(name: str, spec: DatasetSpec) -> str:
    """Folder of a data set: its name, and 12 digits of its identity."""
    return f"{name}-{spec.fingerprint[:12]}"


def record_key(shard: int) -> str:
    return f"{RECORDS}{shard:05d}.json"


def samples_key(shard: int) -> str:
    return f"{SAMPLES}{shard:05d}.parquet"


def shard_key(shard: int, sha256: str) -> str:
    """Key of a shard's object: it carries its content's hash, so another content never takes its place."""
    return f"{SHARDS}{shard:05d}-{sha256[:16]}.parquet"


def software_versions() -> dict[str, str]:
    """Versions that may change what is written; stated, not part of the identity."""
    names = ("dflash-pipeline", "numpy", "pyarrow", "torch", "transformers", "zstandard")
    return {name: _version(name) for name in names}


@lru_cache
def _version(package: str) -> str:
    # Looked up once: it reads a file of the package's, and every shard asks.
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def differing_fields(here: DatasetSpec, there: DatasetSpec) -> list[str]:
    """Name each field in which two specs differ, with both values."""
    left, right = _flat(here.model_dump(mode="json")), _flat(there.model_dump(mode="json"))
    names = [*left, *(name for name in right if name not in left)]
    return [
        f"{name}: {left.get(name, 'absent')!r} here, {right.get(name, 'absent')!r} in the data set"
        for name in names
        if left.get(name) != right.get(name)
    ]


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, dict):
            flat |= _flat(item, f"{prefix}{name}.")
        else:
            flat[prefix + name] = item
    return flat
