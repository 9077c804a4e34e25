"""The steps of a training run in plain Python: check the data set, run the ranks, evaluate, report.

`flows.train` runs the same steps as a Prefect flow; nothing here needs Prefect.
"""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dflash_core.chat import ChatConfig
from dflash_core.compile_graphs import training_graphs
from dflash_core.configuration import UserError
from dflash_core.distributed import World
from dflash_core.drafter import DrafterConfig
from dflash_core.export import check_shape
from dflash_core.export_check import check_drafter
from dflash_core.loss import slot_weights
from dflash_core.records import TargetSpec
from dflash_core.target_identity import other_form_hint, target_spec
from dflash_core.target_weights import find_embedding_and_head
from flows.acceptance_report import check_gates, without_nan
from flows.config import TrainConfig, dump_config
from flows.devices import hold_devices
from flows.evaluate import EvaluateConfig
from flows.extract_steps import worker_slots
from flows.launch import Message, OnMessage, WorkerPool, python_module
from flows.machine import made_folder
from flows.plots import plot_speed, plot_training
from flows.ranks import RanksFailed, rank_environment, run_ranks
from flows.train_data import TrainingData
from flows.train_log import METRICS_FILE, WANDB_FILE
from storage.chats import read_chats
from storage.checkpoints import Checkpoints
from storage.compile_session import CompileSession, open_compile_store
from storage.dataset import Dataset, open_dataset
from storage.dataset_spec import software_versions
from storage.objects import ObjectNotFound, Store, StoreError, open_store

log = logging.getLogger(__name__)

METRICS_KEPT_EVERY = 10
"""Checkpoints between two uploads of the metrics, which are sent whole: 136 MB after a week."""
ROWS_REMEMBERED = 1000
DRAFTER_FOLDER = "drafter"
"""Folder of the exported drafter below the run's output."""


def open_training_data(config: TrainConfig) -> tuple[Dataset, DrafterConfig]:
    """Open the sealed data set and derive the drafter from it.

    Raises UserError when the data set is not complete, was captured from another target than the one that is
    to lend its embedding and head, does not fit the drafter, makes one that a serving engine cannot run, or
    cannot be trained on as configured.
    """
    for family, source in (config.evaluation.prompts if config.evaluation else {}).items():
        if next(iter(read_chats(source)), None) is None:
            raise UserError(f"evaluation.prompts: {family!r} names {source}, which holds no chats")
    dataset = open_dataset(config.dataset)
    dataset.manifest()
    spec = dataset.spec
    here = target_spec(config.target, config.revision, None)
    if wrong := _other_target(spec.target, here):
        raise UserError(
            f"{dataset.uri} was captured from another target than {config.target}: "
            + "; ".join(wrong)
            + other_form_hint(spec.target, here)
        )
    drafter = config.drafter.for_target(spec.target, spec.capture)
    check_drafter(drafter, spec.target)
    _check_training(config, dataset, drafter)
    return dataset, drafter


def _check_training(config: TrainConfig, dataset: Dataset, drafter: DrafterConfig) -> None:
    """Raise here what every rank would raise after its start."""
    training = config.training
    TrainingData(dataset, drafter, training, World(rank=0, size=1, device=torch.device("cpu")))
    slot_weights(training.loss, drafter.block_size)
    if training.init_from is not None and begun_at(config) is None:
        check_shape(Path(training.init_from), drafter)


def _other_target(captured: TargetSpec, here: TargetSpec) -> list[str]:
    """Name what differs between two targets; names and mask tokens are free."""
    left, right = captured.model_dump(), here.model_dump()
    return [
        f"{name} is {right[name]!r}, and was {left[name]!r}"
        for name in left
        if name not in ("name", "mask_token_id") and left[name] != right[name]
    ]


@dataclass
class TrainingLog:
    """What the ranks told of a run, and what was measured at its end."""

    metrics: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=ROWS_REMEMBERED))
    """The latest rows, one for each optimizer step that was read, with its "step"; validation has keys of its
    own. All of them: `read_metrics`.
    """
    stopped_at: int | None = None
    """Optimizer step at which the ranks ended early because somebody asked them to."""
    cache: dict[str, Any] | None = None
    """Summary of the compile cache, there once all ranks have taken their first step or the run has ended."""
    gate_cache: dict[str, Any] | None = None
    """That of the overfit gate, which starts first and leaves what it compiled to the run proper."""
    acceptance: dict[str, Any] | None = None
    """Report of the evaluation."""
    missed_gate: str | None = None
    """Why the drafter is not good enough, when a gate of the evaluation was missed."""

    @property
    def fraction(self) -> float:
        """Share of the optimizer steps that are done."""
        done = next((row for row in reversed(self.metrics) if row.get("total_steps")), None)
        return done["step"] / done["total_steps"] if done else 0.0

    def on_message(self, message: Message) -> None:
        """Take a message of a rank."""
        if message["kind"] == "metrics":
            self.metrics.append({name: value for name, value in message.items() if name != "kind"})
        elif message["kind"] == "finished" and message["stopped"]:
            self.stopped_at = message["optimizer_step"]


