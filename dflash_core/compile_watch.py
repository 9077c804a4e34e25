"""Proof, after the first full step of a rank, that nothing was compiled; or exactly what was, and why.

Cache counters alone do not prove it: a kernel outside the stored graphs is compiled without a miss. So three
things are looked at: compile events, cache misses and bypasses, and kernel files that were not there before.

The launcher starts ranks with `environment_for_ranks(...)`. A rank then does

    watch = Watch.from_environment()
    ...process group...
    watch.load_compiler()                              # imports it while the weights are loaded
    ...device, model, data...
    watch.start()                                      # before the first compiled call
    ...one full step: forward, backward, optimizer; and one evaluation step...
    say(**watch.report(rank=rank).model_dump(mode="json"))  # {"kind": "compile_report", ...}
    watch.forbid("error")                              # from here on a recompile stops the run
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, cast, get_args

from pydantic import Field

from dflash_core.compile_fingerprint import Fingerprint
from dflash_core.configuration import Config, UserError

log = logging.getLogger(__name__)

FINGERPRINT_VARIABLE = "DFLASH_COMPILE_FINGERPRINT"
START_VARIABLE = "DFLASH_COMPILE_START"
VERSION_VARIABLE = "DFLASH_COMPILE_VERSION"
VERSION_FILE_VARIABLE = "DFLASH_COMPILE_VERSION_FILE"
"""A file that the launcher makes when it publishes: it holds the name of the version."""
LAUNCHED_VARIABLE = "DFLASH_COMPILE_LAUNCHED"
TORCH_KEY_VARIABLE = "DFLASH_COMPILE_TORCH_KEY"
COMPILE_THREADS_VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"
KERNEL_SUFFIXES = (".so", ".o", ".cubin", ".hsaco", ".best_config")
"""Files that a compiler or an autotuner leaves behind; a start from a complete cache adds none."""
NOTABLE_S = 0.05
"""Shorter phases of the compiler are not reported."""

FIXED_VARIABLES = {
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    # What remote caches deliver is unpickled, and nobody signs it.
    "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE": "0",
}
"""Set for every rank, whatever the user's environment says."""

COMPILER_MODULES = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._functorch._aot_autograd.autograd_cache",
    "torch._inductor.runtime.triton_heuristics",
    "torch._dynamo.repro.after_dynamo",
    "torch._inductor.compiler_bisector",
)
"""Torch imports these when something is compiled first, which takes seconds."""

StartState = Literal["restored", "local", "cold"]
"""Where the kernels come from: the store, this machine's own sealed folder, or nowhere yet."""


class CacheCounts(Config):
    """What torch's two caches were asked for."""

    graphs: int
    """Graphs that Dynamo handed to the compiler."""
    aot_hits: int
    aot_misses: int
    aot_bypasses: int
    fx_hits: int
    fx_misses: int
    fx_bypasses: int


class CompileReport(Config):
    """What one rank compiled up to the end of its first full step."""

    kind: Literal["compile_report"] = "compile_report"
    rank: int
    start: StartState
    fingerprint: str | None
    """Id of the fingerprint that the launcher gave, if it did."""
    cache_dir: str | None
    device: str
    seconds_since_process_start: float
    """From the start of the process to this report: the time a person waits for the first step."""
    events: dict[str, int]
    """Compile events by trigger: every start traces ("DYNAMO"), only a cold one has a "LAZY_BACKWARD"."""
    event_threads: tuple[str, ...]
    """Names of the threads in which they ran."""
    caches: CacheCounts
    recompile_reasons: tuple[str, ...]
    new_kernel_files: tuple[str, ...]
    """Relative to `cache_dir`; every rank sees the files of all ranks of its host."""
    new_files: int
    reasons: tuple[str, ...] = Field(default=())
    """In words, why this does not count as "nothing was compiled"; empty when it does."""
    parts: dict[str, float] = Field(default_factory=dict)
    """Where the seconds since the start of the process went, in order, as told with `Watch.mark`."""
    compiler: dict[str, float] = Field(default_factory=dict)
    """Seconds of the compiler's notable phases by torch's own clock; they lie in each other."""

    @property
    def compiled(self) -> bool:
        """Whether anything at all was compiled."""
        return bool(self.reasons)


def environment_for_ranks(
    fingerprint: Fingerprint,
    start: StartState,
    version: str | None = None,
    version_file: Path | None = None,
) -> dict[str, str]:
    """Return the variables that ranks need before they import torch.

    Both caches get one fixed folder on this machine; remote caches are switched off. `version` names what was
    restored; what is published later is named in `version_file` (see `cache_in_use`). The digest of torch's
    sources is passed on, as torch does to its own workers, so that not every rank reads all of torch again.
    Where there is nothing to compile, ranks start no compile workers, unless the user's environment says how
    many.
    """
    root = fingerprint.cache_dir
    alone = start != "cold" and COMPILE_THREADS_VARIABLE not in os.environ
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(root),
        "TRITON_CACHE_DIR": str(root / "triton"),
        **FIXED_VARIABLES,
        FINGERPRINT_VARIABLE: fingerprint.id,
        START_VARIABLE: start,
        VERSION_VARIABLE: version or "",
        VERSION_FILE_VARIABLE: str(version_file or ""),
        TORCH_KEY_VARIABLE: fingerprint.environment.torch_sources,
        LAUNCHED_VARIABLE: f"{time.time():.3f}",
        **({COMPILE_THREADS_VARIABLE: "1"} if alone else {}),
    }


