"""`dflash doctor`: what this environment is, what is missing for work or for speed, and how to mend each."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash_core.configuration import UserError
from storage.byte_code import kept_beside_sources

State = Literal["ok", "slow", "broken"]
ROOM_BYTES = 20 << 30
"""Free space below which a folder is called full."""
PATIENCE_S = 10.0
"""How long a store is waited for that fails what is asked of it."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: State
    what: str
    remedy: str = ""


def examine(store: str | None = None, run: str | None = None) -> list[Finding]:
    """Look at everything. `store` is tried out with a small object; `run` is a report or data set."""
    looks: list[Callable[[], Iterator[Finding]]] = [
        versions,
        devices,
        speed_ups,
        compilers,
        disks,
        prefect_api,
    ]
    findings = [finding for look in looks for finding in look()]
    if store is not None:
        findings += object_store(store)
    if run is not None:
        findings += differences(run)
    return findings


def versions() -> Iterator[Finding]:
    """Say what is installed."""
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    names = ("dflash-pipeline", "torch", "transformers", "prefect", "pyarrow", "zstandard", "boto3")
    for name in names:
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "broken", "not installed", "pip install --editable . in a checkout")


def devices() -> Iterator[Finding]:
    """Say which GPUs torch sees."""
    import torch

    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "no driver or no device"
        remedy = "install a CUDA build of torch and NVIDIA's driver; the CPU is for trying things out"
        yield Finding("gpu", "slow", f"none: {why}", remedy)
        return
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        free, _ = torch.cuda.mem_get_info(i)
        used = properties.total_memory - free
        what = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        if used > 4 << 30:
            remedy = "see nvidia-smi for the process that holds it"
            yield Finding(f"gpu {i}", "slow", f"{what}; {used / 2**30:.0f} GiB in use", remedy)
        else:
            yield Finding(f"gpu {i}", "ok", what)


def speed_ups() -> Iterator[Finding]:
    """Say which optional packages are missing, and whether torch's sources are compiled."""
    from storage.codec import cpu_kernels

    optional = {
        "fla": ("flash-linear-attention", "hybrid targets (Qwen3.5, Qwen3.6) are many times slower without"),
        "causal_conv1d": ("causal-conv1d", "hybrid targets use a slower convolution without"),
        "triton": ("triton", "nothing can be compiled for a GPU without"),
        "awscrt": ("awscrt", "uploads to S3 are checked with slower checksums without"),
        "accelerate": ("accelerate", "large targets are loaded through host memory without"),
    }
    for module, (package, why) in optional.items():
        if importlib.util.find_spec(module) is None:
            yield Finding(package, "slow", f"not installed: {why}", f"pip install {package}")
        else:
            yield Finding(package, "ok", "installed")
    if cpu_kernels() is None:
        why = "not installed, or not of use here: a CPU decodes shards at half the speed"
        yield Finding("numba", "slow", why, "pip install --editable '.[cpu]'")
    else:
        yield Finding("numba", "ok", "decodes shards on the CPU")
    if kept_beside_sources("torch"):
        yield Finding("byte code", "ok", "kept beside torch's sources")
    else:
        what = "none of torch, nor may it be written: each process compiles torch's sources for seconds"
        remedy = "python -m compileall -q on site-packages; runs with a compile cache keep their own"
        yield Finding("byte code", "slow", what, remedy)


def compilers() -> Iterator[Finding]:
    """Say whether torch.compile can build what it generates."""
    found = next(
        (name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and shutil.which(name)), None
    )
    if found is None:
        remedy = "apt-get install gcc g++"
        yield Finding("C compiler", "broken", "none: Triton and torch.compile need one", remedy)
    else:
        yield Finding("C compiler", "ok", str(shutil.which(found)))


def disks() -> Iterator[Finding]:
    """Say how much room the folders have that fill up."""
    for name, folder in (("scratch", tempfile.gettempdir()), ("compile cache", "/var/tmp")):
        if not Path(folder).is_dir():
            continue
        free = shutil.disk_usage(folder).free
        what = f"{free / 2**30:.0f} GiB free in {folder}"
        if free < ROOM_BYTES:
            yield Finding(
                name, "slow", what, f"make room, or choose another folder; {ROOM_BYTES >> 30} GiB are wise"
            )
        else:
            yield Finding(name, "ok", what)