def train(
    config: TrainConfig,
    dataset: Dataset,
    drafter: DrafterConfig,
    folder: Path,
    result: TrainingLog,
    on_message: OnMessage,
) -> None:
    """Run the ranks until training is finished and the drafter exported into `folder`; fill `result`.

    Continues from the latest checkpoint in `config.output`. Raises UserError or RanksFailed.
    """
    gpus = tuple(slot for slot in worker_slots(config.gpus) if slot != "cpu")
    ranks = len(gpus) or config.cpu_ranks
    run = {
        "config": config.model_dump(mode="json"),
        "drafter": drafter.model_dump(mode="json"),
        "dataset": dataset.uri,
        "export": str(folder / DRAFTER_FOLDER),
        "borrowed": find_embedding_and_head(config.target, config.revision).model_dump(mode="json"),
    }
    file = folder / "run.json"
    file.write_text(json.dumps(run))
    checkpoints = itertools.count()
    with hold_devices(gpus), _compile_session(config, dataset, drafter, gpus, ranks) as session:

        def follow(message: Message) -> None:
            if session is not None and message["kind"] == "compile_report":
                session.on_message(message)
                if session.settled:
                    result.cache = session.summary()
            result.on_message(message)
            if message["kind"] == "checkpoint" and next(checkpoints) % METRICS_KEPT_EVERY == 0:
                _keep_metrics(config, folder)
            on_message(message)

        try:
            run_ranks(
                "flows.train_worker",
                [str(file)],
                ranks=ranks,
                gpus=gpus,
                environment=session.environment if session is not None else None,
                silence_timeout_s=config.silence_timeout_s,
                shutdown_s=config.stop_timeout_s,
                on_message=follow,
            )
        finally:
            result.cache = session.summary() if session is not None else None
    if result.stopped_at is not None:
        raise RanksFailed(
            f"stopped on request after optimizer step {result.stopped_at}; run again to continue"
        )


def begun_at(config: TrainConfig) -> int | None:
    """Return the optimizer step of the latest checkpoint in `config.output`; None when there is none yet."""
    steps = Checkpoints(open_store(config.output, config.connection), {}, keep=1).steps()
    return steps[-1] if steps else None


def overfit_one_sample(
    config: TrainConfig,
    dataset: Dataset,
    drafter: DrafterConfig,
    on_message: OnMessage,
    result: TrainingLog | None = None,
) -> float:
    """Train on one sample alone and return the acceptance length over its whole blocks (block_size: all).

    Nothing of it is kept but what it compiled; `result` is filled as by `train`. Raises UserError when whole
    blocks are not accepted in the end.
    """
    gate = config.overfit
    assert gate is not None
    rate = config.training.optimizer.model_copy(update={"learning_rate": gate.learning_rate})
    alone = {
        "only_samples": 1,
        "epochs": gate.max_steps,
        "max_steps": gate.max_steps,
        "rows_per_step": 1,
        "validation_fraction": 0.0,
        "checkpoint_every": gate.max_steps,
        "init_from": None,
        "optimizer": rate,
    }
    result = result or TrainingLog()
    with tempfile.TemporaryDirectory(prefix="dflash-overfit-") as scratch:
        update = {"output": scratch, "training": config.training.model_copy(update=alone)}
        train(config.model_copy(update=update), dataset, drafter, Path(scratch), result, on_message)
    lengths = [row["acceptance_length_whole"] for row in result.metrics if row.get("acceptance_length_whole")]
    if not lengths:
        raise UserError(
            f"overfit gate: no sample of {dataset.uri} is long enough for a whole block of "
            f"{drafter.block_size} slots"
        )
    if lengths[-1] < gate.least_share * drafter.block_size:
        raise UserError(
            f"overfit gate: after {gate.max_steps} steps on one sample {lengths[-1]:.2f} of "
            f"{drafter.block_size} slots are accepted. Either it needs more steps (overfit.max_steps) or "
            "another rate, or taps and labels do not belong together: check target, layers and template"
        )
    return float(lengths[-1])


