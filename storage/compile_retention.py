"""Which compile caches are kept: pins, and the removal of what nobody needs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from dflash_core.compile_fingerprint import slug
from dflash_core.configuration import UserError
from storage.compile_cache import PINS, VERSIONS, Version, list_versions
from storage.objects import ObjectInfo, ObjectNotFound, Store

STRAY_AFTER_S = 6 * 3600.0
"""Objects without a manifest may belong to a publisher at work for this long."""


def check_pin_name(name: str) -> None:
    """Raise UserError unless a pin can have this very name."""
    if slug(name) != name:
        raise UserError(
            f"{name!r} is no name of a pin: take letters, digits and . + - _, with neither a dot nor a dash "
            "at the ends"
        )


def pin(store: Store, version: Version, name: str) -> None:
    """Keep a version until `unpin(slug(name))`. Raises UserError when it is gone already."""
    manifest = f"{version.folder}/{version.manifest_name}"
    store.put_bytes(f"{PINS}/{slug(name)}.json", json.dumps({"manifest": manifest}).encode(), overwrite=True)
    try:
        store.head(manifest)
    except ObjectNotFound:
        store.delete(f"{PINS}/{slug(name)}.json")
        raise UserError(f"version {version.name} was removed meanwhile") from None


def unpin(store: Store, name: str) -> None:
    """Let a version go. Raises UserError when nothing is pinned under this very name."""
    key = f"{PINS}/{name}.json"
    pins = sorted(info.key for info in store.list(f"{PINS}/"))
    if key not in pins:
        there = ", ".join(pin.removeprefix(f"{PINS}/").removesuffix(".json") for pin in pins) or "none"
        raise UserError(f"no version in {store.uri} is pinned as {name!r}; pins: {there}")
    store.delete(key)


def prune(
    store: Store, *, within: str = VERSIONS, versions: int = 2, fingerprints: int = 4, dry_run: bool = False
) -> dict[str, str]:
    """Remove what nobody needs and return it: key -> reason.

    Kept are: pinned versions; for each graph set and hardware the `fingerprints` that were published to last;
    for each of these the current version and the newest, `versions` in all; and what may belong to a
    publisher at work: what is younger than `STRAY_AFTER_S` and has no manifest, or one newer than CURRENT.

    A fingerprint whose CURRENT changes meanwhile is left to the next call. Stores cannot delete on condition:
    should CURRENT change in the moment of the removal itself, the next start finds no version, or rejects the
    one it finds; then it compiles and publishes again. Raises UserError, StoreError.
    """
    if versions < 1 or fingerprints < 1:
        raise UserError("prune keeps at least one version of at least one fingerprint")
    infos = {info.key: info for info in store.list(f"{within}/")}  # first: what it lacks is new
    known, rejected = list_versions(store, within)
    doomed = {key: reason for key, reason in rejected.items() if _old(infos.get(key))}
    at_work = _at_work(known, infos)
    retired = _retired(known, fingerprints) - {_folder(key) for key in at_work}
    kept: set[str] = set()
    for folder in {version.folder for version in known}:
        inside = [version for version in known if version.folder == folder]
        # The current one first, then the newest.
        ranked = sorted(inside, key=lambda version: not version.current)
        for place, version in enumerate(ranked):
            key = f"{folder}/{version.manifest_name}"
            if version.pins or key in at_work or (folder not in retired and place < versions):
                kept |= {key, f"{folder}/{version.manifest.archive_name}"}
                kept |= {f"{folder}/CURRENT"} if version.current else set()
            elif folder in retired:
                doomed[key] = f"only the newest {fingerprints} fingerprints are kept"
            else:
                doomed[key] = f"only the newest {versions} versions are kept"
    doomed |= _strays(known, infos, kept, doomed, retired)
    changed = _changed(store, {_folder(key) for key in doomed}, infos)
    doomed = {key: reason for key, reason in doomed.items() if _folder(key) not in changed}
    # A reader that finds CURRENT must find what it names: pointers go first, archives last.
    order = sorted(doomed, key=lambda key: (not key.endswith("/CURRENT"), not key.endswith(".json"), key))
    for key in order:
        if not dry_run:
            store.delete(key)
    return {key: doomed[key] for key in order}


def _at_work(known: Iterable[Version], infos: dict[str, ObjectInfo]) -> set[str]:
    """Return the manifests that publishers may be about to make current.

    A publisher succeeds only while CURRENT is what it was before compiling, so his manifest is newer.
    """
    found = set()
    for version in known:
        key = f"{version.folder}/{version.manifest_name}"
        manifest, pointer = infos.get(key), infos.get(f"{version.folder}/CURRENT")
        newest = manifest is None or pointer is None or manifest.modified > pointer.modified
        if newest and not _old(manifest):
            found.add(key)
    return found


def _changed(store: Store, folders: Iterable[str], infos: dict[str, ObjectInfo]) -> set[str]:
    """Return the folders whose CURRENT is no longer the one that was listed."""

    def etag(folder: str) -> str | None:
        try:
            return store.head(f"{folder}/CURRENT").etag
        except ObjectNotFound:
            return None

    listed = {_folder(key): info.etag for key, info in infos.items() if key.endswith("/CURRENT")}
    return {folder for folder in folders if etag(folder) != listed.get(folder)}


def _retired(known: Iterable[Version], fingerprints: int) -> set[str]:
    """Return the folders beyond the newest `fingerprints` of each family; `known` is newest first."""
    families: dict[str, list[str]] = {}
    for version in known:
        family = families.setdefault(version.folder.rsplit("/", 2)[0], [])
        if version.folder not in family:
            family.append(version.folder)
    return {folder for family in families.values() for folder in family[fingerprints:]}


def _strays(
    known: Iterable[Version],
    infos: dict[str, ObjectInfo],
    kept: set[str],
    doomed: dict[str, str],
    retired: set[str],
) -> dict[str, str]:
    """Return archives and pointers that no kept manifest needs."""
    ours = {f"{version.folder}/{version.manifest.archive_name}" for version in known}
    strays = {}
    for key, info in infos.items():
        if key in kept or key in doomed or not key.endswith((".tar.zst", "/CURRENT")):
            continue
        if key in ours or (key.endswith("/CURRENT") and key.removesuffix("/CURRENT") in retired):
            strays[key] = "its version is not kept"
        elif key.endswith(".tar.zst") and _old(info):
            strays[key] = "no manifest lists it"
    return strays


def _folder(key: str) -> str:
    return key.rpartition("/")[0]


def _old(info: ObjectInfo | None) -> bool:
    return info is not None and time.time() - info.modified > STRAY_AFTER_S
