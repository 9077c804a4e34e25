"""Where compile caches lie, and what goes of the folders that no run uses any more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_core.configuration import UserError
from storage.compile_folder import CacheFolder, hold
from storage.compile_session import CompileCacheConfig, open_compile_store
from tests.storage.tiny_cache import fingerprint


@pytest.mark.parametrize("dataset_uri", ["s3://bucket", "file:///dataset"])
def test_nothing_lies_beside_a_data_set_at_the_root(dataset_uri: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no folder above it: set cache\.uri"):
        open_compile_store(CompileCacheConfig(), dataset_uri)
    elsewhere = CompileCacheConfig(uri=str(tmp_path / "elsewhere"))
    assert open_compile_store(elsewhere, dataset_uri).uri == f"file://{tmp_path}/elsewhere"
    beside = open_compile_store(CompileCacheConfig(), f"file://{tmp_path}/dataset")
    assert beside.uri == f"file://{tmp_path}/compile-cache"


def used(root: Path, name: str) -> CacheFolder:
    """A cache folder that a run uses."""
    folder = CacheFolder(fingerprint(root, name))
    folder.take()
    folder.share()
    (folder.path / "kernel.so").write_bytes(b"kernel")
    return folder


def age(*folders: Path) -> None:
    """Have them last used long ago."""
    for folder in folders:
        os.utime(f"{folder}.lock", (1, 1))


def test_what_no_run_has_used_for_long_goes(tmp_path: Path) -> None:
    root = tmp_path / "root"
    unused, recent, running = (used(root, name) for name in ("unused", "recent", "running"))
    unused.release()
    recent.release()
    seal = root / f"{unused.path.name}.json"
    seal.write_text("{}")
    of_killed = root / f"{unused.path.name}.version-0123abcd"
    of_killed.write_text("an/old one")
    running.name_version("a/version")
    old_code, new_code, held_code = (root / "byte-code" / (str(i) * 16) for i in range(3))
    for folder in (old_code, new_code, held_code):
        folder.mkdir(parents=True)
        hold(folder).close()
    of_others, without_lock = root / "of-others", root / ("3" * 16)
    of_others.mkdir()
    (root / "of-others.lock").touch()
    without_lock.mkdir()
    os.utime(without_lock, (1, 1))

    with hold(held_code):
        age(unused.path, running.path, old_code, held_code, of_others)
        used(root, "another").release()
        for folder in (recent.path, running.path, new_code, held_code, of_others, without_lock):
            assert folder.exists()
        assert not unused.path.exists() and not seal.exists() and not old_code.exists()
        assert not of_killed.exists() and running.version_file.read_text() == "a/version"
    running.release()
    assert not running.version_file.exists()
    used(root, "another").release()
    assert running.path.exists(), "it was used until now"
    age(running.path)
    used(root, "another").release()
    assert not running.path.exists()


def test_a_run_keeps_the_old_folder_that_it_starts_from(tmp_path: Path) -> None:
    used(tmp_path, "ours").release()
    ours = CacheFolder(fingerprint(tmp_path, "ours"))
    age(ours.path)
    assert ours.take()
    assert (ours.path / "kernel.so").exists()
    ours.release()
