"""The identity of a compile cache: everything that decides whether kernels compiled elsewhere fit here.

`python -m dflash_core.compile_fingerprint` prints the environment of that process as JSON. A launcher asks a
child for it (`environment_here`), because reading the GPU's name initialises CUDA, and a process that did so
must not fork and holds some hundred MiB of the GPU.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from dflash_core.configuration import Config, UserError, fingerprint
from dflash_core.own_modules import own_modules

VARIABLE_PREFIXES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TRITON_", "AOT_", "PYTORCH_NVFUSER")
"""Environment variables that change what is compiled start with one of these."""

VARIABLES_WITHOUT_EFFECT = frozenset(
    {
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TORCHINDUCTOR_WORKER_START",
        "TORCHINDUCTOR_FX_GRAPH_CACHE",
        "TORCHINDUCTOR_AUTOGRAD_CACHE",
        "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE",
        "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE",
        "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE",
        "TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE",
        "TRITON_PTXAS_PATH",
        "TRITON_HOME",
    }
)
"""Of those, the ones that say where and how fast to compile, not what."""


class Environment(Config):
    """The machine and software that compile, as one process sees them before the trainer changes anything."""

    torch: str
    """With its local part: "2.11.0+cu128"."""
    torch_commit: str
    torch_sources: str
    """Digest of every Python file of torch, as in inductor's own keys: a patched torch differs."""
    triton: str | None
    cuda: str | None
    """CUDA (or "hip 6.4") that torch was built with."""
    transformers: str | None
    python: str
    machine: str
    libc: str
    device: str
    """Name of the GPU, or of the vector instructions of the CPU."""
    compute_capability: str | None
    """"9.0"; None on a CPU."""
    multiprocessors: int | None
    cpu_threads: int | None
    """Only without a GPU: inductor's C++ code is generated for a number of threads."""
    inductor_config: dict[str, str]
    functorch_config: dict[str, str]
    matmul_precision: str
    deterministic: bool
    variables: dict[str, str]

    @property
    def software(self) -> str:
        """Folder name: "torch2.11.0-cu12.8-triton3.6.0"."""
        version, _, local = self.torch.partition("+")
        toolkit = f"cu{self.cuda}" if self.cuda and self.cuda[0].isdigit() else local or "cpu"
        return slug(
            "-".join([f"torch{version}", toolkit] + ([f"triton{self.triton}"] if self.triton else []))
        )

    @property
    def hardware(self) -> str:
        """Folder name: "NVIDIA-H200-sm9.0"."""
        return slug(self.device + (f"-sm{self.compute_capability}" if self.compute_capability else ""))


class GraphSet(Config):
    """What is compiled: a name for people, the static shapes and switches, and the source files."""

    name: str
    """Such as "train-32768x1008x32"."""
    settings: dict[str, JsonValue]
    """Everything that enters a graph: row length, anchors, block size, layers, widths, dtype."""
    sources: dict[str, str]
    """File name -> digest of its code (`source_digest`)."""


class Fingerprint(Config):
    """An environment, a graph set and the folder in which their kernels live."""

    environment: Environment
    graphs: GraphSet
    local_root: str
    """Absolute folder above the cache. Triton stores absolute paths, so it is part of the identity."""

    @property
    def id(self) -> str:
        """64 hex digits."""
        return fingerprint(self)

    @property
    def cache_dir(self) -> Path:
        """The node-local folder that inductor and Triton are pointed at."""
        return Path(self.local_root) / self.id[:16]

    @property
    def key(self) -> str:
        """Where versions of it lie below the artifact's root: words first, so that a listing can be read."""
        return (
            f"{slug(self.graphs.name)}/{self.environment.hardware}/{self.environment.software}/{self.id[:16]}"
        )


def slug(text: str) -> str:
    """Make a folder name of a sentence: letters, digits, dot, plus, minus and underscore stay."""
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", text).strip("-.") or "unnamed"


def source_digest(path: Path) -> str:
    """Return a digest of a Python file's code: comments, docstrings and layout do not count.

    Inductor's keys hold neither file names nor line numbers, so a reworded comment must not cost a compile.
    """
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not _is_text(statement)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def graph_set(name: str, settings: Mapping[str, JsonValue], sources: Iterable[Path]) -> GraphSet:
    """Build a `GraphSet`, reading the source files.

    Raises:
        UserError: two files of the same name, or one that is missing.
    """
    digests: dict[str, str] = {}
    for path in sources:
        if not path.is_file():
            raise UserError(f"source file of the compiled graphs is missing: {path}")
        if path.name in digests:
            raise UserError(f"two source files of the compiled graphs are called {path.name}")
        digests[path.name] = source_digest(path)
    return GraphSet(name=name, settings=dict(settings), sources=digests)