@contextmanager
def _compile_session(
    config: TrainConfig, dataset: Dataset, drafter: DrafterConfig, gpus: tuple[str, ...], ranks: int
) -> Iterator[CompileSession | None]:
    if not config.training.compiles_on("cuda" if gpus else "cpu") or config.cache is None:
        yield None
        return
    store = open_compile_store(config.cache, dataset.uri)
    with CompileSession.open(
        store,
        training_graphs(drafter, config.training),
        config.cache,
        ranks=ranks,
        run_name=config.output,
        variables=rank_environment(gpus, ranks),
    ) as session:
        yield session


def evaluate(
    config: TrainConfig, dataset: Dataset, folder: Path, result: TrainingLog, on_message: OnMessage
) -> None:
    """Measure the exported drafter by real decoding, in a process of its own; fill `result.acceptance`.

    Raises UserError, after acceptance.json is written and `result` filled, when a gate is missed.
    """
    step = config.evaluation
    assert step is not None
    chat = {name: dataset.spec.chat[name] for name in ChatConfig.model_fields if name in dataset.spec.chat}
    settings = EvaluateConfig(
        target=config.target,
        revision=config.revision,
        drafter=folder / DRAFTER_FOLDER,
        output=folder,
        chat=ChatConfig.model_validate(chat),
        **step.model_dump(),
    )
    job = {"task": "evaluate", "config": settings.model_dump(mode="json")}
    slots = worker_slots(config.gpus)[:1]
    timeout = config.silence_timeout_s
    pool = WorkerPool(slots, python_module("flows.step_worker"), {}, silence_timeout_s=timeout)
    with hold_devices(slots), pool:
        answer, _ = pool.run(job, on_message)
    report = answer["report"]
    assert isinstance(report, dict)
    result.acceptance = report
    try:
        check_gates(report, settings.minimum_acceptance_length, require_lossless=settings.require_lossless)
    except UserError as error:
        result.missed_gate = str(error)
        raise


def write_report(config: TrainConfig, dataset: Dataset, result: TrainingLog, folder: Path) -> dict[str, Any]:
    """Write report.json, config.yaml and training.png into `folder`; return the report."""
    (folder / "config.yaml").write_text(dump_config(config))
    metrics = read_metrics(folder)
    last: dict[str, Any] = next((row for row in reversed(metrics) if "loss" in row), {})
    report = {
        "dataset": dataset.uri,
        "tokens": dataset.plan.tokens,
        "target": dataset.spec.target.name,
        "drafter": f"{config.output}/{DRAFTER_FOLDER}",
        "last_metrics": last,
        "acceptance": result.acceptance,
        "missed_gate": result.missed_gate,
        "compile_cache": result.cache,
        "compile_cache_of_gate": result.gate_cache,
        "versions": software_versions(),
    }
    (folder / "report.json").write_text(json.dumps(without_nan(report), indent=1) + "\n")
    plot_curves(folder)
    return report


def plot_curves(folder: Path) -> list[Path]:
    """Draw what the metrics in `folder` hold so far; empty when there are none."""
    metrics = read_metrics(folder)
    if not metrics:
        return []
    return [
        plot_training(metrics, folder / "training.png"),
        plot_speed(metrics, folder / "speed.png"),
    ]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return all metrics of a run, those from before an interruption included."""
    path = folder / METRICS_FILE
    if not path.exists():
        return []
    with path.open() as file:
        return [json.loads(line) for line in file if line.endswith("}\n")]  # the last may be half written


@contextmanager
def output_folder(config: TrainConfig) -> Iterator[Path]:
    """Give a local folder whose files are below `config.output` once the block has ended, however."""
    store = open_store(config.output)
    if (folder := _local_folder(store)) is not None:
        yield made_folder(folder)
        return
    folder = Path(tempfile.mkdtemp(prefix="dflash-training-"))
    try:
        for name in (METRICS_FILE, WANDB_FILE):
            with suppress(ObjectNotFound):
                (folder / name).write_bytes(store.get(name))
        yield folder
    finally:
        try:
            _upload(store, folder)
        except StoreError as error:
            log.error("%s; what this run wrote is in %s: run again, or copy it there by hand", error, folder)
            raise
        shutil.rmtree(folder)


def _local_folder(store: Store) -> Path | None:
    return Path(store.uri.removeprefix("file://")) if store.uri.startswith("file://") else None


def _keep_metrics(config: TrainConfig, folder: Path) -> None:
    """Put the metrics beside the checkpoints now: a run that is killed may have no later chance."""
    store = open_store(config.output)
    if _local_folder(store) is not None:
        return
    try:
        store.put_file(METRICS_FILE, folder / METRICS_FILE, overwrite=True)
    except StoreError as error:
        log.warning("%s; the metrics will be put there with a later checkpoint", error)


def _upload(store: Store, folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.put_file(path.relative_to(folder).as_posix(), path, overwrite=True)
