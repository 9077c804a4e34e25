"""The rooms and the one arrow between them: flows -> storage -> dflash_core."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("dflash_core", "storage", "flows")

FORBIDDEN = {
    "dflash_core": {
        "storage",
        "flows",
        "prefect",
        "pyarrow",
        "boto3",
        "botocore",
        "zstandard",
        "datasets",
        "typer",
    },
    "storage": {"flows", "prefect", "typer"},
    "flows": set(),
}
ONE_ROOM = {
    "boto3": {"storage/objects.py"},
    "botocore": {"storage/objects.py"},
    "datasets": {"storage/chats.py"},
}
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNPICKLE = {"torch.load", "torch.save", "numpy.load", "np.load"}
WITHOUT_PREFECT = ("flows/extract_worker.py", "flows/train_worker.py", "flows/launch.py", "flows/config.py")


def imported_by(path: Path) -> set[str]:
    """Every module that a file imports anywhere in it, as full dotted names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path}: relative import; write the full name")
    return names


def files_of(room: str) -> list[Path]:
    files = sorted((ROOT / room).rglob("*.py"))
    assert len(files) > 3, f"{room} is nearly empty: this test would prove nothing"
    return files


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room: str) -> None:
    for path in files_of(room):
        tops = {name.split(".")[0] for name in imported_by(path)}
        assert not tops & FORBIDDEN[room], f"{path} imports {tops & FORBIDDEN[room]}"


@pytest.mark.parametrize("library", sorted(ONE_ROOM))
def test_each_library_has_one_room(library: str) -> None:
    users = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in files_of(room)
        if library in {name.split(".")[0] for name in imported_by(path)}
    }
    assert users == ONE_ROOM[library]


def pickling_in(path: Path) -> set[str]:
    """What a file uses that runs code which lies in the data it reads, or writes such data."""
    names = {ast.unparse(n) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
    return {name for name in names | imported_by(path) if name in UNPICKLE or name.split(".")[0] in PICKLES}


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_is_pickled(room: str) -> None:
    for path in files_of(room):
        assert not pickling_in(path), f"{path} uses {pickling_in(path)}"
    assert pickling_in(ROOT / "benchmarks" / "store_layouts.py") == {"torch.load", "torch.save"}


def modules_reached(start: str) -> set[str]:
    """Dotted names reachable from a file of ours by imports at any depth of our own packages."""
    seen: set[str] = set()
    todo = [start.removesuffix(".py").replace("/", ".")]
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        path = ROOT / (module.replace(".", "/") + ".py")
        if module.split(".")[0] in ROOMS and path.exists():
            todo.extend(imported_by(path))
    return seen


@pytest.mark.parametrize("start", WITHOUT_PREFECT)
def test_workers_never_reach_prefect(start: str) -> None:
    assert (ROOT / start).exists()
    reached = modules_reached(start)
    assert any(name.startswith("dflash_core") for name in reached)
    assert not {name for name in reached if name.split(".")[0] == "prefect"}


def test_ranks_do_not_wait_for_what_they_do_not_use() -> None:
    code = "import sys, flows.train_worker; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, text=True, capture_output=True, cwd=ROOT)
    loaded = set(done.stdout.split())
    assert "torch" in loaded and "dflash_core.training" in loaded
    # The compiler is imported in a thread, while the weights are read (`Watch.load_compiler`).
    assert not loaded & {"transformers", "prefect", "boto3", "datasets", "torch._dynamo", "torch._inductor"}


def test_no_room_for_everything() -> None:
    banned = {"utils.py", "util.py", "common.py", "helpers.py", "base.py", "misc.py"}
    assert not [p for room in ROOMS for p in files_of(room) if p.name in banned]


@pytest.mark.parametrize("room", ROOMS)
def test_each_file_says_what_it_is_for(room: str) -> None:
    for path in files_of(room):
        assert ast.get_docstring(ast.parse(path.read_text())), (
            f"{path} opens without a sentence on what it is for"
        )