def read_environment() -> Environment:
    """Describe this process; initialises CUDA where there is a GPU."""
    import torch
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.codecache import torch_key

    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    device = gpu.name if gpu else f"cpu-{torch.backends.cpu.get_cpu_capability()}"
    return Environment(
        torch=str(torch.__version__),
        torch_commit=str(torch.version.git_version),
        torch_sources=torch_key().hex(),
        triton=_version("triton"),
        cuda=f"hip {torch.version.hip}" if torch.version.hip else torch.version.cuda,
        transformers=_version("transformers"),
        python=".".join(platform.python_version_tuple()[:2]),
        machine=platform.machine(),
        libc=" ".join(platform.libc_ver()).strip(),
        device=device,
        compute_capability=f"{gpu.major}.{gpu.minor}" if gpu else None,
        multiprocessors=gpu.multi_processor_count if gpu else None,
        cpu_threads=None if gpu else torch.get_num_threads(),
        inductor_config=_readable(inductor_config.save_config_portable()),
        functorch_config=_readable(functorch_config.save_config_portable()),
        matmul_precision=torch.get_float32_matmul_precision(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLE_PREFIXES)
            and name not in VARIABLES_WITHOUT_EFFECT
            # Addresses of remote caches, which no rank may use: they can hold a password.
            and "REDIS" not in name
        },
    )


def environment_here(variables: Mapping[str, str] | None = None, timeout: float = 300) -> Environment:
    """Ask a short-lived child what the ranks will see; this process never touches CUDA.

    Args:
        variables: added to the environment of the child, as they will be to that of the ranks.

    Raises:
        UserError: the child failed, its own words are in the message; or it took longer than `timeout`
            seconds.
    """
    command = [sys.executable, "-m", "dflash_core.compile_fingerprint"]
    try:
        child = subprocess.run(
            command,
            env={**os.environ, **own_modules(), **(variables or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"importing torch and asking the GPU's driver took longer than {timeout:g} s in a process of its "
            "own: see whether nvidia-smi answers and whether the disk with Python's packages is slow"
        ) from None
    if child.returncode != 0:
        raise UserError(f"cannot describe the environment of the ranks: {child.stderr.strip()[-2000:]}")
    return Environment.model_validate_json(child.stdout.splitlines()[-1])


def differences(theirs: Fingerprint, ours: Fingerprint) -> list[str]:
    """Say in words how two fingerprints differ: ["torch 2.11.0+cu128, here 2.11.0+cu130", ...]."""
    left, right = _flat(theirs.model_dump(mode="json")), _flat(ours.model_dump(mode="json"))
    lines = []
    for name in [*right, *(name for name in left if name not in right)]:
        before, after = left.get(name, "not set"), right.get(name, "not set")
        if before == after:
            continue
        if name.startswith("source ") or name in ("torch sources", "torch commit"):
            before, after = before[:12], after[:12]
        lines.append(f"{name} {before}, here {after}")
    return lines


def _flat(described: dict[str, Any]) -> dict[str, str]:
    environment, graphs = described["environment"], described["graphs"]
    flat: dict[str, str] = {}
    for name, value in environment.items():
        if isinstance(value, dict):
            prefix = {"inductor_config": "inductor.", "functorch_config": "functorch.", "variables": ""}[name]
            flat |= {prefix + key: str(inner) for key, inner in value.items()}
        else:
            flat[name.replace("_", " ")] = "none" if value is None else str(value)
    flat["graph set"] = graphs["name"]
    flat |= {f"setting {key}": json.dumps(value) for key, value in graphs["settings"].items()}
    flat |= {f"source {key}": value for key, value in graphs["sources"].items()}
    flat["local root"] = described["local_root"]
    return flat


def _readable(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: _text(value) for name, value in sorted(values.items())}


def _text(value: Any) -> str:
    # repr of a function holds its address, which differs in every process.
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    if isinstance(value, list | tuple | set | frozenset):
        items = [_text(item) for item in value]
        return f"[{', '.join(sorted(items) if isinstance(value, set | frozenset) else items)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(key)}: {_text(inner)}" for key, inner in value.items()) + "}"
    return repr(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(read_environment().model_dump_json())
