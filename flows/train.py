"""The Prefect flow `train-drafter`: a sealed data set to an exported and evaluated drafter.

The ranks are processes that know nothing of Prefect (`flows.train_worker`); the steps are those of
`flows.train_steps`. A run continues from the latest checkpoint that it finds.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from dflash_core.drafter import DrafterConfig
from flows import report, train_steps
from flows.artifacts import shown
from flows.config import TrainConfig
from flows.launch import Message
from flows.run_log import TOLD, relay_logs, relay_message, tell_error, value, without_traceback
from flows.train_steps import TrainingLog
from storage.dataset import Dataset

PROGRESS_EVERY_S = 5.0
CURVES_EVERY_S = 120.0
CURVES_GROWTH = 0.02
"""Share of a run's time that passes before its curves are drawn again, so some 300 times in a week: each
drawing is a version of an artifact of its own.
"""


@task(name="check-data-set", cache_policy=NO_CACHE, persist_result=False)
def check_dataset(config: TrainConfig) -> tuple[Dataset, DrafterConfig]:
    """Open the sealed data set, and see that target and drafter fit it."""
    return without_traceback(lambda: train_steps.open_training_data(config))


@task(name="train-on-ranks", cache_policy=NO_CACHE, persist_result=False)
def train_on_ranks(
    config: TrainConfig, dataset: Dataset, drafter: DrafterConfig, folder: Path, result: TrainingLog
) -> None:
    """Run the ranks to the end of training; their words and numbers go to the log of this task."""
    logger = get_run_logger()
    progress = shown(report.start_progress, "training-progress", "optimizer steps")
    began = drawn = time.monotonic()
    told = 0.0
    cache: dict[str, Any] | None = None

    def show_cache() -> None:
        nonlocal cache
        if result.cache != cache:
            cache = result.cache
            shown(report.publish_cache, cache)

    def follow(message: Message) -> None:
        nonlocal told, drawn
        relay_message(message)
        if message["kind"] == "compile_report":
            show_cache()
        if message["kind"] == "metrics":
            logger.info("%s", report.metrics_line(message))
            now = time.monotonic()
            if progress is not None and (now - told > PROGRESS_EVERY_S or result.fraction == 1.0):
                told = now
                shown(report.update_progress, progress, result.fraction)
            if now - drawn > curves_interval(now - began):
                drawn = now
                shown(report.publish_curves, train_steps.plot_curves(folder))

    try:
        return without_traceback(lambda: train_steps.train(config, dataset, drafter, folder, result, follow))
    finally:
        shown(report.publish_curves, train_steps.plot_curves(folder))
        show_cache()


def curves_interval(elapsed_s: float) -> float:
    """Return how many seconds curves stand after which a run of this age draws them again."""
    return max(CURVES_EVERY_S, CURVES_GROWTH * elapsed_s)


@task(name="overfit-one-sample", cache_policy=NO_CACHE, persist_result=False)
def overfit_one_sample(
    config: TrainConfig, dataset: Dataset, drafter: DrafterConfig, result: TrainingLog
) -> float:
    """Pass the overfit gate before time goes into training."""
    try:
        return without_traceback(
            lambda: train_steps.overfit_one_sample(config, dataset, drafter, relay_message, result)
        )
    finally:
        shown(report.publish_gate_cache, result.cache)


@task(name="evaluate-drafter", cache_policy=NO_CACHE, persist_result=False)
def evaluate_drafter(config: TrainConfig, dataset: Dataset, folder: Path, result: TrainingLog) -> None:
    """Decode speculatively with the exported drafter."""
    return without_traceback(lambda: train_steps.evaluate(config, dataset, folder, result, relay_message))


@flow(name="train-drafter", persist_result=False)
def train_drafter(config: TrainConfig, dataset: str | None = None) -> State[Any]:
    """Train a drafter from a sealed data set, export it, and measure how many tokens a target call it earns.

    Args:
        config: Which drafter to train, from what, how, and where to put it.
        dataset: Takes the place of the configuration's data set, e.g. the one that an extraction has sealed.
    """
    if dataset:
        config = config.model_copy(update={"dataset": dataset})
    try:
        with relay_logs(), train_steps.output_folder(config) as folder:
            return _train(config, folder)
    except TOLD as error:
        tell_error(error)
        return Failed(message=str(error), data=error)


def _train(config: TrainConfig, folder: Path) -> State[Any]:
    data, drafter = value(check_dataset(config))
    result = TrainingLog()
    if config.overfit is not None:
        result.gate_cache = _overfit(config, data, drafter)
    value(train_on_ranks(config, data, drafter, folder, result))
    try:
        if config.evaluation is not None:
            value(evaluate_drafter(config, data, folder, result))
    finally:
        summary = train_steps.write_report(config, data, result, folder)
        shown(report.publish_training, config, summary, result, folder)
    exported = f"{config.output}/{train_steps.DRAFTER_FOLDER}"
    return Completed(message=f"the drafter is in {exported}", data=summary)


def _overfit(config: TrainConfig, data: Dataset, drafter: DrafterConfig) -> dict[str, Any] | None:
    """Pass the gate, unless the run has begun, and return what its compile cache did. (Ranks refuse a
    checkpoint of another configuration.)
    """
    begun = train_steps.begun_at(config)
    if begun is not None:
        get_run_logger().info("overfit gate skipped: there is a checkpoint of step %d already", begun)
        return None
    gate = TrainingLog()
    length = value(overfit_one_sample(config, data, drafter, gate))
    get_run_logger().info("overfit gate passed: %.2f of %d slots", length, drafter.block_size)
    return gate.cache
