"""Byte code is kept where the environment keeps none, and nowhere else."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_core.compile_fingerprint import GraphSet
from dflash_core.configuration import UserError
from storage.byte_code import OURS, byte_code_variables
from storage.compile_session import CompileCacheConfig, CompileSession
from storage.objects import open_store


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that was installed without byte code."""
    folder = tmp_path / "site" / "a_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return folder


def imported(variables: dict[str, str]) -> None:
    """Import the package in a process of its own."""
    code = "import a_package; assert a_package.VALUE == 1"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **variables}, check=True)


def test_a_folder_that_python_writes_to_is_left_alone(package: Path, tmp_path: Path) -> None:
    assert byte_code_variables(str(tmp_path / "root"), "a_package") == {}
    imported({"PYTHONDONTWRITEBYTECODE": ""})
    assert list(package.rglob("*.pyc"))
    assert not (tmp_path / "root").exists()


def test_byte_code_that_may_not_lie_beside_its_source_is_kept_below_the_root(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # as many images set it
    root = tmp_path / "root"
    variables = byte_code_variables(str(root), "a_package")
    imported(variables)
    (kept,) = root.rglob("a_package/*.pyc")
    assert not list(package.rglob("*.pyc"))
    before = kept.stat().st_mtime_ns
    imported(variables)  # finds it
    assert kept.stat().st_mtime_ns == before
    (package / "__init__.py").write_text("VALUE = 1  # and something else\n")
    imported(variables)  # a source of another size is compiled again
    assert kept.stat().st_mtime_ns > before


def test_what_is_compiled_already_or_chosen_by_the_user_stays(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported({"PYTHONDONTWRITEBYTECODE": ""})
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert byte_code_variables(str(tmp_path / "root"), "a_package") == {}
    for file in package.rglob("*.pyc"):
        file.unlink()
    assert byte_code_variables(str(tmp_path / "root"), "a_package") != {}
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "theirs"))
    assert byte_code_variables(str(tmp_path / "root"), "a_package") == {}
    assert byte_code_variables(str(tmp_path / "root"), "no_such_package") == {}


def test_a_root_that_others_may_write_to_is_refused(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(UserError, match="can be written by others"):
        byte_code_variables(str(root), "a_package")


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_nobody_else_may_enter_where_python_makes_folders(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(mode)
    umask = os.umask(0o002)
    try:
        imported(byte_code_variables(str(root), "a_package"))
    finally:
        os.umask(umask)
    folder = root / "byte-code"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    byte_code_variables(str(root), "a_package")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o775)
    with pytest.raises(UserError, match="can be written by others"):
        byte_code_variables(str(root), "a_package")


def test_sources_of_ours_that_change_get_another_folder(tmp_path: Path) -> None:
    """Also where the edit changes neither the size nor the time of a file, as in images."""
    for name in OURS:
        shutil.copytree(
            Path(__file__).parents[2] / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    code = f"from storage.byte_code import *; print(byte_code_variables('{tmp_path}/root', 'storage'))"

    def variables() -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        found = subprocess.check_output(
            [sys.executable, "-c", code], env=environment, cwd=tmp_path, text=True
        )
        assert "byte-code" in found
        return found

    first = variables()
    assert variables() == first
    source = tmp_path / "flows" / "config.py"
    before, text = source.stat(), source.read_text()
    source.write_text(text.replace("e", "a", 1))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert source.stat().st_size == before.st_size
    assert variables() != first


def test_ranks_get_the_folder_and_a_session_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "empty"))  # as if torch had come without
    session = CompileSession.open(
        open_store(tmp_path / "store"),
        GraphSet(name="none", settings={}, sources={}),
        CompileCacheConfig(local_root=str(tmp_path / "root")),
        variables={"PYTHONPYCACHEPREFIX": ""},  # for the child that describes the environment: quicker
    )
    with session:
        folder = session.environment["PYTHONPYCACHEPREFIX"]
        assert Path(folder).parent == tmp_path / "root" / "byte-code"
        assert session.environment["PYTHONDONTWRITEBYTECODE"] == ""
        with Path(f"{folder}.lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with Path(f"{folder}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
