"""A data set on a store: created from samples, committed shard by shard, sealed when whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from dflash_core.configuration import UserError
from dflash_core.records import Sample
from storage.ahead import ahead
from storage.codec import parse_codec
from storage.dataset_spec import (
    INDEX_KEY,
    MANIFEST_KEY,
    PLAN_KEY,
    RECORDS,
    SCALES_FILE,
    SHARDS,
    SPEC_KEY,
    DatasetError,
    DatasetSpec,
    Manifest,
    Plan,
    PlannedShard,
    SealedShard,
    dataset_folder,
    differing_fields,
    record_key,
    samples_key,
    software_versions,
)
from storage.index import Index, read_index
from storage.manifest import manifest_of, record_bytes, total_error
from storage.objects import ObjectExists, ObjectNotFound, Store, StoreConfig, StoreError, open_store
from storage.planning import Clash, read_samples, write_plan
from storage.shard_format import ShardCorrupt, ShardRecord, mend

__all__ = [
    "Dataset",
    "DatasetError",
    "DatasetSpec",
    "Index",
    "Manifest",
    "Plan",
    "PlannedShard",
    "ShardAlreadyCommitted",
    "ShardCorrupt",
    "ShardRecord",
    "create_dataset",
    "open_dataset",
    "total_error",
]


Own = TypeVar("Own", Plan, Manifest)


class ShardAlreadyCommitted(DatasetError):
    """Another worker committed this shard first; what this one wrote has been removed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """The commit record that a redo found when it began, and replaces only if it is still the same."""

    etag: str
    object: str | None
    """Key of the object that it names; None when the record is damaged."""


