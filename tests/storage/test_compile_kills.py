"""Processes killed at any moment of publishing and restoring a compile cache: whole, or not there."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from storage.compile_archive import mismatches, package
from storage.compile_cache import choose, list_versions, place_of, publish, read_current, verify
from storage.objects import open_store
from tests.storage.tiny_cache import fingerprint

ROUNDS = 6
FOREVER = """
import sys
from pathlib import Path
from storage.compile_archive import package
from storage.compile_cache import choose, place_of, publish, read_current, restore
from storage.objects import open_store
from tests.storage.tiny_cache import fingerprint

store, ours = open_store(sys.argv[1]), fingerprint(Path(sys.argv[2]))
print("ready", flush=True)
while True:
    current = read_current(store, place_of(ours))
    if sys.argv[3] == "restore":
        restore(store, choose(store, ours, current), ours.cache_dir)
    else:
        with package(ours.cache_dir, ours, created_by="a killed publisher") as packed:
            publish(store, packed, replacing=current)
"""


def kill_at_any_moment(store: Path, root: Path, what: str, seed: int) -> None:
    """Let a process restore or publish over and over, and end it with SIGKILL."""
    child = subprocess.Popen(
        [sys.executable, "-c", FOREVER, str(store), str(root), what], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    time.sleep(random.Random(seed).uniform(0.01, 0.5))
    child.kill()
    child.wait()


def write_megabytes(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(100):
        (folder / f"kernel{number}.so").write_bytes(os.urandom(100_000))


def test_killed_while_restoring(tmp_path: Path) -> None:
    store, ours = open_store(tmp_path / "store"), fingerprint(tmp_path / "here")
    write_megabytes(ours.cache_dir)
    with package(ours.cache_dir, ours, created_by="test") as packed:
        version = publish(store, packed, replacing=read_current(store, place_of(ours)))
    assert version is not None
    for seed in range(ROUNDS):
        kill_at_any_moment(tmp_path / "store", tmp_path / "here", "restore", seed)
        found = mismatches(ours.cache_dir, version.manifest.members)
        assert found == [] or not ours.cache_dir.exists()
    assert list(ours.cache_dir.parent.glob(".*")), "no process was killed in the middle of anything"


def test_killed_while_publishing(tmp_path: Path) -> None:
    store, ours = open_store(tmp_path / "store"), fingerprint(tmp_path / "here")
    write_megabytes(ours.cache_dir)
    for seed in range(ROUNDS):
        kill_at_any_moment(tmp_path / "store", tmp_path / "here", "publish", seed)
        current = read_current(store, place_of(ours))
        version = choose(store, ours, current)
        assert (version is None) == (current.etag is None)
        if version is not None:
            verify(store, version)
    assert list_versions(store)[1] == {}
    assert list(ours.cache_dir.parent.glob(".*")), "no process was killed in the middle of anything"
