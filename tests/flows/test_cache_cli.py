"""`dflash cache` on a small store: what it prints, what it refuses, what it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_core.configuration import UserError
from flows.cache_cli import app
from storage.compile_archive import package
from storage.compile_cache import Version, place_of, publish, read_current
from storage.objects import Store, open_store
from tests.storage.tiny_cache import FILES, fingerprint, write_cache


def publish_one(store: Store, root: Path, **changes: str) -> Version:
    ours = fingerprint(root, **changes)
    write_cache(ours.cache_dir)
    with package(ours.cache_dir, ours, created_by="test", cold_seconds=90) as packed:
        version = publish(store, packed, replacing=read_current(store, place_of(ours)))
    assert version is not None
    return version


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def two(uri: str, tmp_path: Path) -> tuple[Version, Version]:
    """Two versions, of different torch builds, in the usual place below the data sets."""
    store = open_store(uri).child("compile-cache")
    return (
        publish_one(store, tmp_path / "here", torch="2.11.0+cu128", cuda="12.8"),
        publish_one(store, tmp_path / "here"),
    )


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_list(two: tuple[Version, Version], uri: str, tmp_path: Path) -> None:
    lines = run("list", uri).splitlines()
    assert [line.split()[:2] for line in lines] == [["*", two[1].name], ["*", two[0].name]]
    assert "torch2.11.0-cu12.8-triton3.6.0" in lines[1]
    described = json.loads(run("list", f"{uri}/compile-cache", "--json"))
    assert [entry["version"] for entry in described] == [two[1].name, two[0].name]
    assert "no compile cache" in run("list", str(tmp_path / "empty"))


def test_show(two: tuple[Version, Version], uri: str) -> None:
    shown = json.loads(run("show", uri, two[0].name[:10], "--members"))
    assert shown["fingerprint"]["environment"]["torch"] == "2.11.0+cu128"
    assert {member["name"] for member in shown["members"]} == set(FILES)
    with pytest.raises(UserError, match="no version is called"):
        run("show", uri, "feed")


def test_diff(two: tuple[Version, Version], uri: str) -> None:
    assert run("diff", uri, two[0].name, two[1].name).splitlines() == [
        "torch 2.11.0+cu128, here 2.11.0+cu130",
        "cuda 12.8, here 13.0",
    ]
    assert "it fits" in run("diff", uri, two[0].name, two[0].name)


def test_verify(two: tuple[Version, Version], uri: str) -> None:
    assert run("verify", uri).count("are right") == 2
    store = open_store(uri).child("compile-cache")
    key = f"{two[0].folder}/{two[0].manifest.archive_name}"
    store.put_bytes(key, store.get(key)[:-1] + b"!", overwrite=True)
    output = run("verify", uri, code=1)
    assert f"{two[0].name}: rejected: the archive's sha256" in output and output.count("are right") == 1
    assert "are right" in run("verify", uri, two[1].name)


def test_pin_and_prune(two: tuple[Version, Version], uri: str) -> None:
    run("pin", uri, two[0].name, "--as", "run 7")
    assert "pinned by run-7" in run("list", uri)
    assert "0 objects" in run("prune", uri, "--fingerprints", "1")
    run("unpin", uri, "--as", "run 7")
    # Both are fingerprints of one graph set and GPU: of these the older one goes.
    assert "3 objects would go" in run("prune", uri, "--fingerprints", "1", "--dry-run")
    assert "3 objects removed" in run("prune", uri, "--fingerprints", "1")
    assert len(run("list", uri).splitlines()) == 1
