"""What is kept of the compile caches, and what goes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dflash_core.configuration import UserError
from storage.compile_archive import RejectedArtifact, package
from storage.compile_cache import Version, choose, list_versions, place_of, publish, read_current, verify
from storage.compile_retention import STRAY_AFTER_S, pin, prune, unpin
from storage.local_objects import LocalStore
from storage.objects import Store, open_store
from tests.storage.tiny_cache import fingerprint, write_cache


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def publish_cache(store: Store, root: Path, salt: str, rows: int = 512, name: str = "train") -> Version:
    ours = fingerprint(root, name=name, rows=rows)
    write_cache(ours.cache_dir, salt.encode())
    with package(ours.cache_dir, ours, created_by=salt) as packed:
        version = publish(store, packed, replacing=read_current(store, place_of(ours)))
    assert version is not None
    time.sleep(0.002)  # versions are ordered by milliseconds
    return version


def age(store: Store, version: Version) -> None:
    """Make a version's objects so old that no publisher can be at work on them."""
    long_ago = time.time() - STRAY_AFTER_S - 60
    for name in (version.manifest_name, version.manifest.archive_name):
        os.utime(Path(urlsplit(store.uri).path) / version.folder / name, (long_ago, long_ago))


def authors(store: Store) -> set[str]:
    versions, rejected = list_versions(store)
    assert rejected == {}
    for version in versions:
        verify(store, version)
    return {version.manifest.created_by for version in versions}


def test_newest_versions_of_newest_fingerprints_stay(store: Store, tmp_path: Path) -> None:
    for rows in (512, 1024, 2048):
        for number in range(3):
            publish_cache(store, tmp_path / "here", f"{rows}-{number}", rows)
    publish_cache(store, tmp_path / "here", "other", name="other")
    removed = prune(store, versions=2, fingerprints=2, dry_run=True)
    assert len(authors(store)) == 10, "a dry run removes nothing"
    assert prune(store, versions=2, fingerprints=2) == removed
    assert authors(store) == {"1024-1", "1024-2", "2048-1", "2048-2", "other"}
    assert "only the newest 2 fingerprints are kept" in removed.values()
    assert "only the newest 2 versions are kept" in removed.values()
    names = {info.key.rpartition("/")[2][:5] for info in store.list() if "-512" in info.key}
    assert not names, "nothing is left of a retired fingerprint, its CURRENT included"
    assert prune(store, versions=2, fingerprints=2) == {}


def test_current_stays_when_it_is_not_the_newest(store: Store, tmp_path: Path) -> None:
    first = publish_cache(store, tmp_path / "here", "first")
    publish_cache(store, tmp_path / "here", "second")
    key = f"{first.folder}/CURRENT"
    store.put_bytes(key, f'{{"manifest": "{first.manifest_name}"}}'.encode(), overwrite=True)
    prune(store, versions=1)
    assert authors(store) == {"first"}


def test_pinned_versions_stay(store: Store, tmp_path: Path) -> None:
    old = publish_cache(store, tmp_path / "here", "old", rows=512)
    publish_cache(store, tmp_path / "here", "newer", rows=512)
    publish_cache(store, tmp_path / "here", "newest", rows=1024)
    pin(store, old, "run 7")
    prune(store, versions=1, fingerprints=1)
    assert authors(store) == {"old", "newest"}
    ours = fingerprint(tmp_path / "here", name="train", rows=512)
    pinned = choose(store, ours, read_current(store, place_of(ours)), wish=old.name)
    assert pinned is not None and pinned.pins == ()
    assert [version.pins for version in list_versions(store)[0]] == [(), ("run-7",)]
    with pytest.raises(UserError, match="pinned as 'run 7'; pins: run-7"):
        unpin(store, "run 7")
    unpin(store, "run-7")
    with pytest.raises(UserError, match="pinned as 'run-7'; pins: none"):
        unpin(store, "run-7")
    assert prune(store, versions=1, fingerprints=1) == {}, (
        "without a CURRENT it looks like one being published"
    )
    age(store, old)
    prune(store, versions=1, fingerprints=1)
    assert authors(store) == {"newest"}
    with pytest.raises(UserError, match="removed meanwhile"):
        pin(store, old, "too late")
    prune(store)


