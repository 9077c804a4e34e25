"""Times the start of training with and without a compile artifact, with the trainer's own step; prints JSON.

    python benchmarks/compile_cache.py --setting 27B --gpus 0
    python benchmarks/compile_cache.py --setting 27B --gpus 0,1

Each start is one of real ranks in fresh processes, with a folder as the object store. With one GPU:
    cold        empty store, empty machine: compile, pack, publish
    restored    the machine's caches wiped: download, verify, unpack, start
    again       the same machine once more: verify what lies there, start
    workers     as `again`, with torch's pool of compile workers, which a start from an artifact does without
    functions   as `again`, one rank under cProfile
    imports     as `again`, one rank whose imports are timed
With several:
    cold        one rank on the first GPU
    restored    the machine's caches wiped; all ranks start from the artifact of that one rank
    cold_all    empty store and machine: all ranks compile at the same time into one folder
    restored_all  the caches wiped again: all ranks start from what they made together

Seconds "to the first optimizer step" run from the start of the slowest rank's process, imports included;
"parts" says where they went on each rank; "wall" is the whole command: finding the fingerprint, restoring,
torchrun, the step, an evaluation step, the end. A line is printed after each start; what has not ended after
--seconds is ended, and the rest left out.
"""

from __future__ import annotations

import argparse
import json
import os
import pstats
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from train_step import SETTINGS

from dflash_core.compile_graphs import training_graphs
from dflash_core.compile_watch import COMPILE_THREADS_VARIABLE
from dflash_core.drafter import DrafterConfig
from dflash_core.training import TrainingConfig
from flows.build_cache import build_cache
from storage.compile_session import CompileCacheConfig, CompileSession, open_compile_store

SLOWEST = 60
"""Functions that a profile shows."""


def configurations(name: str, on_gpu: bool) -> tuple[DrafterConfig, TrainingConfig]:
    """Return the drafter and the training of a setting of benchmarks/train_step.py."""
    setting = SETTINGS[name]
    shape = {"num_heads": 32, "num_kv_heads": 8, "num_layers": 5} | setting["drafter"]
    training = {
        "row_tokens": setting["documents"] * setting["document_tokens"],
        "anchors_per_row": setting["anchors"],
        "loss": {"gamma": 10.0},
        "compile": True,
        "compute_dtype": "bfloat16" if on_gpu else "float32",
    }
    return DrafterConfig.model_validate(shape), TrainingConfig.model_validate(training)


class Starts:
    """The starts of one run of this benchmark and what they showed."""

    def __init__(self, setting: str, gpus: Sequence[str], scratch: Path) -> None:
        self.drafter, self.training = configurations(setting, bool(gpus))
        self.found: dict[str, Any] = {"setting": setting, "gpus": len(gpus)}
        self._root, self._scratch = scratch / "root", scratch
        self._cache = CompileCacheConfig(uri=str(scratch / "store"), local_root=str(self._root))

    def wipe(self, *, store: bool = False) -> None:
        """Forget what this machine has, and what the store has."""
        shutil.rmtree(self._root, ignore_errors=True)
        if store:
            shutil.rmtree(self._scratch / "store")

    def start(self, name: str, gpus: Sequence[str]) -> None:
        """Start training, and note how it went."""
        reports: list[Mapping[str, Any]] = []

        def keep(message: Mapping[str, Any]) -> None:
            if message["kind"] == "compile_report":
                reports.append(message)
            elif message["kind"] == "stderr":
                print(message["text"], file=sys.stderr)

        summary = build_cache(self.drafter, self.training, self._cache, gpus=gpus, on_message=keep)
        self._note(name, shown(summary, reports))

    def profile(self, gpus: Sequence[str]) -> None:
        """Start one rank without torchrun, under Python's own profilers."""
        graphs, store = training_graphs(self.drafter, self.training), open_compile_store(self._cache)
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        file, stats = self._scratch / "build.json", self._scratch / "stats"
        values = {"drafter": self.drafter, "training": self.training}
        file.write_text(json.dumps({name: value.model_dump(mode="json") for name, value in values.items()}))
        with CompileSession.open(store, graphs, self._cache, variables=visible) as session:
            environment = {**os.environ, **session.environment, **visible, "RANK": "0"}

            def run(*how: str) -> str:
                command = [sys.executable, *how, "-m", "flows.cache_rank", str(file)]
                return subprocess.run(
                    command, env=environment, check=True, text=True, stderr=subprocess.PIPE, stdout=2
                ).stderr

            try:
                run("-m", "cProfile", "-o", str(stats))
                self._note("functions", slowest_functions(stats))
                self._note("imports", slowest_imports(run("-X", "importtime")))
            except subprocess.CalledProcessError as error:
                self._note("profile", f"failed: {error.stderr[-2000:]}")

    def _note(self, name: str, value: Any) -> None:
        self.found[name] = value
        print(json.dumps({name: value}), flush=True)