def cache_in_use(variables: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Say which cache the launcher gave to this rank, for its checkpoints; None without a launcher.

    "version" is the one that this run has published, once it has, else the one that was restored, if any.
    """
    if FINGERPRINT_VARIABLE not in variables:
        return None
    version = variables[VERSION_VARIABLE]
    if file := variables.get(VERSION_FILE_VARIABLE):
        with suppress(FileNotFoundError):
            version = Path(file).read_text()
    return {
        "fingerprint": variables[FINGERPRINT_VARIABLE],
        "version": version,
        "start": variables[START_VARIABLE],
    }


class Watch:
    """Counts what torch compiles in this process between `start` and `report`."""

    def __init__(self, cache_dir: Path | None, start: StartState, fingerprint: str | None) -> None:
        self._cache_dir = cache_dir
        self._start_state: StartState = start
        self._fingerprint = fingerprint
        self._events: list[tuple[str, str]] = []
        self._before: frozenset[str] = frozenset()
        self._counters_before: dict[str, int] = {}
        self._last_before: Any = None
        self._last_warned_of: Any = None
        self._warns = False
        self._loading: threading.Thread | None = None
        self._parts: dict[str, float] = {}

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> Watch:
        """Watch the folder that the launcher named. Without a launcher the start counts as cold."""
        root = variables.get("TORCHINDUCTOR_CACHE_DIR")
        state = variables.get(START_VARIABLE, "cold")
        if state not in get_args(StartState):
            raise UserError(f"{START_VARIABLE} is {state!r}; it must be restored, local or cold")
        return cls(Path(root) if root else None, cast(StartState, state), variables.get(FINGERPRINT_VARIABLE))

    def mark(self, part: str) -> None:
        """Note that a part of the start has ended: its seconds are those since the mark before."""
        self._parts[part] = seconds_since_process_start() - sum(self._parts.values())

    def load_compiler(self) -> None:
        """Import torch's compiler in a thread, until `start`: reading weights and making a context of the
        device leave the interpreter idle for as long. The thread compiles nothing and calls nothing compiled.
        Call it once the process group is there: making one fails while the compiler is half imported.
        """
        self._loading = threading.Thread(target=_load_compiler, name="load compiler", daemon=True)
        self._loading.start()

    def start(self) -> Watch:
        """Begin to count. Call it before the first compiled call; `torch._dynamo.reset()` ends it."""
        if self._loading is not None:
            self._loading.join()
        from torch._dynamo.callback import callback_handler

        self._before = self._files()
        self._counters_before = _counters()
        self._last_before = (_metrics_after() or [None])[-1]
        callback_handler.register_start_callback(self._on_compile)
        return self

    def stop(self) -> None:
        """Count no longer."""
        from torch._dynamo.callback import callback_handler

        if self._on_compile in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._on_compile)

    def report(self, *, rank: int = 0) -> CompileReport:
        """Say what was compiled since `start`. Cheap; may be called again later."""
        caches = CacheCounts(**{name: n - self._counters_before[name] for name, n in _counters().items()})
        new_files = sorted(self._files() - self._before)
        events = Counter(trigger for trigger, _ in self._events)
        kernels = tuple(name for name in new_files if name.endswith(KERNEL_SUFFIXES))
        return CompileReport(
            rank=rank,
            start=self._start_state,
            fingerprint=self._fingerprint,
            cache_dir=str(self._cache_dir) if self._cache_dir else None,
            device=_device_name(),
            seconds_since_process_start=round(seconds_since_process_start(), 3),
            events=dict(events),
            event_threads=tuple(sorted({thread for _, thread in self._events})),
            recompile_reasons=tuple(
                metric.recompile_reason
                for metric in _metrics_after(self._last_before)
                if metric.recompile_reason
            ),
            new_kernel_files=kernels,
            new_files=len(new_files),
            caches=caches,
            reasons=_reasons(caches, events, kernels),
            parts={part: round(seconds, 3) for part, seconds in self._parts.items()},
            compiler=_compiler_seconds(),
        )

    def forbid(self, on_recompile: Literal["error", "warn"] = "error") -> None:
        """From now on a compile is an error that names the guard, or a warning in the log.

        Call it after a backward: a backward that was not compiled yet is not covered. "error" raises on the
        first call of a graph that was never compiled as well, so evaluation must have run once.
        """
        import torch

        if on_recompile == "error":
            torch.compiler.set_stance("fail_on_recompile")
        else:
            self._warns = True
            self._last_warned_of = (_metrics_after() or [None])[-1]

    def warnings(self) -> list[str]:
        """After `forbid("warn")`: the reasons of every recompile since the last call, also logged."""
        metrics = _metrics_after(self._last_warned_of) if self._warns else []
        if not metrics:
            return []
        self._last_warned_of = metrics[-1]
        reasons = [
            f"recompiled: {metric.recompile_reason or 'a graph not seen before'}" for metric in metrics
        ]
        for reason in reasons:
            log.warning("%s", reason)
        return reasons

    def _on_compile(self, arguments: Any) -> None:
        self._events.append((arguments.callback_trigger.name, threading.current_thread().name))

    def _files(self) -> frozenset[str]:
        return frozenset(cache_files(self._cache_dir)) if self._cache_dir is not None else frozenset()


def cache_files(folder: Path) -> Iterator[str]:
    """Yield the names of the files that make up a cache, sorted, relative, with "/" between parts."""
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _passing(name))
        for name in sorted(files):
            if not _passing(name):
                yield (Path(where) / name).relative_to(folder).as_posix()


def _passing(name: str) -> bool:
    """Tell locks, and files that torch and Triton are still writing and rename when complete."""
    return (
        name in ("locks", "__pycache__") or name.startswith((".", "tmp.")) or name.endswith((".lock", ".tmp"))
    )


def _reasons(caches: CacheCounts, events: Mapping[str, int], kernels: tuple[str, ...]) -> tuple[str, ...]:
    reasons = []
    if lazy := events.get("LAZY_BACKWARD", 0):
        reasons.append(f"{lazy} backward graph(s) compiled")
    counts = caches.model_dump()
    for name in ("aot_misses", "aot_bypasses", "fx_misses", "fx_bypasses"):
        if counts[name]:
            reasons.append(f"{counts[name]} {name.replace('_', ' cache ')}")
    if caches.graphs > caches.aot_hits + caches.aot_misses + caches.aot_bypasses:
        # Switched-off caches count neither hits nor misses.
        reasons.append(f"only {caches.aot_hits} of {caches.graphs} graphs came from the cache")
    if kernels:
        shown = ", ".join(kernels[:3]) + (", ..." if len(kernels) > 3 else "")
        reasons.append(f"{len(kernels)} new kernel file(s): {shown}")
    return tuple(reasons)


def _counters() -> dict[str, int]:
    from torch._dynamo.utils import counters

    aot, inductor = counters["aot_autograd"], counters["inductor"]
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "aot_hits": aot["autograd_cache_hit"],
        "aot_misses": aot["autograd_cache_miss"],
        "aot_bypasses": aot["autograd_cache_bypass"],
        "fx_hits": inductor["fxgraph_cache_hit"],
        "fx_misses": inductor["fxgraph_cache_miss"],
        "fx_bypasses": inductor["fxgraph_cache_bypass"],
    }


def _metrics_after(last: Any = None) -> list[Any]:
    """Return what torch wrote of the compiles after the one given; it keeps only the newest 64."""
    from torch._dynamo.utils import get_compilation_metrics

    metrics = get_compilation_metrics()
    places = [place for place, metric in enumerate(metrics) if metric is last]
    return metrics[places[0] + 1 :] if places else metrics


def _load_compiler(variables: Mapping[str, str] = os.environ) -> None:
    """Import what a compile imports, and have the digests ready that enter its keys."""
    for module in COMPILER_MODULES:
        importlib.import_module(module)
    from torch._inductor import codecache
    from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

    if key := variables.get(TORCH_KEY_VARIABLE):
        torch_key: Any = codecache.torch_key
        torch_key.clear()
        torch_key.set(bytes.fromhex(key))
    if HAS_TRITON:
        triton_key()  # reads all of Triton's sources and its library, and remembers


def _compiler_seconds() -> dict[str, float]:
    from torch._dynamo.utils import compilation_time_metrics

    sums = {name: round(sum(times), 3) for name, times in compilation_time_metrics.items()}
    return dict(sorted(((k, v) for k, v in sums.items() if v > NOTABLE_S), key=lambda item: -item[1]))


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


def seconds_since_process_start(variables: Mapping[str, str] = os.environ) -> float:
    """Return the age of this process, interpreter and imports included; needs Linux.

    Some container runtimes keep no true start time: it is never taken to be before the launcher's.
    """
    # Field 22 of /proc/self/stat, counted after the name, which may hold spaces: start in ticks since boot.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    if LAUNCHED_VARIABLE not in variables:
        return age
    launched = time.time() - float(variables[LAUNCHED_VARIABLE])
    return min(age, launched) if age > 0 else launched
