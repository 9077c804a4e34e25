"""Versions of compile caches on an object store: publish, choose, restore, list, verify.

    v1/<graph set>/<hardware>/<software>/<fingerprint>/
        cache-<sha256>.tar.zst        created once
        manifest-<sha256>.json        created once: fingerprint, digests of archive and members, signature
        CURRENT                       written last, conditionally: the name of the manifest to restore
    v1-pins/<name>.json               a version that must be kept (storage/compile_retention.py)

Builds are not reproducible byte for byte, so versions are named by content, and of two publishers one wins.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_core.compile_fingerprint import Fingerprint, differences
from dflash_core.configuration import UserError
from storage.ahead import read_ahead
from storage.compile_archive import (
    MAX_MANIFEST_BYTES,
    Manifest,
    Package,
    RejectedArtifact,
    seal,
    unpack,
    unseal,
)
from storage.objects import ObjectExists, ObjectNotFound, Store, StoreError

VERSIONS = "v1"
PINS = "v1-pins"
MANIFEST_NAME = re.compile(r"manifest-([0-9a-f]{64})\.json")


@dataclass(frozen=True, kw_only=True)
class Version:
    """One published compile cache."""

    folder: str
    """Key of its folder."""
    manifest_name: str
    manifest: Manifest
    current: bool
    """Whether CURRENT names it, so that a start without a wish restores it."""
    pins: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Short name for people and for `find_version`: "<fingerprint>/<manifest>"."""
        return f"{self.folder.rpartition('/')[2]}/{self.manifest_name[9:21]}"


@dataclass(frozen=True, kw_only=True)
class Current:
    """What CURRENT held when it was read. Publishing replaces it only if it is still the same."""

    etag: str | None
    """None: there was none."""
    manifest_name: str | None
    """None: there was none, or it was torn."""


# Publishing.


def publish(
    store: Store, package: Package, *, replacing: Current, key: bytes | None = None
) -> Version | None:
    """Make a package the current version, unless another publisher was first: then return None.

    Args:
        replacing: what `read_current` said before this machine compiled.
        key: signs the manifest.

    Raises:
        StoreError: the store failed. CURRENT then still names what it named.
    """
    manifest = package.manifest
    place = place_of(manifest.fingerprint)
    _create(store, f"{place}/{manifest.archive_name}", package.archive)
    data = seal(manifest, key)
    name = manifest_name(data)
    _create(store, f"{place}/{name}", data)
    if not _point(store, place, name, replacing):
        # The archive may be the winner's as well, when both packed the same bytes; `prune` sorts that out.
        store.delete(f"{place}/{name}")
        return None
    return Version(folder=place, manifest_name=name, manifest=manifest, current=True)


def _create(store: Store, key: str, content: Path | bytes) -> None:
    try:
        if isinstance(content, bytes):
            store.put_bytes(key, content)
        else:
            store.put_file(key, content)
    except ObjectExists:
        # Named by content: whoever wrote it wrote the same, unless the store lost bytes.
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        if store.head(key).size != size:
            raise StoreError(f"{store.uri}/{key} has another size than its content; delete it") from None


def _point(store: Store, place: str, name: str, replacing: Current) -> bool:
    """Let CURRENT name a manifest; False when another publisher changed it meanwhile."""
    data = json.dumps({"manifest": name}).encode()
    try:
        if replacing.etag is None:
            store.put_bytes(f"{place}/CURRENT", data)
        else:
            store.replace(f"{place}/CURRENT", data, replacing.etag)
    except (ObjectExists, ObjectNotFound):
        return read_current(store, place).manifest_name == name
    return True


def manifest_name(data: bytes) -> str:
    """Name a sealed manifest by its content."""
    return f"manifest-{hashlib.sha256(data).hexdigest()}.json"


def place_of(fingerprint: Fingerprint) -> str:
    """Return the folder of a fingerprint's versions."""
    return f"{VERSIONS}/{fingerprint.key}"


def read_current(store: Store, place: str) -> Current:
    """Return which manifest a folder's CURRENT names. Raises StoreError."""
    try:
        # In this order: were CURRENT replaced in between, the stale etag would only make us lose a race.
        etag = store.head(f"{place}/CURRENT").etag
        data = store.get(f"{place}/CURRENT")
    except ObjectNotFound:
        return Current(etag=None, manifest_name=None)
    try:
        name = json.loads(data)["manifest"]
    except (ValueError, KeyError, TypeError):
        name = None
    known = isinstance(name, str) and MANIFEST_NAME.fullmatch(name)
    return Current(etag=etag, manifest_name=name if known else None)


# Restoring.


def choose(
    store: Store,
    fingerprint: Fingerprint,
    current: Current,
    *,
    wish: str | None = None,
    key: bytes | None = None,
) -> Version | None:
    """Return the version to restore: the one wished for by name, or the current one; None when there is none.

    Raises:
        RejectedArtifact: it was damaged, not signed as it must be, or made for another environment.
        UserError: there is no version of the wished name.
        StoreError: the store failed.
    """
    if wish is not None:
        named = find_version(store, wish)
        version = _load(store, named.folder, named.manifest_name, key)
    elif current.etag is None:
        return None
    elif current.manifest_name is None:
        raise RejectedArtifact("CURRENT is damaged: it names no manifest")
    else:
        version = _load(store, place_of(fingerprint), current.manifest_name, key)
    if version.manifest.fingerprint.id != fingerprint.id:
        words = differences(version.manifest.fingerprint, fingerprint)
        raise RejectedArtifact(f"made for another environment: {'; '.join(words[:8])}")
    return replace(version, current=version.manifest_name == current.manifest_name)