def shown(summary: dict[str, Any], reports: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Pick what is worth printing of one start."""
    left_out = {
        "version",
        "fingerprint",
        "compiled",
        "cold_first_step_seconds",
        "seconds_saved",
        "slowest_start",
    }
    told = {
        "rank",
        "device",
        "parts",
        "compiler",
        "events",
        "event_threads",
        "caches",
        "new_files",
        "reasons",
    }
    ranks = [
        {name: value for name, value in report.items() if name in told}
        | {"new_kernel_files": len(report["new_kernel_files"])}
        for report in reports
    ]
    return {name: value for name, value in summary.items() if name not in left_out} | {"ranks": ranks}


def slowest_functions(stats: Path) -> list[str]:
    """Return the functions with the most time in them and in what they call: "seconds calls where"."""
    profile: Any = pstats.Stats(str(stats))
    rows = [
        (cumulative, calls, f"{'/'.join(Path(file).parts[-3:])}:{line} {name}")
        for (file, line, name), (_, calls, _, cumulative, _) in profile.stats.items()
    ]
    rows.sort(reverse=True)
    return [f"{seconds:.2f} {calls} {where}" for seconds, calls, where in rows[:SLOWEST]]


def slowest_imports(text: str) -> list[str]:
    """Return the modules with the most time in them and in what they import, from `-X importtime`."""
    rows = []
    for line in text.splitlines():
        columns = line.removeprefix("import time:").split("|")
        if line.startswith("import time:") and columns[1].strip().isdigit():
            rows.append((int(columns[1]) / 1e6, columns[2].strip()))
    return [f"{seconds:.2f} {name}" for seconds, name in sorted(rows, reverse=True)[:SLOWEST]]


def plan(starts: Starts, gpus: Sequence[str]) -> list[Callable[[], None]]:
    """Return what to do, in order (see the module's docstring)."""
    if len(gpus) > 1:
        return [
            lambda: starts.start("cold", gpus[:1]),
            starts.wipe,
            lambda: starts.start("restored", gpus),
            lambda: starts.wipe(store=True),
            lambda: starts.start("cold_all", gpus),
            starts.wipe,
            lambda: starts.start("restored_all", gpus),
        ]

    def workers() -> None:
        os.environ[COMPILE_THREADS_VARIABLE] = str(min(32, len(os.sched_getaffinity(0))))
        starts.start("workers", gpus)
        del os.environ[COMPILE_THREADS_VARIABLE]

    return [
        lambda: starts.start("cold", gpus),
        starts.wipe,
        lambda: starts.start("restored", gpus),
        lambda: starts.start("again", gpus),
        workers,
        lambda: starts.profile(gpus),
    ]


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", default="27B", choices=sorted(SETTINGS))
    parser.add_argument("--gpus", default="", help="GPU numbers with commas; none: the CPU")
    parser.add_argument("--seconds", type=int, default=900, help="the longest that all of it may take")
    parser.add_argument(
        "--folder", type=Path, help="where store and caches go; a temporary folder by default"
    )
    arguments = parser.parse_args()
    gpus = [gpu for gpu in arguments.gpus.split(",") if gpu]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        starts = Starts(arguments.setting, gpus, Path(scratch))
        signal.signal(signal.SIGALRM, _out_of_time)
        signal.alarm(arguments.seconds)
        try:
            for step in plan(starts, gpus):
                step()
        except TimeoutError:
            starts.found["ended_after_seconds"] = arguments.seconds
        finally:
            signal.alarm(0)
    found = starts.found
    for name, cold in (("restored", "cold"), ("restored_all", "cold_all")):
        if name in found:
            first = [found[which]["first_optimizer_step_seconds"] for which in (name, cold)]
            found[f"{name}_share_of_cold"] = round(first[0] / first[1], 3)
    found["seconds"] = round(time.monotonic() - began, 1)
    for name in ("functions", "imports"):
        found.pop(name, None)  # printed already, and long
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