def test_a_publisher_at_work_is_left_alone(store: Store, tmp_path: Path) -> None:
    kept = publish_cache(store, tmp_path / "here", "kept")
    stray = f"{kept.folder}/cache-{'0' * 64}.tar.zst"
    store.put_bytes(stray, b"uploaded, its manifest not yet")
    assert prune(store) == {}
    path = tmp_path / "store" / stray
    long_ago = time.time() - STRAY_AFTER_S - 60
    os.utime(path, (long_ago, long_ago))
    assert prune(store) == {stray: "no manifest lists it"}
    assert authors(store) == {"kept"}


class Interleaved(LocalStore):
    """A store on which somebody else acts, once, before one of our requests."""

    def __init__(self, root: Path, method: str, contains: str, act: Callable[[], object]) -> None:
        super().__init__(root)
        self.method, self.contains, self.act, self.acted = method, contains, act, False

    def meet(self, method: str, key: str) -> None:
        if not self.acted and method == self.method and self.contains in key:
            self.acted = True
            self.act()

    def get(self, key: str) -> bytes:
        self.meet("get", key)
        return super().get(key)

    def put_bytes(self, key: str, data: bytes, *, overwrite: bool = False) -> None:
        self.meet("put", key)
        super().put_bytes(key, data, overwrite=overwrite)

    def replace(self, key: str, data: bytes, etag: str) -> None:
        self.meet("replace", key)
        super().replace(key, data, etag)


@pytest.mark.parametrize("first", [True, False])
def test_a_version_that_is_about_to_be_current_stays(store: Store, tmp_path: Path, first: bool) -> None:
    """One machine prunes between another's manifest and its CURRENT."""
    if not first:
        publish_cache(store, tmp_path / "here", "before")

    def publish_others_and_prune() -> None:
        publish_cache(store, tmp_path / "there", "others", rows=1024)
        prune(store, versions=1, fingerprints=1)

    root, method = tmp_path / "store", "put" if first else "replace"
    slow = Interleaved(root, method, "/CURRENT", publish_others_and_prune)
    publish_cache(slow, tmp_path / "here", "ours")
    assert slow.acted
    ours = fingerprint(tmp_path / "here", name="train")
    chosen = choose(store, ours, read_current(store, place_of(ours)))
    assert chosen is not None and chosen.manifest.created_by == "ours"
    verify(store, chosen)


def test_a_fingerprint_that_is_published_to_meanwhile_is_left_alone(store: Store, tmp_path: Path) -> None:
    """One machine publishes after another has looked at what there is, before it removes what is old."""
    publish_cache(store, tmp_path / "here", "before")
    publish_cache(store, tmp_path / "here", "others", rows=1024)

    def publish_meanwhile() -> None:
        publish_cache(store, tmp_path / "here", "ours")

    slow = Interleaved(tmp_path / "store", "get", "/manifest-", publish_meanwhile)
    assert prune(slow, versions=1, fingerprints=1) == {} and slow.acted
    ours = fingerprint(tmp_path / "here", name="train")
    chosen = choose(store, ours, read_current(store, place_of(ours)))
    assert chosen is not None and chosen.manifest.created_by == "ours"
    prune(store, versions=1, fingerprints=1)
    assert authors(store) == {"ours"}


def test_damaged_manifests_go_in_time(store: Store, tmp_path: Path) -> None:
    version = publish_cache(store, tmp_path / "here", "damaged")
    key = f"{version.folder}/{version.manifest_name}"
    store.put_bytes(key, b"{}", overwrite=True)
    assert prune(store) == {}
    age(store, version)
    assert set(prune(store)) == {key, f"{version.folder}/{version.manifest.archive_name}"}
    ours = fingerprint(tmp_path / "here", name="train")
    with pytest.raises(RejectedArtifact, match="missing"):
        choose(store, ours, read_current(store, place_of(ours)))


def test_prune_never_keeps_nothing(store: Store) -> None:
    for versions, fingerprints in ((0, 1), (1, 0)):
        with pytest.raises(UserError, match="at least one"):
            prune(store, versions=versions, fingerprints=fingerprints)