def prefect_api() -> Iterator[Finding]:
    """Say whether the Prefect server that is configured answers, and whether the short command works."""
    import httpx
    from prefect.settings import PREFECT_API_URL, get_current_settings

    url = PREFECT_API_URL.value()
    if not url:
        yield Finding("prefect", "ok", "no server configured: each run starts a temporary one")
        return
    try:
        status = httpx.get(f"{url}/health", timeout=5).status_code
        problem = None if status == httpx.codes.OK else f"answers {status}"
    except httpx.HTTPError as error:
        problem = str(error) or type(error).__name__
    if problem:
        yield Finding("prefect", "slow", f"{url}: {problem}", "dflash up, or set PREFECT_API_URL")
    else:
        yield Finding("prefect", "ok", f"{url} answers")
    if not get_current_settings().plugins.enabled:
        remedy = "prefect config set PREFECT_PLUGINS_ENABLED=true, or write NAME/NAME"
        yield Finding("short names", "slow", "`prefect deployment run NAME` needs a setting", remedy)


def object_store(uri: str) -> Iterator[Finding]:
    """Write, refuse to overwrite, read whole and by range, and delete one small object; nothing stays."""
    from storage.objects import ObjectExists, StoreConfig, StoreError, open_store

    key, data = f"doctor/{uuid.uuid4().hex}", b"dflash doctor"
    try:
        store = open_store(uri, StoreConfig(patience=PATIENCE_S))
        with contextlib.ExitStack() as clean_up:
            clean_up.callback(store.remove_folders)
            store.put_bytes(key, data)
            clean_up.callback(store.delete, key)
            try:
                store.put_bytes(key, b"a second writer")
                kept = False
            except ObjectExists:
                kept = store.get(key) == data
            store.get_range(key, 7, 6)
    except StoreError as error:
        yield Finding("store", "broken", str(error), "check the address, AWS_ENDPOINT_URL and the AWS_* keys")
        return
    if kept:
        yield Finding("store", "ok", f"{uri}: objects are created once, and read by range")
    else:
        remedy = "use a store with conditional writes (If-None-Match), such as S3, SeaweedFS from 4.18, Ceph"
        yield Finding("store", "broken", f"{uri} lets a second writer overwrite", remedy)


def differences(run: str) -> Iterator[Finding]:
    """Compare versions here with those of a training run (report.json) or a data set (its address)."""
    from storage.dataset_spec import software_versions

    here, there = software_versions(), recorded_versions(run)
    for name in sorted(here.keys() | there.keys()):
        left, right = here.get(name, "not installed"), there.get(name, "not recorded")
        if left == right:
            yield Finding(name, "ok", f"{left}, as there")
        else:
            ours = name == "dflash-pipeline"
            remedy = f"check out version {right}" if ours else f"pip install '{name}=={right}'"
            yield Finding(name, "slow", f"{left} here, {right} there", remedy)


def recorded_versions(run: str) -> dict[str, str]:
    """Return the versions that a run was made with. Raises UserError."""
    path = Path(run)
    if path.is_dir() and (path / "report.json").exists():
        path = path / "report.json"
    if path.is_file():
        wanted = "give a report.json or a data set's address"
        try:
            found: Any = json.loads(path.read_bytes())
        except ValueError as error:
            raise UserError(f"{path} is not JSON ({error}); {wanted}") from None
        if not isinstance(found, dict) or not isinstance(found.get("versions"), dict):
            raise UserError(f"{path} records no versions; {wanted}")
        return {str(name): str(version) for name, version in found["versions"].items()}
    from storage.dataset import open_dataset

    dataset = open_dataset(run)
    committed = sorted(set(range(len(dataset.plan.shards))) - set(dataset.missing()))
    if not committed:
        raise UserError(f"{run} has no shard yet, so it records no versions")
    return dict(dataset.record(committed[0]).versions)


def lines(findings: list[Finding]) -> Iterator[str]:
    """Return the findings for a terminal."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        yield f"{finding.state:>6}  {finding.name:<{width}}  {finding.what}"
        if finding.remedy:
            yield f"{'':>6}  {'':<{width}}  -> {finding.remedy}"