def restore(store: Store, version: Version, folder: Path) -> None:
    """Make `folder` hold exactly what a version holds, whatever it held before.

    Raises RejectedArtifact, a lost network included; `folder` is then gone, never half of anything.
    """
    remove_folder(folder)
    manifest = version.manifest
    folder.parent.mkdir(parents=True, exist_ok=True)
    needed = manifest.archive_bytes + manifest.unpacked_bytes
    if shutil.disk_usage(folder.parent).free < needed * 1.1:
        raise RejectedArtifact(f"{folder.parent} has no room for {needed / 2**20:.0f} MiB")
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder.parent) as scratch:
        archive = Path(scratch) / "archive"
        try:
            _download(store, f"{version.folder}/{manifest.archive_name}", manifest.archive_bytes, archive)
        except StoreError as error:
            raise RejectedArtifact(f"the archive cannot be read: {error}") from error
        unpack(archive, manifest, folder)


def _download(store: Store, key: str, size: int, target: Path) -> None:
    stored = store.head(key).size
    if stored != size:
        raise RejectedArtifact(f"the archive has {stored} bytes, its manifest says {size}")
    with target.open("wb") as file:
        for piece in read_ahead(store, key, size):
            file.write(piece)


def remove_folder(folder: Path) -> None:
    """Remove a folder in one step, as seen by others, and then its content."""
    if folder.exists():
        aside = Path(tempfile.mkdtemp(prefix=".old-", dir=folder.parent))
        folder.rename(aside / folder.name)
        shutil.rmtree(aside)


def _load(store: Store, folder: str, name: str, key: bytes | None) -> Version:
    where = f"{folder}/{name}"
    try:
        if store.head(where).size > MAX_MANIFEST_BYTES:
            raise RejectedArtifact(f"{where} is too large to be a manifest")
        data = store.get(where)
    except ObjectNotFound as error:
        raise RejectedArtifact(f"{where} is missing") from error
    if manifest_name(data) != name:
        raise RejectedArtifact(f"{where} is damaged: its sha256 is not the one in its name")
    return Version(folder=folder, manifest_name=name, manifest=unseal(data, key), current=False)


# Looking.


def list_versions(store: Store, within: str = VERSIONS) -> tuple[list[Version], dict[str, str]]:
    """Return every version below a folder, newest first, and what was rejected: key -> reason.

    Signatures are not looked at here; `verify` does. Raises StoreError.
    """
    keys = [info.key for info in store.list(f"{within}/")]
    pins = read_pins(store)
    currents = {key: read_current(store, key[:-8]).manifest_name for key in keys if key.endswith("/CURRENT")}
    versions, rejected = [], {}
    for key in keys:
        folder, _, name = key.rpartition("/")
        if name == "CURRENT" and currents[key] is None:
            rejected[key] = "CURRENT is damaged: it names no manifest"
        if not MANIFEST_NAME.fullmatch(name):
            continue
        try:
            version = _load(store, folder, name, None)
        except RejectedArtifact as error:
            rejected[key] = str(error)
            continue
        pinned = tuple(sorted(pin for pin, pinned_key in pins.items() if pinned_key == key))
        versions.append(replace(version, current=currents.get(f"{folder}/CURRENT") == name, pins=pinned))
    return sorted(versions, key=lambda version: version.manifest.created, reverse=True), rejected


def find_version(store: Store, name: str) -> Version:
    """Return the one version whose name begins with `name`. Raises UserError when none or several do."""
    versions, _ = list_versions(store)
    found = [version for version in versions if version.name.startswith(name)]
    if len(found) != 1 and "/" not in name:
        found = [version for version in found if version.current] or found
    if len(found) != 1:
        known = ", ".join(version.name for version in versions[:10]) or "none"
        state = f"{len(found)} versions are" if found else "no version is"
        raise UserError(f"{state} called {name!r} in {store.uri}; there are: {known}")
    return found[0]


def verify(store: Store, version: Version, key: bytes | None = None) -> None:
    """Download a version and check every digest in it, and its signature where there is a key.

    Raises RejectedArtifact.
    """
    fresh = _load(store, version.folder, version.manifest_name, key)
    with tempfile.TemporaryDirectory(prefix="dflash-verify-") as scratch:
        restore(store, fresh, Path(scratch) / "cache")


def nearest(store: Store, fingerprint: Fingerprint) -> tuple[Version, list[str]] | None:
    """Return the version that fits best and, in words, why it does not fit; None when there is none."""
    versions, _ = list_versions(store)
    compared = [(version, differences(version.manifest.fingerprint, fingerprint)) for version in versions]
    return min(compared, key=lambda pair: len(pair[1]), default=None)


def read_pins(store: Store) -> dict[str, str]:
    """Return pin name -> key of the pinned manifest. Raises StoreError."""
    pins = {}
    for info in store.list(f"{PINS}/"):
        name = info.key.removeprefix(f"{PINS}/").removesuffix(".json")
        try:
            pins[name] = str(json.loads(store.get(info.key))["manifest"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{store.uri}/{info.key} is damaged; unpin {name} and pin it again") from error
    return pins
