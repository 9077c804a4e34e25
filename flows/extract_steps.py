"""The steps of an extraction in plain Python: responses, shards to workers, and the seal.

`flows.extract` runs the same steps as a Prefect flow; nothing here needs Prefect.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_core.compile_graphs import extraction_graphs
from dflash_core.configuration import UserError
from dflash_core.target_identity import load_text_config
from flows.config import ExtractConfig
from flows.devices import hold_devices
from flows.launch import (
    Message,
    OnMessage,
    Tries,
    WorkerPool,
    ignore,
    python_module,
    visible_gpus,
)
from flows.respond import RespondConfig
from storage.compile_session import CompileSession, open_compile_store
from storage.dataset import Dataset, Manifest

log = logging.getLogger(__name__)

JOBS_PER_WORKER = 2
"""A worker captures one shard while it finishes and uploads the one before."""


def respond_config(config: ExtractConfig) -> RespondConfig:
    """Return what the step that regenerates responses is asked to do."""
    assert config.responses is not None
    step = config.responses
    return RespondConfig(
        inputs=config.chats,
        output=step.output,
        target=None if step.endpoint else config.target.path,
        revision=None if step.endpoint else config.target.revision,
        dtype="float32" if config.target.dtype == "float32" else "bfloat16",
        endpoint=step.endpoint,
        chat=config.chat,
        generation=step.generation,
        batch_size=step.batch_size,
        part_records=step.part_records,
        limit=config.limit,
        max_bad_fraction=config.max_bad_fraction,
    )


def write_responses(config: ExtractConfig, on_message: OnMessage) -> None:
    """Have the target answer the chats, in a process of its own on `response_slots`; resumes by itself."""
    job = {"task": "respond", "config": respond_config(config).model_dump(mode="json")}
    workers = config.workers
    slots = response_slots(config)
    pool = WorkerPool(
        slots,
        python_module("flows.step_worker"),
        {},
        # The job itself loads the target, and only where a part is missing.
        silence_timeout_s=max(workers.start_timeout_s, workers.silence_timeout_s),
    )
    with hold_devices(slots), pool:
        result = pool.run_first(job, on_message)
    log.info("responses: %s", result["sentence"])


def worker_slots(configured: Sequence[str]) -> tuple[str, ...]:
    """Return the slots to use: those configured, else every visible GPU, else the CPU.

    Raises UserError when a slot names a GPU that is not there, or a GPU is named twice.
    """
    import torch

    here = [str(i) for i in range(torch.cuda.device_count())]
    if not configured:
        return tuple(here) or ("cpu",)
    named = [gpu.strip() for slot in configured if slot != "cpu" for gpu in slot.split(",")]
    if absent := [gpu for gpu in named if gpu not in here]:
        raise UserError(
            f"GPU {', '.join(absent)} is named, but torch sees {len(here) or 'no'} GPUs here"
            + (f" (0 to {len(here) - 1})" if here else "; use the slot cpu, or see `dflash doctor`")
        )
    if len(set(named)) < len(named):
        raise UserError(f"a GPU is named twice: {', '.join(configured)}")
    return tuple(configured)


def capture_slots(config: ExtractConfig) -> tuple[str, ...]:
    """Return the slots of an extraction; a target with a device_map has all GPUs where none are named.

    Raises UserError as `worker_slots`, and for a device_map on a slot of one GPU.
    """
    slots = worker_slots(config.workers.slots)
    if config.target.device_map is None:
        return slots
    if not config.workers.slots:
        slots = (",".join(slots),)
    if alone := [slot for slot in slots if slot != "cpu" and "," not in slot]:
        raise UserError(
            f"target.device_map spreads a target over several GPUs, but workers.slots {list(alone)} have one "
            'each: drop device_map, or name groups of GPUs such as "0,1"'
        )
    return slots


def response_slots(config: ExtractConfig) -> tuple[str, ...]:
    """Return the slot on which responses are written; to ask a server takes no GPU.

    Raises UserError as `capture_slots`: the capture that comes next could not begin.
    """
    assert config.responses is not None
    slots = capture_slots(config)
    return ("cpu",) if config.responses.endpoint else slots[:1]


class CaptureWorkers(WorkerPool):
    """The workers that capture a data set, and what they start from."""

    session: CompileSession | None = None
    """The compile cache, where the target is compiled. Its summary is complete when the pool is closed."""

    @property
    def cache(self) -> dict[str, Any] | None:
        """Summary of the compile cache, None where nothing is compiled."""
        return self.session.summary() if self.session else None


@contextlib.contextmanager
def open_pool(config: ExtractConfig, dataset: Dataset) -> Iterator[CaptureWorkers]:
    """Give the pool of workers that capture this data set, none started yet; their GPUs are held."""
    workers = config.workers
    slots = capture_slots(config)
    setup = {
        "target": config.target.model_dump(mode="json"),
        "dataset": dataset.uri,
        "parity_samples": config.parity_samples,
        "scratch": workers.scratch,
        "writer": workers.writer.model_dump(mode="json"),
        "connection": workers.connection.model_dump(mode="json"),
    }
    with hold_devices(slots), _compile_session(config, dataset, slots) as session:
        pool = CaptureWorkers(
            slots,
            python_module("flows.extract_worker"),
            setup,
            depth=JOBS_PER_WORKER,
            start_timeout_s=workers.start_timeout_s,
            silence_timeout_s=workers.silence_timeout_s,
            environment=session.environment if session else None,
            listen=session.on_message if session else ignore,
        )
        pool.session = session
        with pool:
            yield pool
        if session:
            session.publish_rest()


@contextlib.contextmanager
def _compile_session(
    config: ExtractConfig, dataset: Dataset, slots: Sequence[str]
) -> Iterator[CompileSession | None]:
    """Open the compile cache of the target; it is published when a worker has captured its first shard."""
    compiles = config.target.compile_layers
    if config.cache is None or not (slots[0] != "cpu" if compiles is None else compiles):
        yield None
        return
    store = open_compile_store(config.cache, dataset.uri)
    _, text = load_text_config(config.target.path, config.target.revision)
    graphs = extraction_graphs(config.target, json.loads(text.to_json_string(use_diff=False)))
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(visible_gpus(slots[0]))}
    with CompileSession.open(
        store, graphs, config.cache, run_name=f"extract-{dataset.name}", variables=visible
    ) as session:
        yield session


def wanted_shards(dataset: Dataset, only: Sequence[int] = ()) -> list[int]:
    """Return the shards to do: the missing ones, or those named. Raises UserError for an unknown one."""
    if not only:
        return dataset.missing()
    planned = len(dataset.plan.shards)
    if unknown := sorted(shard for shard in only if not 0 <= shard < planned):
        raise UserError(f"no such shards: {unknown}; the plan of {dataset.uri} has 0 to {planned - 1}")
    return sorted(set(only))


class ShardRunner:
    """Has shards captured; remembers the tries of each, so that the next goes elsewhere."""

    def __init__(self, pool: WorkerPool, *, redo: bool) -> None:
        """`redo`: capture shards that are committed already once more, and replace them."""
        self._pool = pool
        self._redo = redo
        self._tries: defaultdict[int, Tries] = defaultdict(Tries)

    def prepare(self, on_message: OnMessage, shards: int = 1) -> None:
        """Start the workers that so many shards need, and publish the codec's scales.

        Each worker proves that it captures the target rightly before it takes a job. Raises UserError when
        the target, the data set or the store cannot be used; JobError when no worker can do it.
        """
        self._pool.warm(shards, on_message)
        self._pool.run_first({"task": "scales"}, on_message)

    def attempt(self, shard: int, on_message: OnMessage) -> Message:
        """Capture one shard and return what the worker tells of it, with its name as "worker".

        Raises JobError or UserError when this try failed, PoolClosed when no other can succeed.
        """
        job = {"task": "shard", "shard": shard, "replace": self._redo}
        result, worker = self._pool.run(job, on_message, self._tries[shard])
        return {**result, "worker": worker.name}


@dataclass
class Outcome:
    """How the shards of a run ended."""

    done: dict[int, Message] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    """Shard -> its last error."""
    left: list[int] = field(default_factory=list)
    """Shards that this run was not asked for and that are missing."""
    stopped: UserError | None = None
    """Why the run was ended before each of its shards was tried, if it was."""

    def stop(self, error: UserError, untried: Iterable[int]) -> None:
        """Set these shards aside as well: what failed the others would fail them."""
        self.stopped = error
        self.failed.update(dict.fromkeys(untried, "not tried"))


def shard_row(shard: int, result: Message) -> dict[str, Any]:
    """Return what people want to see of a finished shard."""
    return {
        "shard": shard,
        "state": "found" if result["found"] else "done",
        "worker": result["worker"],
        "tokens": result["tokens"],
        "seconds": round(result["seconds"], 2),
        "tokens/s": round(result["tokens"] / max(result["seconds"], 1e-9)),
        "MB": round(result["bytes"] / 1e6, 3),
        "ratio": round(result["raw_bytes"] / max(result["bytes"], 1), 2),
        "error": "",
    }


def finish_dataset(dataset: Dataset) -> Manifest:
    """Check that every planned shard is committed, and seal the data set."""
    manifest = dataset.seal()
    worst = max(manifest.relative_error.values(), default=0.0)
    log.info("sealed %s: %d bytes, relative error at most %.3g", dataset.uri, manifest.bytes, worst)
    return manifest


def seal_if_whole(dataset: Dataset, outcome: Outcome, only: Sequence[int], seal: Callable[[], Any]) -> None:
    """Call `seal` unless shards failed, or others than those in `only` are missing (`outcome.left`)."""
    if outcome.failed:
        return
    outcome.left = dataset.missing() if only else []
    if not outcome.left:
        seal()


def redo_command(shards: Sequence[int] = ()) -> str:
    """Return the words that redo just these shards; none: whatever is missing."""
    names = ",".join(map(str, shards))
    flag, parameter = (f" --only {names}", f" --param 'only=[{names}]'") if shards else ("", "")
    return (
        f"dflash extract --config FILE{flag}\n"
        f"prefect deployment run extract-hidden-states/extract-hidden-states{parameter}"
    )
