"""The Prefect flow `build-compile-cache`: what training compiles, compiled once and published.

The steps are those of `flows.build_cache`. Running it again proves the version that is there.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows import report
from flows.artifacts import shown
from flows.build_cache import build_for_training
from flows.config import TrainConfig
from flows.run_log import TOLD, relay_logs, relay_message, tell_error, value, without_traceback


@task(name="compile-and-publish", cache_policy=NO_CACHE, persist_result=False)
def compile_and_publish(config: TrainConfig) -> dict[str, Any]:
    """Run one full step on the first GPU, and publish what it compiled."""
    summary = without_traceback(lambda: build_for_training(config, relay_message))
    if isinstance(summary, dict):
        shown(report.publish_cache, summary)
    return summary


@flow(name="build-compile-cache", persist_result=False)
def build_compile_cache(config: TrainConfig, dataset: str | None = None) -> State[Any]:
    """Compile the graphs of a training configuration once, so that every start of training is warm.

    Args:
        config: The configuration of the training run.
        dataset: Takes the place of the configuration's data set; it need not be sealed yet.
    """
    if dataset:
        config = config.model_copy(update={"dataset": dataset})
    try:
        with relay_logs():
            summary = value(compile_and_publish(config))
    except TOLD as error:
        tell_error(error)
        return Failed(message=str(error), data=error)
    if summary["version"] is None:
        return Failed(message=f"built, but not published: {'; '.join(summary['notes'])}")
    return Completed(message=f"compile cache {summary['version']}", data=summary)
