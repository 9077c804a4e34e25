"""Versions of compile caches on real stores: published whole by one winner, restored whole or not at all."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_core.compile_fingerprint import Fingerprint
from dflash_core.configuration import UserError
from storage.compile_archive import RejectedArtifact, package, seal
from storage.compile_cache import (
    Current,
    Version,
    choose,
    find_version,
    list_versions,
    nearest,
    place_of,
    publish,
    read_current,
    restore,
    verify,
)
from storage.objects import Store, StoreConfig, StoreError, open_store
from tests.storage.seaweed import SeaweedServer
from tests.storage.tiny_cache import FILES, content, fingerprint, write_cache

NOTHING = Current(etag=None, manifest_name=None)


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    if request.param == "file":
        return open_store(tmp_path / "store")
    return open_store(request.getfixturevalue("s3_uri"))


def publish_cache(store: Store, ours: Fingerprint, salt: bytes = b"", **options: Any) -> Version:
    """Write a cache where the fingerprint says, and make it the current version."""
    write_cache(ours.cache_dir, salt)
    with package(ours.cache_dir, ours, created_by="test", cold_seconds=90.0) as packed:
        version = publish(store, packed, replacing=read_current(store, place_of(ours)), **options)
    assert version is not None
    return version


def choose_current(store: Store, ours: Fingerprint, **options: Any) -> Version | None:
    return choose(store, ours, read_current(store, place_of(ours)), **options)


def test_publish_and_restore(store: Store, tmp_path: Path) -> None:
    ours = fingerprint(tmp_path / "here")
    assert choose_current(store, ours) is None
    version = publish_cache(store, ours)
    chosen = choose_current(store, ours)
    assert chosen == version
    assert place_of(ours).startswith("v1/train-512x8x4/NVIDIA-H200-sm9.0/torch2.11.0-cu13.0-triton3.6.0/")

    (ours.cache_dir / "leftover.so").write_bytes(b"from a run that was killed")
    restore(store, version, ours.cache_dir)
    assert {name: data for name, (data, _) in content(ours.cache_dir).items()} == FILES
    assert sorted(path.name for path in ours.cache_dir.parent.iterdir()) == [ours.cache_dir.name]
    verify(store, version)


def test_signed_versions(store: Store, tmp_path: Path) -> None:
    ours = fingerprint(tmp_path / "here")
    version = publish_cache(store, ours, key=b"secret")
    assert choose_current(store, ours, key=b"secret") == version
    verify(store, version, b"secret")
    with pytest.raises(RejectedArtifact, match="does not match"):
        choose_current(store, ours, key=b"other")
    with pytest.raises(RejectedArtifact, match="does not match"):
        verify(store, version, b"other")
    publish_cache(store, ours, salt=b"unsigned")
    with pytest.raises(RejectedArtifact, match="not signed"):
        choose_current(store, ours, key=b"secret")


@pytest.mark.parametrize("kept", [0, 1, 20, -1])
def test_half_written_current_is_rejected_and_replaced(tmp_path: Path, kept: int) -> None:
    store, ours = open_store(tmp_path / "store"), fingerprint(tmp_path / "here")
    publish_cache(store, ours)
    key = f"{place_of(ours)}/CURRENT"
    store.put_bytes(key, store.get(key)[:kept], overwrite=True)
    with pytest.raises(RejectedArtifact, match="CURRENT is damaged"):
        choose_current(store, ours)
    again = publish_cache(store, ours, salt=b"2")
    assert choose_current(store, ours) == again


@pytest.mark.parametrize("text", ['{"manifest": "../../evil.json"}', '{"manifest": 7}', "[1]", "null"])
def test_current_that_names_something_else_is_rejected(tmp_path: Path, text: str) -> None:
    store, ours = open_store(tmp_path / "store"), fingerprint(tmp_path / "here")
    publish_cache(store, ours)
    store.put_bytes(f"{place_of(ours)}/CURRENT", text.encode(), overwrite=True)
    with pytest.raises(RejectedArtifact, match="CURRENT is damaged"):
        choose_current(store, ours)


def test_damaged_or_missing_manifest_is_rejected(tmp_path: Path) -> None:
    store, ours = open_store(tmp_path / "store"), fingerprint(tmp_path / "here")
    version = publish_cache(store, ours)
    key = f"{version.folder}/{version.manifest_name}"
    store.put_bytes(key, store.get(key).replace(b"test", b"tset"), overwrite=True)
    with pytest.raises(RejectedArtifact, match="damaged"):
        choose_current(store, ours)
    _, rejected = list_versions(store)
    assert list(rejected) == [key]
    store.delete(key)
    with pytest.raises(RejectedArtifact, match="missing"):
        choose_current(store, ours)


def damage_archive(store: Store, version: Version, how: str) -> None:
    key = f"{version.folder}/{version.manifest.archive_name}"
    data = bytearray(store.get(key))
    if how == "flipped":
        data[len(data) // 2] ^= 1
    elif how == "truncated":
        del data[-1]
    if how == "missing":
        store.delete(key)
    else:
        store.put_bytes(key, bytes(data), overwrite=True)


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_damaged_archive_leaves_no_folder(store: Store, tmp_path: Path, how: str) -> None:
    ours = fingerprint(tmp_path / "here")
    version = publish_cache(store, ours)
    damage_archive(store, version, how)
    with pytest.raises(RejectedArtifact):
        restore(store, version, ours.cache_dir)
    assert list(ours.cache_dir.parent.iterdir()) == []
    with pytest.raises(RejectedArtifact):
        verify(store, version)


def test_wrong_fingerprint_is_refused_in_words(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    theirs = fingerprint(tmp_path / "here", torch="2.11.0+cu128", cuda="12.8")
    ours = fingerprint(tmp_path / "here")
    version = publish_cache(store, theirs)
    with pytest.raises(RejectedArtifact, match=r"torch 2\.11\.0\+cu128, here 2\.11\.0\+cu130"):
        choose(store, ours, NOTHING, wish=version.name)
    # A manifest in the wrong place is the same: the place proves nothing.
    for key in (version.manifest_name, version.manifest.archive_name, "CURRENT"):
        store.put_bytes(f"{place_of(ours)}/{key}", store.get(f"{version.folder}/{key}"))
    with pytest.raises(RejectedArtifact, match=r"cuda 12\.8, here 13\.0"):
        choose_current(store, ours)


def test_nearest_says_why_it_does_not_fit(tmp_path: Path) -> None:
    store, ours = open_store(tmp_path / "store"), fingerprint(tmp_path / "here")
    assert nearest(store, ours) is None
    publish_cache(store, fingerprint(tmp_path / "here", torch="2.13.0", cuda="12.8", triton="3.7.0"))
    close = publish_cache(store, fingerprint(tmp_path / "here", rows=1024))
    found = nearest(store, ours)
    assert found is not None
    assert found[0].name == close.name
    assert found[1] == ["setting row_tokens 1024, here 512"]


def test_versions_are_listed_and_found(store: Store, tmp_path: Path) -> None:
    ours = fingerprint(tmp_path / "here")
    first, second = (publish_cache(store, ours, salt=salt) for salt in (b"1", b"2"))
    versions, rejected = list_versions(store)
    assert [(v.name, v.current) for v in versions] == [(second.name, True), (first.name, False)]
    assert rejected == {}
    assert find_version(store, first.name).manifest == first.manifest
    assert find_version(store, ours.id[:8]).name == second.name
    assert choose(store, ours, NOTHING, wish=first.name) == find_version(store, first.name)
    with pytest.raises(UserError, match="no version is called"):
        find_version(store, "feed")


def test_of_two_publishers_one_wins(store: Store, tmp_path: Path) -> None:
    ours = fingerprint(tmp_path / "here")
    for round_number in range(4):
        start, outcomes = threading.Barrier(3), dict[int, Version | None]()
        before = read_current(store, place_of(ours))

        def run(
            number: int, before: Current = before, start: threading.Barrier = start, salt: int = round_number
        ) -> None:
            folder = tmp_path / f"machine{number}-{salt}" / "cache"
            write_cache(folder, salt=f"{number}-{salt}".encode())
            with package(folder, ours, created_by=f"machine {number}") as packed:
                start.wait(60)
                outcomes[number] = publish(store, packed, replacing=before)  # noqa: B023

        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [version for version in outcomes.values() if version is not None]
        assert len(winners) == 1
        assert choose_current(store, ours) == winners[0]
        verify(store, winners[0])
    versions, rejected = list_versions(store)
    assert (len(versions), rejected) == (4, {})


def test_two_publishers_of_the_same_bytes(tmp_path: Path) -> None:
    store, ours = open_store(tmp_path / "store"), fingerprint(tmp_path / "here")
    write_cache(ours.cache_dir)
    with package(ours.cache_dir, ours, created_by="test") as packed:
        first = publish(store, packed, replacing=NOTHING)
        assert publish(store, packed, replacing=NOTHING) == first
    with package(ours.cache_dir, ours, created_by="somebody else") as packed:
        assert publish(store, packed, replacing=NOTHING) is None
    assert first is not None
    verify(store, first)


class FailingNetwork:
    """A store whose network goes away at the n-th call, and is then gone."""

    def __init__(self, store: Store, calls: int) -> None:
        self.store, self.calls_left = store, calls
        self.uri = store.uri

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise StoreError("the network is gone")
            return getattr(self.store, name)(*arguments, **named)

        return call


def test_network_lost_at_any_call_of_publishing(tmp_path: Path) -> None:
    store, ours = open_store(tmp_path / "store"), fingerprint(tmp_path / "here")
    old = publish_cache(store, ours)
    before = read_current(store, place_of(ours))
    write_cache(ours.cache_dir, salt=b"new")
    failures = 0
    for calls in range(10):
        network: Any = FailingNetwork(store, calls)
        with package(ours.cache_dir, ours, created_by="test") as packed:
            try:
                new = publish(network, packed, replacing=before)
            except StoreError:
                failures += 1
                assert choose_current(store, ours) == old
                verify(store, old)
                continue
        assert choose_current(store, ours) == new
        assert failures >= 3
        return
    pytest.fail("publishing never succeeded")


def test_network_lost_at_any_call_of_restoring(tmp_path: Path) -> None:
    store, ours = open_store(tmp_path / "store"), fingerprint(tmp_path / "here")
    version = publish_cache(store, ours)
    failures = 0
    for calls in range(10):
        network: Any = FailingNetwork(store, calls)
        try:
            restore(network, version, ours.cache_dir)
        except RejectedArtifact as error:
            failures += 1
            assert "the network is gone" in str(error)
            assert list(ours.cache_dir.parent.iterdir()) == []
            continue
        assert failures >= 2
        return
    pytest.fail("restoring never succeeded")


@pytest.fixture
def doomed_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SeaweedServer, Store]]:
    """An S3 server of its own that the test may kill, and an impatient client."""
    server = SeaweedServer(tmp_path / "weed")
    try:
        server.start()
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield (
            server,
            open_store(f"{server.uri}/cache", StoreConfig(patience=1, connect_timeout=2, read_timeout=5)),
        )
    finally:
        server.kill()


def test_server_killed_between_the_manifest_and_the_archive(
    doomed_server: tuple[SeaweedServer, Store], tmp_path: Path
) -> None:
    server, store = doomed_server
    ours = fingerprint(tmp_path / "here")
    publish_cache(store, ours)
    version = choose_current(store, ours)
    assert version is not None
    server.kill()
    with pytest.raises(RejectedArtifact, match="cannot be read"):
        restore(store, version, ours.cache_dir)
    assert not ours.cache_dir.exists()
    with pytest.raises(StoreError):
        choose_current(store, ours)
    server.start()
    restore(store, version, ours.cache_dir)
    assert content(ours.cache_dir)


def test_disk_without_room_is_a_reason(tmp_path: Path) -> None:
    store, ours = open_store(tmp_path / "store"), fingerprint(tmp_path / "here")
    version = publish_cache(store, ours)
    manifest = version.manifest
    huge = manifest.members[0].model_copy(update={"size": 1 << 60})
    bloated = manifest.model_copy(update={"members": (huge, *manifest.members[1:])})
    data = seal(bloated, None)
    name = f"manifest-{hashlib.sha256(data).hexdigest()}.json"
    store.put_bytes(f"{version.folder}/{name}", data)
    store.put_bytes(f"{version.folder}/CURRENT", json.dumps({"manifest": name}).encode(), overwrite=True)
    chosen = choose_current(store, ours)
    assert chosen is not None
    with pytest.raises(RejectedArtifact, match="no room"):
        restore(store, chosen, ours.cache_dir)
