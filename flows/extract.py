"""The Prefect flow `extract-hidden-states`: chats to a sealed data set, one task a shard.

The work is done by processes that know nothing of Prefect (`flows.extract_worker`); the steps are those of
`flows.extract_steps`. What is done already is read off the store, never off Prefect: running the same
configuration again, or retrying a run, does only what is missing.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.events import emit_event
from prefect.futures import PrefectFuture
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.tasks import Task

from dflash_core.configuration import UserError
from flows import extract_steps, report
from flows.config import ExtractConfig
from flows.extract_steps import Outcome, ShardRunner
from flows.launch import Message, PoolClosed
from flows.run_log import relay_message, value, without_traceback
from storage.dataset import Dataset, Manifest

MOST_SHARDS_AT_ONCE = 256
"""Threads of the task runner; the number of shards in work is that of the workers, not this."""
PROGRESS_EVERY_S = 2.0


def worth_another_try(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Say whether a failed shard may be tried again: always, unless there is no worker left."""
    return not isinstance(state.data, PoolClosed)


@task(
    name="extract-shard",
    task_run_name="shard-{shard:05d}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retry_delay_seconds=[1, 5, 20],
    retry_jitter_factor=0.5,
    retry_condition_fn=worth_another_try,
)
def extract_shard(shard: int, runner: ShardRunner) -> Message:
    """Have one shard captured by a free worker, whose words go to the log of this task."""
    logger = get_run_logger()
    result = runner.attempt(shard, relay_message)
    row = extract_steps.shard_row(shard, result)
    logger.info("%s", ", ".join(f"{name} {value}" for name, value in row.items() if value != ""))
    return result


@task(name="plan-data-set", cache_policy=NO_CACHE, persist_result=False)
def plan_dataset(config: ExtractConfig) -> Dataset:
    """Turn chats into tokens and cut them into shards, or open the plan that is there."""
    return without_traceback(lambda: extract_steps.plan_dataset(config))


@task(name="write-responses", cache_policy=NO_CACHE, persist_result=False)
def write_responses(config: ExtractConfig) -> None:
    """Have the target answer the chats."""
    return without_traceback(lambda: extract_steps.write_responses(config, relay_message))


@task(name="check-target", cache_policy=NO_CACHE, persist_result=False)
def check_target(runner: ShardRunner) -> None:
    """Start the first worker: parity gate and channel scales."""
    return without_traceback(lambda: runner.prepare(relay_message))


@task(name="seal-data-set", cache_policy=NO_CACHE, persist_result=False)
def seal_dataset(dataset: Dataset) -> Manifest:
    """Check that nothing is missing, and make the data set visible to training."""
    return without_traceback(lambda: extract_steps.finish_dataset(dataset))


@flow(
    name="extract-hidden-states",
    flow_run_name="extract-{config.name}",
    task_runner=ThreadPoolTaskRunner(max_workers=MOST_SHARDS_AT_ONCE),  # type: ignore[arg-type]
    persist_result=False,
)
def extract_hidden_states(
    config: ExtractConfig, only: list[int] | None = None, store: str | None = None
) -> State[Any]:
    """Turn chats into a sealed data set of the target's hidden states.

    Args:
        config: What to extract from which chats, and where to put it.
        only: Numbers of shards to capture once more, replacing what is there; empty: those that are missing.
        store: Takes the place of the configuration's store: a folder, or s3://bucket/prefix.
    """
    if store:
        config = config.model_copy(update={"store": store})
    logger = get_run_logger()
    try:
        dataset, outcome = _extract(config, only or [])
    except (UserError, PoolClosed) as error:
        logger.error("%s", error)
        return Failed(message=str(error), data=error)
    report.publish_dataset(dataset)
    if outcome.failed:
        command = extract_steps.redo_command(sorted(outcome.failed))
        report.publish_failures(outcome, command)
        logger.error("%d shards are set aside; redo just them with\n%s", len(outcome.failed), command)
        names = ", ".join(map(str, sorted(outcome.failed)))
        return Failed(message=f"{len(outcome.failed)} shards failed: {names}; data set {dataset.uri}")
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
    outcome = Outcome()
    shards = extract_steps.wanted_shards(dataset, only)
    planned = len(dataset.plan.shards)
    get_run_logger().info("%d of %d shards are to be captured", len(shards), planned)
    if shards:
        with extract_steps.open_pool(config, dataset) as pool:
            runner = ShardRunner(pool, redo=bool(only))
            value(check_target(runner))
            shard_task = extract_shard.with_options(retries=config.workers.attempts - 1)
            progress = Progress(planned - len(shards), planned)
            _submit_as_workers_free_up(
                lambda shard: shard_task.submit(shard, runner), shards, pool.capacity, outcome, progress
            )
        report.publish_shards(outcome)
    if not outcome.failed:
        value(seal_dataset(dataset))
    return dataset, outcome


class Progress:
    """The progress artifact of the run; it is not told of every shard, but every few seconds."""

    def __init__(self, before: int, planned: int) -> None:
        self._before, self._planned = before, planned
        self._artifact: UUID = report.start_progress("extraction-progress", "shards of the data set")
        self._last = 0.0

    def update(self, outcome: Outcome, *, now: bool = False) -> None:
        """Tell how many shards are there."""
        if now or time.monotonic() - self._last > PROGRESS_EVERY_S:
            self._last = time.monotonic()
            done = self._before + len(outcome.done)
            report.update_progress(self._artifact, done / max(self._planned, 1))


def _submit_as_workers_free_up(
    submit: Callable[[int], PrefectFuture[Message]],
    shards: Sequence[int],
    capacity: int,
    outcome: Outcome,
    progress: Progress,
) -> None:
    """Keep as many shards in work as the workers can hold, so that Prefect never has a long queue to show."""
    waiting = deque(shards)
    running: dict[UUID, int] = {}
    finished: queue.SimpleQueue[PrefectFuture[Message]] = queue.SimpleQueue()
    while waiting or running:
        while waiting and len(running) < capacity:
            shard = waiting.popleft()
            future = submit(shard)
            running[future.task_run_id] = shard
            future.add_done_callback(finished.put)
        future = finished.get()
        shard = running.pop(future.task_run_id)
        result = future.result(raise_on_failure=False)
        if isinstance(result, dict):
            outcome.done[shard] = result
        else:
            outcome.failed[shard] = str(result)
            get_run_logger().error("shard %d is set aside: %s", shard, result)
        progress.update(outcome, now=not running)
