"""The Prefect flow `extract-hidden-states`: chats to a sealed data set, one task a shard.

The work is done by processes that know nothing of Prefect (`flows.extract_worker`); the steps are those of
`flows.extract_steps`. What is done already is read off the store, never off Prefect: running the same
configuration again, or retrying a run, does only what is missing. (Only which shards a retried run has redone
itself no store can tell.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.states import Completed, Failed

from flows import extract_plan, extract_steps, report
from flows.artifacts import shown
from flows.config import ExtractConfig
from flows.extract_children import capture, redone_by_this_run
from flows.extract_shards import TASK_RUNNER, failed_names
from flows.extract_steps import Outcome
from flows.run_log import TOLD, relay_logs, relay_message, tell_error, value, without_traceback
from storage.dataset import Dataset, Manifest


@task(name="plan-data-set", cache_policy=NO_CACHE, persist_result=False)
def plan_dataset(config: ExtractConfig) -> Dataset:
    """Turn chats into tokens and cut them into shards, or open the plan that is there."""
    return without_traceback(lambda: extract_plan.plan_dataset(config))


@task(name="write-responses", cache_policy=NO_CACHE, persist_result=False)
def write_responses(config: ExtractConfig) -> None:
    """Have the target answer the chats."""
    return without_traceback(lambda: extract_steps.write_responses(config, relay_message))


@task(name="seal-data-set", cache_policy=NO_CACHE, persist_result=False)
def seal_dataset(dataset: Dataset) -> Manifest:
    """Check that nothing is missing, and make the data set visible to training."""
    return without_traceback(lambda: extract_steps.finish_dataset(dataset))


@flow(
    name="extract-hidden-states",
    flow_run_name="extract-{config.name}",
    task_runner=TASK_RUNNER,
    persist_result=False,
)
def extract_hidden_states(
    config: ExtractConfig, only: list[int] | None = None, store: str | None = None
) -> State[Any]:
    """Turn chats into a sealed data set of the target's hidden states.

    Args:
        config: What to extract from which chats, and where to put it.
        only: Numbers of shards to capture once more, replacing what is there; empty: those that are missing.
            The data set is sealed when no other is missing.
        store: Takes the place of the configuration's store: a folder, or s3://bucket/prefix.
    """
    if store:
        config = config.model_copy(update={"store": store})
    logger = get_run_logger()
    try:
        with relay_logs():
            dataset, outcome = _extract(config, only or [])
    except TOLD as error:
        tell_error(error)
        return Failed(message=str(error), data=error)
    shown(report.publish_dataset, dataset)
    if outcome.failed:
        named = sorted(outcome.failed) if only or not outcome.stopped else ()
        command = extract_steps.redo_command(named)
        shown(report.publish_failures, outcome, command)
        logger.error("%d shards are set aside; redo just them with\n%s", len(outcome.failed), command)
        if outcome.stopped:
            tell_error(outcome.stopped)
            return Failed(message=str(outcome.stopped), data=outcome.stopped)
        return Failed(message=f"{failed_names(outcome)}; data set {dataset.uri}")
    if outcome.left:
        words = f"the shards asked for are done; {len(outcome.left)} others of {dataset.uri} are missing"
        logger.warning("%s: it is not sealed yet; capture them with\n%s", words, extract_steps.redo_command())
        return Completed(message=words, data=dataset.uri)
    emit_event(
        "dflash.data-set.sealed",
        resource={"prefect.resource.id": f"dflash.data-set.{dataset.fingerprint[:12]}"},
        payload={"uri": dataset.uri, "name": config.name},
    )
    return Completed(message=f"sealed {dataset.uri}", data=dataset.uri)


def _extract(config: ExtractConfig, only: Sequence[int]) -> tuple[Dataset, Outcome]:
    if config.responses:
        value(write_responses(config))
    dataset = value(plan_dataset(config))
    shards = extract_steps.wanted_shards(dataset, only)
    get_run_logger().info("%d of %d shards are to be captured", len(shards), len(dataset.plan.shards))
    if only and (redone := redone_by_this_run() - set(dataset.missing())):
        shards = [shard for shard in shards if shard not in redone]
        get_run_logger().info("%d of them are not: an earlier attempt of this run did them", len(redone))
    outcome = capture(config, dataset, shards, redo=bool(only))
    extract_steps.seal_if_whole(dataset, outcome, only, lambda: value(seal_dataset(dataset)))
    return dataset, outcome