class Dataset:
    """An existing data set. Cheap to open: plan, index and records are read on first use."""

    def __init__(self, store: Store, spec: DatasetSpec) -> None:
        """`store` is the data set's own folder; most callers want `open_dataset`."""
        self.store, self.spec = store, spec
        self.fingerprint = spec.fingerprint
        self.uri = store.uri
        self.name = store.uri.rpartition("/")[2].rpartition("-")[0]
        self._sealed: dict[int, SealedShard] = {}

    @property
    def columns(self) -> tuple[str, ...]:
        """Data columns in stored order."""
        return self.spec.capture.columns

    @cached_property
    def plan(self) -> Plan:
        """The plan. Raises DatasetError when it is missing, damaged, or belongs to another data set."""
        return self._own(
            Plan,
            PLAN_KEY,
            missing="its creation did not finish: create it again",
            damaged="remove it and run the extraction again with the same configuration, which writes it "
            "from the same chats",
        )

    @cached_property
    def index(self) -> Index:
        """The index, digest checked."""
        data = self._get(INDEX_KEY, self._input_remedy)
        self._check_digest(data, self.plan.index_sha256, INDEX_KEY)
        return read_index(data)

    def samples(self, shard: int) -> list[Sample]:
        """Read the input of one shard, in plan order, digest checked."""
        planned = self._planned(shard)
        data = self._get(samples_key(shard), self._input_remedy)
        self._check_digest(data, planned.samples_sha256, samples_key(shard))
        return read_samples(data)

    def calibration_samples(self) -> list[Sample]:
        """The fixed subset that scales come from: the first samples, spec.calibration_tokens at least."""
        chosen: list[Sample] = []
        held = 0
        for planned in self.plan.shards:
            for sample in self.samples(planned.shard):
                if held >= self.spec.calibration_tokens:
                    return chosen
                chosen.append(sample)
                held += sample.num_tokens
        return chosen

    # Scales.

    def scales(self) -> dict[str, torch.Tensor] | None:
        """Column -> float32 [D], or None when not published (yet, or because the codec has none)."""
        data = self.scales_bytes
        return None if data is None else load_safetensors(data)

    @property
    def scales_bytes(self) -> bytes | None:
        """scales.safetensors as it is; None when there is none."""
        if "_scales" not in self.__dict__:
            try:
                self._scales = self.store.get(SCALES_FILE)
            except ObjectNotFound:
                return None
        return self._scales

    @property
    def scales_sha256(self) -> str | None:
        data = self.scales_bytes
        return None if data is None else hashlib.sha256(data).hexdigest()

    def publish_scales(self, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Publish the scales once; returns those that count: another worker's, when it was first.

        Raises DatasetError unless there is one finite, positive float32 [D] for each data column.
        """
        width = self.spec.target.hidden_size
        for column in self.columns:
            scale = scales.get(column)
            good = scale is not None and scale.shape == (width,) and scale.dtype == torch.float32
            if not good or scale is None or not bool((torch.isfinite(scale) & (scale > 0)).all()):
                raise DatasetError(f"the scales of {column} must be {width} finite positive float32 values")
        kept = {column: scales[column].cpu().contiguous() for column in self.columns}
        with suppress(ObjectExists):
            self.store.put_bytes(SCALES_FILE, save_safetensors(kept))
        found = self.scales()
        assert found is not None
        return found

    # Commit records.

    def missing(self) -> list[int]:
        """Shards without a commit record (one listing)."""
        done = {self._shard_of(info.key) for info in self.store.list(RECORDS)}
        return [planned.shard for planned in self.plan.shards if planned.shard not in done]

    def committed(self, shard: int) -> bool:
        """Whether one shard has a commit record."""
        self._planned(shard)
        return self._exists(record_key(shard))

    def record(self, shard: int) -> ShardRecord:
        """Read one commit record; after `manifest`, only the one that was sealed is accepted.

        Raises DatasetError when the shard is not committed, or the record belongs to another data set.
        """
        data = self._get(record_key(shard), f"shard {shard} is not extracted yet: run the extraction")
        if shard in self._sealed and hashlib.sha256(data).hexdigest() != self._sealed[shard].record_sha256:
            raise ShardCorrupt(
                f"{self.uri}/{record_key(shard)} is not the one that was sealed; {mend(self.uri)}"
            )
        try:
            record = ShardRecord.model_validate_json(data)
        except ValidationError as error:
            fault = error.errors()[0]["msg"]
            raise ShardCorrupt(
                f"{self.uri}/{record_key(shard)} is no commit record ({fault}); {mend(self.uri)}"
            ) from None
        self._check_record(record, shard)
        return record

    def iter_records(self, shards: Iterable[int] | None = None, threads: int = 16) -> Iterator[ShardRecord]:
        """Read the commit records of shards (default: of all that are committed) in parallel, in order.

        A record lists a hundred row groups with their digests: only a few are held at a time. Errors as
        `record`.
        """
        if shards is None:
            shards = sorted(self._shard_of(info.key) for info in self.store.list(RECORDS))
        return ahead(self.record, shards, threads=threads)

    def records(self) -> dict[int, ShardRecord]:
        """Read all commit records that there are, and hold them: half a megabyte each at real sizes."""
        return {record.shard: record for record in self.iter_records()}

    def standing(self, shard: int) -> Standing | None:
        """Return a shard's commit record as it is now, for a redo that will replace it; None without one."""
        try:
            # In this order: were it replaced in between, the stale etag would only make the redo lose.
            etag = self.store.head(record_key(shard)).etag
            data = self.store.get(record_key(shard))
        except ObjectNotFound:
            return None
        with suppress(ValidationError):
            named = ShardRecord.model_validate_json(data).object
            return Standing(etag=etag, object=named if named.startswith(f"{SHARDS}{shard:05d}-") else None)
        return Standing(etag=etag, object=None)

    def commit(self, record: ShardRecord, *, replacing: Standing | None = None) -> None:
        """Make a shard exist. Its object must be in the store already.

        `replacing` is the record that `standing` found when the redo began: the seal is broken, the record
        takes its place, then the object that it named is removed. Raises ShardAlreadyCommitted when somebody
        was first: the caller's object is removed, unless it is the very one that counts.
        """
        self._check_record(record, record.shard)
        key, data = record_key(record.shard), record_bytes(record)
        try:
            if replacing is not None:
                if self.store.head(key).etag != replacing.etag:  # leaves the winner's seal whole
                    raise ObjectExists(f"{self.uri}/{key} has changed")
                self.unseal()
                self.store.replace(key, data, replacing.etag)
                if replacing.object not in (None, record.object):
                    self.store.delete(replacing.object)
            else:
                self.store.put_bytes(key, data)
        except ObjectExists:
            if self.record(record.shard).object != record.object:
                self.store.delete(record.object)
            raise ShardAlreadyCommitted(
                f"shard {record.shard} of {self.uri} was committed by another worker; its version counts"
            ) from None
        except ObjectNotFound:
            if replacing is None:
                raise
            if not self._exists(key):
                self.store.delete(record.object)
            raise DatasetError(
                f"shard {record.shard} of {self.uri} was dropped by a repair while it was done again: run "
                "the extraction again"
            ) from None

    def drop(self, shard: int) -> None:
        """Forget a shard (repair): break the seal, remove its record, then every object that it may have."""
        self.unseal()
        self.store.delete(record_key(shard))
        for info in list(self.store.list(f"{SHARDS}{shard:05d}-")):
            self.store.delete(info.key)

    def drop_plan(self, damaged: Sequence[str]) -> None:
        """Forget the plan and damaged objects that it names; the same creation writes just these again.

        The plan goes last: while it is there, a repair that was stopped can be run again.
        """
        self.unseal()
        for key in damaged:
            self.store.delete(key)
        self.store.delete(PLAN_KEY)

    # The seal.

    def seal(self) -> Manifest:
        """Write manifest.json once every planned shard has a record and its object; idempotent.

        Raises DatasetError naming the missing shards, ShardCorrupt when an object is gone or of another size.
        """
        absent = self.missing()
        if absent:
            raise DatasetError(
                f"{self.uri} lacks {len(absent)} of {len(self.plan.shards)} shards: {_some(absent)}"
            )
        manifest = manifest_of(
            self._records_with_objects(),
            self.plan,
            plan_sha256=self._plan_sha256,
            scales_sha256=self.scales_sha256,
            columns=self.columns,
        )
        data = manifest.model_dump_json(indent=1).encode()
        try:
            self.store.put_bytes(MANIFEST_KEY, data)
        except ObjectExists:
            etag = self.store.head(MANIFEST_KEY).etag
            if self.store.get(MANIFEST_KEY) != data:
                self.store.replace(MANIFEST_KEY, data, etag)
        return manifest

    def _records_with_objects(self) -> Iterator[ShardRecord]:
        """Read the record of every planned shard. Raises ShardCorrupt as `seal`."""
        sizes = {info.key: info.size for info in self.store.list(SHARDS)}
        for record in self.iter_records(planned.shard for planned in self.plan.shards):
            if sizes.get(record.object) != record.size:
                state = "is gone" if record.object not in sizes else f"has {sizes[record.object]} bytes"
                raise ShardCorrupt(
                    f"shard {record.shard} of {self.uri}: {record.object} {state}; {mend(self.uri)}"
                )
            yield record

    @property
    def sealed(self) -> bool:
        """Whether the seal is there (it is looked up each time)."""
        return self._exists(MANIFEST_KEY)

    def manifest(self) -> Manifest:
        """Read the seal, and from now on accept only the records that it names.

        Raises DatasetError when the data set is not sealed, or the seal belongs to another data set or plan.
        """
        manifest = self._own(
            Manifest,
            MANIFEST_KEY,
            missing="it is not complete: run the extraction to its end",
            damaged="run the extraction again, which writes it anew",
        )
        if manifest.plan_sha256 != self._plan_sha256 or manifest.scales_sha256 != self.scales_sha256:
            raise DatasetError(
                f"{self.uri}/{MANIFEST_KEY} belongs to another plan or other scales than lie beside it: "
                "run the extraction again, which writes it anew"
            )
        self._sealed = {shard.shard: shard for shard in manifest.shards}
        return manifest

    def unseal(self) -> None:
        """Remove the seal: a data set whose shards are about to change is not complete."""
        self._sealed = {}
        self.store.delete(MANIFEST_KEY)

    # Small things.

    @cached_property
    def _plan_sha256(self) -> str:
        return hashlib.sha256(self.store.get(PLAN_KEY)).hexdigest()

    def _planned(self, shard: int) -> PlannedShard:
        if not 0 <= shard < len(self.plan.shards):
            raise DatasetError(f"{self.uri} has shards 0 to {len(self.plan.shards) - 1}, not {shard}")
        return self.plan.shards[shard]

    def _check_record(self, record: ShardRecord, shard: int) -> None:
        where = record_key(shard)
        self._check_fingerprint(record.fingerprint, where)
        planned = self._planned(shard)
        if (record.shard, record.samples, record.tokens, record.rows) != (
            shard,
            planned.samples,
            planned.tokens,
            planned.rows,
        ):
            raise ShardCorrupt(f"{self.uri}/{where} does not fit the plan of shard {shard}; {mend(self.uri)}")
        if parse_codec(self.spec.codec).needs_scales and record.scales_sha256 != self.scales_sha256:
            raise ShardCorrupt(f"{self.uri}/{where} was written with other scales; {mend(self.uri)}")

    def _check_fingerprint(self, found: str, where: str) -> None:
        if found != self.fingerprint:
            raise DatasetError(
                f"{self.uri}/{where} belongs to another data set (fingerprint {found[:12]}, not "
                f"{self.fingerprint[:12]}): put the right one back, or extract into another folder"
            )

    def _check_digest(self, data: bytes, wanted: str, key: str) -> None:
        if hashlib.sha256(data).hexdigest() != wanted:
            raise DatasetError(
                f"{self.uri}/{key} is damaged (its sha256 is not the planned one); {self._input_remedy}"
            )

    @property
    def _input_remedy(self) -> str:
        return (
            f"`dflash shards repair {self.uri}` drops what is damaged of the plan's objects, and the "
            "extraction, run again with the same configuration, writes it"
        )

    def _exists(self, key: str) -> bool:
        try:
            self.store.head(key)
        except ObjectNotFound:
            return False
        return True

    def _get(self, key: str, otherwise: str) -> bytes:
        try:
            return self.store.get(key)
        except ObjectNotFound:
            raise DatasetError(f"{self.uri} has no {key}; {otherwise}") from None

    def _own(self, model: type[Own], key: str, *, missing: str, damaged: str) -> Own:
        """Read what lies under a key. Raises DatasetError when it is missing, damaged, or of another set."""
        data = self._get(key, missing)
        try:
            found = model.model_validate_json(data)
        except ValidationError:
            raise DatasetError(f"{self.uri}/{key} is damaged: {damaged}") from None
        self._check_fingerprint(found.fingerprint, key)
        return found

    def _shard_of(self, key: str) -> int:
        number = key.removeprefix(RECORDS).removesuffix(".json")
        if not number.isdecimal():
            raise DatasetError(f"{self.uri}/{key} is no commit record: remove it")
        return int(number)


def create_dataset(
    store: Store,
    name: str,
    spec: DatasetSpec,
    samples: Iterable[Sample],
    scratch_dir: Path | None = None,
    clash: Clash | None = None,
) -> Dataset:
    """Create `<name>-<fingerprint[:12]>/` on the store from a stream of samples, finish it, or return it.

    Memory is bounded by a few shards' tokens; a killed creation is finished by the same call.
    A finished one is returned without reading the stream.
    A second sample of an id is left out with `spec.duplicate_ids` "drop": counted where its tokens are the
    first one's, else told to `clash` (with where the first was read), before the next is taken.
    Raises DatasetError: no samples, ids twice (with "drop": of other tokens, and no `clash`), a stream that
    differs from what was already written, objects that somebody removed meanwhile. After any UserError of the
    stream's all that this call wrote is removed, unless somebody else wrote beside it.
    """
    root = store.child(dataset_folder(name, spec))
    written = {"spec": spec.model_dump(mode="json"), "versions": software_versions()}
    created: list[str] = []
    try:
        root.put_bytes(SPEC_KEY, json.dumps(written, indent=1, sort_keys=True).encode())
        created.append(SPEC_KEY)
    except ObjectExists:
        _check_same_spec(root, spec)
    dataset = Dataset(root, spec)
    if not dataset._exists(PLAN_KEY):
        try:
            write_plan(root, spec, samples, scratch_dir, created, clash)
        except ObjectNotFound as error:
            raise DatasetError(
                f"{error}: somebody removed {root.uri}, or a part of it, while it was planned; once nobody "
                "removes it any more, run the same command again: it writes what is missing"
            ) from None
        except StoreError:
            raise  # the samples are sound: the same call goes on from here
        except UserError:
            if {info.key for info in root.list("")} == set(created):
                for key in reversed(created):
                    root.delete(key)
                root.remove_folders()
            raise
    return dataset


def open_dataset(
    uri: str | Path, expected: DatasetSpec | None = None, connection: StoreConfig | None = None
) -> Dataset:
    """Open the data set at `uri`: its own folder, or a folder that holds exactly one.

    Raises DatasetError when there is none, when its creation did not finish, or when `expected` differs: the
    message names the differing fields.
    """
    store = open_store(uri, connection)
    try:
        spec = _read_spec(store)
    except ObjectNotFound:
        store = _only_dataset_in(store)
        spec = _read_spec(store)
    if expected is not None:
        _check_same_spec(store, expected)
    dataset = Dataset(store, spec)
    _ = dataset.plan
    return dataset


def _only_dataset_in(store: Store) -> Store:
    found = []
    for folder in store.folders():
        child = store.child(folder)
        try:
            child.head(PLAN_KEY)  # without one its creation did not finish
        except ObjectNotFound:
            continue
        found.append(child)
    if len(found) == 1:
        return found[0]
    what = f"several data sets, say which: {_some([child.uri for child in found])}"
    if not found:
        what = "no data set whose creation finished"
    raise DatasetError(f"{store.uri} holds {what}")


def _read_spec(store: Store) -> DatasetSpec:
    data = store.get(SPEC_KEY)
    try:
        return DatasetSpec.model_validate(json.loads(data)["spec"])
    except (ValidationError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(
            f"{store.uri}/{SPEC_KEY} cannot be understood by this version of the software: {error}"
        ) from None


def _check_same_spec(store: Store, spec: DatasetSpec) -> None:
    there = _read_spec(store)
    if there.fingerprint != spec.fingerprint:
        raise DatasetError(
            f"{store.uri} was made with another configuration and takes nothing of this one:\n  "
            + "\n  ".join(differing_fields(spec, there))
            + "\nGo back to that configuration, or choose another name or folder"
        )


def _some(items: list[Any], limit: int = 12) -> str:
    shown = ", ".join(str(item) for item in items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
