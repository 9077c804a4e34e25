"""A run's start with the compile cache: what it restores, what it publishes, and that no defect stops it."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_core.compile_fingerprint import Fingerprint, environment_here
from dflash_core.compile_watch import CacheCounts, CompileReport, cache_in_use
from dflash_core.configuration import UserError
from storage.compile_cache import Version, list_versions
from storage.compile_session import CompileCacheConfig, CompileSession
from storage.objects import Store, StoreError, open_store
from tests.storage.tiny_cache import FILES, content, fingerprint, write_cache


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


@pytest.fixture
def ours(tmp_path: Path) -> Fingerprint:
    return fingerprint(tmp_path / "root")


def report(
    session: CompileSession, rank: int = 0, *, compiled: bool, seconds: float = 50.0
) -> dict[str, Any]:
    """What a rank says, as the JSON that arrives."""
    counts = CacheCounts(
        graphs=1,
        aot_hits=not compiled,
        aot_misses=compiled,
        aot_bypasses=0,
        fx_hits=0,
        fx_misses=0,
        fx_bypasses=0,
    )
    made = CompileReport(
        rank=rank,
        start=session.state,
        fingerprint=session.fingerprint.id,
        cache_dir=str(session.folder),
        device="NVIDIA H200",
        seconds_since_process_start=seconds,
        events={"DYNAMO": 1},
        event_threads=("MainThread",),
        caches=counts,
        recompile_reasons=(),
        new_kernel_files=(),
        new_files=6 if compiled else 0,
        reasons=("1 aot cache misses",) if compiled else (),
    )
    return made.model_dump(mode="json")


def started(store: Store, ours: Fingerprint, ranks: int = 1, **options: Any) -> CompileSession:
    session = CompileSession(store, ours, CompileCacheConfig(**options), ranks, "test")
    session.prepare()
    return session


def run_once(store: Store, ours: Fingerprint, salt: bytes = b"", **options: Any) -> CompileSession:
    """A whole run that compiles when it starts cold."""
    with started(store, ours, **options) as session:
        if session.state == "cold":
            assert list(session.folder.iterdir()) == []
            write_cache(session.folder, salt)
            session.on_message(report(session, compiled=True, seconds=90))
        else:
            session.on_message(report(session, compiled=False, seconds=20))
        return session


def test_cold_then_restored_then_still_there(store: Store, ours: Fingerprint) -> None:
    first = run_once(store, ours)
    assert first.state == "cold" and first.version is not None
    assert first.notes[0] == "the store has no version of anything yet"

    shutil.rmtree(ours.local_root)
    second = run_once(store, ours)
    assert (second.state, second.version) == ("restored", first.version)
    assert {name: data for name, (data, _) in content(ours.cache_dir).items()} == FILES
    summary = second.summary()
    assert summary["nothing_compiled"] and summary["seconds_saved"] == 70
    assert summary["compiling_threads"] == ["MainThread"]
    assert json.loads(json.dumps(summary)) == summary

    (ours.cache_dir / "locks").mkdir(exist_ok=True)
    third = run_once(store, ours)
    assert third.state == "restored" and "still on this machine" in third.notes[0]


def test_variables_for_the_ranks(store: Store, ours: Fingerprint) -> None:
    with started(store, ours) as session:
        variables = session.environment
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == str(ours.cache_dir)
    assert variables["TRITON_CACHE_DIR"].startswith(str(ours.cache_dir))
    assert variables["TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE"] == "0"
    assert variables["DFLASH_COMPILE_START"] == "cold"
    first = run_once(store, ours).version
    assert first is not None
    with started(store, ours) as session:
        assert session.environment["DFLASH_COMPILE_VERSION"] == first.name


def test_ranks_learn_what_was_published_after_their_start(store: Store, ours: Fingerprint) -> None:
    with started(store, ours) as session:
        variables = session.environment
        said = {"fingerprint": ours.id, "version": "", "start": "cold"}
        assert cache_in_use(variables) == said
        write_cache(session.folder)
        session.on_message(report(session, compiled=True))
        first = session.version
        assert first is not None and cache_in_use(variables) == said | {"version": first.name}
    beside = {path.name for path in Path(ours.local_root).iterdir()}
    assert beside == {session.folder.name + end for end in ("", ".json", ".lock")}

    with started(store, ours) as session:  # restored, and then it meets something new
        variables = session.environment
        assert cache_in_use(variables) == said | {"version": first.name, "start": "restored"}
        compile_more(session, "zz/later.so")
        session.on_message(report(session, compiled=True))
        second = session.version
        assert second is not None and second != first
        assert cache_in_use(variables) == said | {"version": second.name, "start": "restored"}


def test_a_damaged_folder_on_this_machine_is_restored_again(store: Store, ours: Fingerprint) -> None:
    run_once(store, ours)
    (ours.cache_dir / "ab/cabkernel.py").write_bytes(b"kernel = 6\n")
    again = run_once(store, ours)
    assert again.state == "restored" and again.notes[0].startswith("restored version")
    assert content(ours.cache_dir)["ab/cabkernel.py"][0] == FILES["ab/cabkernel.py"]


def forge_current(store: Store, version: Version) -> None:
    store.put_bytes(f"{version.folder}/CURRENT", b'{"mani', overwrite=True)


def flip_archive(store: Store, version: Version) -> None:
    key = f"{version.folder}/{version.manifest.archive_name}"
    data = bytearray(store.get(key))
    data[100] ^= 4
    store.put_bytes(key, bytes(data), overwrite=True)


def lose_archive(store: Store, version: Version) -> None:
    store.delete(f"{version.folder}/{version.manifest.archive_name}")


def lose_manifest(store: Store, version: Version) -> None:
    store.delete(f"{version.folder}/{version.manifest_name}")


@pytest.mark.parametrize("defect", [forge_current, flip_archive, lose_archive, lose_manifest])
@pytest.mark.parametrize("same_machine", [True, False])
def test_any_defect_is_a_cold_start_that_mends_the_store(
    store: Store, ours: Fingerprint, defect: Callable[[Store, Version], None], same_machine: bool
) -> None:
    version = run_once(store, ours).version
    assert version is not None
    if same_machine:
        (ours.cache_dir / "half-written.so").write_bytes(b"so that the folder has to be restored")
    else:
        shutil.rmtree(ours.local_root)
    defect(store, version)
    cold = run_once(store, ours, salt=b"again")  # asserts the empty folder
    assert cold.state == "cold" and cold.notes[0].startswith("rejected: ")
    assert cold.version is not None and cold.version.name != version.name

    shutil.rmtree(ours.local_root)
    warm = run_once(store, ours)
    assert warm.state == "restored" and warm.version == cold.version


def test_signature_is_demanded_when_a_key_is_set(
    store: Store, ours: Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_once(store, ours)
    monkeypatch.setenv("DFLASH_COMPILE_CACHE_KEY", "secret")
    cold = run_once(store, ours, salt=b"signed")
    assert cold.state == "cold" and "not signed" in cold.notes[0]
    shutil.rmtree(ours.local_root)
    assert run_once(store, ours).state == "restored"
    monkeypatch.setenv("DFLASH_COMPILE_CACHE_KEY", "another")
    assert "does not match" in run_once(store, ours).notes[0]


def test_a_folder_that_was_never_signed_is_not_used(
    store: Store, ours: Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    away: Any = Unreachable()
    run_once(away, ours)
    monkeypatch.setenv("DFLASH_COMPILE_CACHE_KEY", "secret")
    assert run_once(store, ours, salt=b"signed").state == "cold"
    assert run_once(away, ours).state == "local"
    monkeypatch.setenv("DFLASH_COMPILE_CACHE_KEY", "another")
    assert run_once(away, ours).state == "cold"


class Unreachable:
    """A store that no longer answers."""

    uri = "s3://gone"

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            raise StoreError("connection refused")

        return call


def test_a_store_that_is_away_stops_no_run(store: Store, ours: Fingerprint) -> None:
    away: Any = Unreachable()
    first = run_once(away, ours)
    assert first.state == "cold" and "connection refused" in first.notes[0]
    assert first.notes[1] == "not published: connection refused"

    # What was compiled then is not lost: the folder was sealed, and the next run offers it to the store.
    second = run_once(away, ours)
    assert second.state == "local" and "whole" in second.notes[0]
    third = run_once(store, ours)
    assert third.state == "local" and third.version is not None
    shutil.rmtree(ours.local_root)
    assert run_once(store, ours).state == "restored"


def test_a_restored_run_that_compiled_more_publishes_it_all(store: Store, ours: Fingerprint) -> None:
    first = run_once(store, ours).version
    with started(store, ours, ranks=2) as session:
        (session.folder / "new.cubin").write_bytes(b"one more kernel")
        session.on_message({"kind": "progress", "step": 1})
        session.on_message(report(session, 0, compiled=True))
        assert session.version == first, "the other rank has not finished its step"
        session.on_message(report(session, 1, compiled=False))
        assert session.version is not None and session.version != first
        assert len(session.version.manifest.members) == len(FILES) + 1
        assert session.version.manifest.cold_seconds == 90, "the cold time stays that of the cold start"
        assert not session.summary()["nothing_compiled"]


def test_a_rank_on_another_kind_of_gpu_is_noted(store: Store, ours: Fingerprint) -> None:
    with started(store, ours, ranks=2) as session:
        session.on_message(report(session, 0, compiled=False))
        assert len(session.notes) == 1
        session.on_message(report(session, 1, compiled=False) | {"device": "NVIDIA A100"})
    assert session.notes[-1] == "rank 1 runs on NVIDIA A100, the cache is that of NVIDIA H200"


def test_the_second_run_on_a_machine_joins_and_changes_nothing(store: Store, ours: Fingerprint) -> None:
    with started(store, ours) as first:
        write_cache(first.folder)
        with started(store, ours) as second:
            assert second.state == "cold"
            assert set(FILES) <= set(content(first.folder))
            first.on_message(report(first, compiled=True))
            second.on_message(report(second, compiled=True))
    assert second.notes[-1] == "not published: another run was first"
    assert len(list_versions(store)[0]) == 1


def test_a_wish_and_a_pin(store: Store, ours: Fingerprint) -> None:
    first = run_once(store, ours).version
    assert first is not None
    with started(store, ours) as session:
        (session.folder / "new.cubin").write_bytes(b"newer")
        session.on_message(report(session, compiled=True))
    wished = run_once(store, ours, version=first.name, pin_as="run 7")
    assert wished.state == "restored" and wished.version is not None and wished.version.name == first.name
    assert [version.pins for version in list_versions(store)[0]] == [(), ("run-7",)]
    with pytest.raises(UserError, match="no version is called"):
        started(store, ours, version="feed/beef")


def test_what_cannot_be_packed_stops_no_run(store: Store, ours: Fingerprint) -> None:
    with started(store, ours) as session:
        session.on_message(report(session, compiled=True))
        assert session.notes[-1] == f"not published: {ours.cache_dir} holds no compiled files to pack"
    with started(store, ours) as session:
        write_cache(session.folder)
        (session.folder / "link.so").symlink_to("/bin/sh")
        session.on_message(report(session, compiled=True))
        assert "not a regular file" in session.notes[-1]
    assert list_versions(store) == ([], {})


def test_a_disk_that_is_full_is_a_cold_start(store: Store, ours: Fingerprint) -> None:
    run_once(store, ours)
    shutil.rmtree(ours.local_root)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        session = started(store, ours)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with session:
        assert session.state == "cold" and "cannot be kept on this machine" in session.notes[0]
        assert session.folder.is_dir() and not list(session.folder.iterdir())


def test_a_broken_pin_ends_no_run(store: Store, ours: Fingerprint) -> None:
    store.put_bytes("v1-pins/mine.json", b"torn")
    with started(store, ours) as session:
        write_cache(session.folder)
        session.on_message(report(session, compiled=True))
        assert session.version is not None
        assert session.notes[-1].startswith("not pruned: ") and "unpin mine" in session.notes[-1]


def test_each_publication_prunes(store: Store, ours: Fingerprint) -> None:
    run_once(store, ours)
    for number in range(4):
        with started(store, ours, keep_versions=2) as session:
            (session.folder / f"new{number}.cubin").write_bytes(b"newer")
            session.on_message(report(session, compiled=True))
    versions, rejected = list_versions(store)
    assert len(versions) == 2 and versions[0].current and not rejected


def test_leftovers_of_killed_processes_go_in_time(store: Store, ours: Fingerprint) -> None:
    run_once(store, ours)
    root = Path(ours.local_root)
    for name in (".unpack-old", ".unpack-new"):
        (root / name).mkdir()
        (root / name / "kernel.so").write_bytes(b"half")
    (root / ".git").mkdir()
    for old in (".unpack-old", ".git"):
        os.utime(root / old, (1, 1))
    run_once(store, ours)
    assert sorted(path.name for path in root.glob(".*")) == [".git", ".unpack-new"]


def test_local_root_must_be_private(store: Store, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(UserError, match="written by others"):
        started(store, fingerprint(tmp_path / "shared"))
    with pytest.raises(UserError, match="absolute"):
        _ = CompileCacheConfig(local_root="relative").root


def compile_more(session: CompileSession, name: str) -> None:
    path = session.folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"compiled later")


def test_what_is_compiled_after_the_first_reports_is_published_at_the_end(
    store: Store, ours: Fingerprint
) -> None:
    with started(store, ours) as session:
        write_cache(session.folder)
        session.on_message(report(session, compiled=True, seconds=90))
        first = session.version
        session.publish_rest()
        assert session.version == first, "nothing new"
        compile_more(session, "zz/later.so")
        session.on_message(report(session, compiled=True, seconds=600))
        assert session.version == first, "not after every report"
        session.publish_rest()
        second = session.version
        assert second is not None and second != first
        assert session.summary()["first_step_seconds"] == 90, "how long the start took"
    shutil.rmtree(ours.local_root)
    again = run_once(store, ours)
    assert again.version == second and (ours.cache_dir / "zz/later.so").exists()


def test_the_rest_does_not_take_the_place_of_what_another_run_published(
    store: Store, ours: Fingerprint
) -> None:
    with started(store, ours) as session:
        write_cache(session.folder)
        session.on_message(report(session, compiled=True))
        first = session.version
        assert first is not None
        compile_more(session, "zz/theirs.so")
        with started(store, ours) as other:
            other.on_message(report(other, compiled=True))
        theirs = other.version
        assert theirs is not None and theirs != first
        compile_more(session, "zz/ours.so")
        session.on_message(report(session, compiled=True))
        session.publish_rest()
        assert session.version == first
    (current,) = [version for version in list_versions(store)[0] if version.current]
    assert current.name == theirs.name


def test_no_password_of_a_remote_cache_is_published() -> None:
    asked = environment_here({"TORCHINDUCTOR_REDIS_URL": "redis://someone:hidden-word@host"})
    assert "hidden-word" not in asked.model_dump_json()
