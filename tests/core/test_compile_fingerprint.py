"""The identity of a compile cache: equal when kernels fit, different and explained when they do not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_core.compile_fingerprint import (
    Environment,
    Fingerprint,
    differences,
    environment_here,
    graph_set,
    source_digest,
)
from dflash_core.configuration import UserError
from tests.storage.tiny_cache import environment, fingerprint

ASK = """
import sys
from dflash_core.compile_fingerprint import environment_here
print(environment_here({"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": "/somewhere"}).model_dump_json())
assert "torch" not in sys.modules, "a launcher must not need torch for this"
"""


def test_environment_comes_from_a_child_and_is_the_same_twice() -> None:
    asked = subprocess.run([sys.executable, "-c", ASK], check=True, timeout=120, stdout=subprocess.PIPE)
    plain = Environment.model_validate_json(asked.stdout)
    assert plain.inductor_config and plain.cpu_threads == 1 and len(plain.torch_sources) == 64
    assert not any("0x" in value for value in plain.inductor_config.values()), "an address differs each time"

    tuned = environment_here(
        {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_MAX_AUTOTUNE": "1", "TRITON_CACHE_DIR": "/elsewhere"}
    )
    graphs = graph_set("train", {}, [])
    pair = [Fingerprint(environment=e, graphs=graphs, local_root="/r") for e in (tuned, plain)]
    assert differences(*pair) == [
        "inductor.max_autotune True, here False",
        "TORCHINDUCTOR_MAX_AUTOTUNE 1, here not set",
    ]


def test_a_child_imports_nothing_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("dflash_core", "storage", "flows", "torch", "pydantic"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not ours')")
    monkeypatch.chdir(tmp_path)
    assert environment_here({"OMP_NUM_THREADS": "1"}).cpu_threads == 1


def test_a_child_that_fails_is_quoted() -> None:
    with pytest.raises(UserError, match="cannot describe the environment"):
        environment_here({"PYTHONHOME": "/nonexistent"})


def test_a_child_that_hangs_is_given_up_in_words() -> None:
    with pytest.raises(UserError, match=r"took longer than 0\.01 s .* see whether nvidia-smi"):
        environment_here(timeout=0.01)


def test_differences_are_words(tmp_path: Path) -> None:
    ours = fingerprint(tmp_path)
    theirs = fingerprint(
        tmp_path / "other",
        rows=1024,
        torch="2.11.0+cu128",
        device="NVIDIA H100",
        triton=None,
        inductor_config={"max_autotune": "True"},
        variables={"TRITON_DEBUG": "1"},
    )
    assert differences(ours, ours) == []
    assert differences(theirs, ours) == [
        "torch 2.11.0+cu128, here 2.11.0+cu130",
        "triton none, here 3.6.0",
        "device NVIDIA H100, here NVIDIA H200",
        "inductor.max_autotune True, here False",
        "setting row_tokens 1024, here 512",
        f"local root {tmp_path}/other, here {tmp_path}",
        "TRITON_DEBUG 1, here not set",
    ]


def test_every_field_is_part_of_the_identity(tmp_path: Path) -> None:
    plain = fingerprint(tmp_path).id
    changed = {
        "inductor_config": {"x": "1"},
        "functorch_config": {"x": "1"},
        "variables": {"TRITON_DEBUG": "1"},
        "multiprocessors": 78,
        "cpu_threads": 3,
        "deterministic": True,
    }
    ids = {
        fingerprint(tmp_path, **{name: changed.get(name, "something else")}).id
        for name in Environment.model_fields
    }
    assert len(ids) == len(Environment.model_fields) and plain not in ids


def test_identity_survives_json(tmp_path: Path) -> None:
    ours = fingerprint(tmp_path)
    again = Fingerprint.model_validate(json.loads(ours.model_dump_json()))
    assert (again, again.id, again.cache_dir) == (ours, ours.id, tmp_path / ours.id[:16])


def test_folder_names() -> None:
    gpu = environment()
    assert (gpu.hardware, gpu.software) == ("NVIDIA-H200-sm9.0", "torch2.11.0-cu13.0-triton3.6.0")
    cpu = environment(device="cpu-AVX2", compute_capability=None, cuda=None, triton=None, torch="2.13.0+cpu")
    assert (cpu.hardware, cpu.software) == ("cpu-AVX2", "torch2.13.0-cpu")


PLAIN = "def f(x):\n    return x + 1\n"
SAME = '"""About."""\n\n\n# Why.\ndef f(\n    x,\n):\n    """What."""\n    return x + 1  # one\n'


def test_comments_and_docstrings_do_not_cost_a_compile(tmp_path: Path) -> None:
    path = tmp_path / "drafter.py"

    def digest(text: str) -> str:
        path.write_text(text)
        return source_digest(path)

    assert digest(PLAIN) == digest(SAME)
    assert digest(PLAIN) != digest(PLAIN.replace("1", "2"))
    assert digest(PLAIN) != digest(PLAIN.replace("x + 1", "f'text' and x + 1"))


def test_graph_set_reads_each_file_once(tmp_path: Path) -> None:
    path = tmp_path / "drafter.py"
    path.write_text(PLAIN)
    made = graph_set("train", {"rows": 1}, [path])
    assert made.sources == {"drafter.py": source_digest(path)}
    with pytest.raises(UserError, match="missing"):
        graph_set("train", {}, [tmp_path / "gone.py"])
    with pytest.raises(UserError, match="two source files"):
        graph_set("train", {}, [path, path])
