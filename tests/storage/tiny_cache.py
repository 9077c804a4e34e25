"""A small folder of files in the shape of a compile cache, and fingerprints without a compiler: for tests."""

from __future__ import annotations

from pathlib import Path

from dflash_core.compile_fingerprint import Environment, Fingerprint, GraphSet

FILES = {
    "ab/cabkernel.py": b"kernel = 1\n" * 200,
    "cd/ccdmain.so": bytes(range(256)) * 40,
    "aotautograd/akey/entry": b"graph" * 1000,
    "fxgraph/xx/fkey/entry": b"lowered" * 900,
    "triton/HASH/kernel.cubin": b"\x7fELF" + bytes(5000),
    "triton/HASH/__grp__kernel.json": b"{}",
}
PASSING = ("locks/a.lock", "ab/.123.456.tmp", "triton/tmp.pid_1_x/kernel.cubin", "ab/__pycache__/x.pyc")


def environment(**changes: object) -> Environment:
    """An H200 as it might describe itself."""
    plain: dict[str, object] = {
        "torch": "2.11.0+cu130",
        "torch_commit": "0" * 40,
        "torch_sources": "1" * 64,
        "triton": "3.6.0",
        "cuda": "13.0",
        "transformers": "5.24.0",
        "python": "3.11",
        "machine": "x86_64",
        "libc": "glibc 2.36",
        "device": "NVIDIA H200",
        "compute_capability": "9.0",
        "multiprocessors": 132,
        "cpu_threads": None,
        "inductor_config": {"max_autotune": "False"},
        "functorch_config": {},
        "matmul_precision": "highest",
        "deterministic": False,
        "variables": {},
    }
    return Environment.model_validate(plain | changes)


def fingerprint(root: Path, name: str = "train-512x8x4", rows: int = 512, **changes: object) -> Fingerprint:
    """A fingerprint whose folder lies below `root`."""
    graphs = GraphSet(name=name, settings={"row_tokens": rows}, sources={"drafter.py": "2" * 64})
    return Fingerprint(environment=environment(**changes), graphs=graphs, local_root=str(root))


def write_cache(folder: Path, salt: bytes = b"") -> None:
    """Fill a folder as compilers would, with locks and unfinished files among the others."""
    for name, data in [*FILES.items(), *((name, b"passing") for name in PASSING)]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data + salt)
    (folder / "cd/ccdmain.so").chmod(0o755)


def content(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """Every file of a folder: name -> bytes and whether it may be executed."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), bool(path.stat().st_mode & 0o100))
        for path in folder.rglob("*")
        if path.is_file()
    }
