"""Shards as Prefect tasks on the workers of a host; the flow `extract-shards` does some of a large plan."""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.tasks import Task

from dflash_core.configuration import UserError
from flows import extract_steps, report
from flows.artifacts import TABLE_EVERY_S, Row, Table, shown
from flows.config import ExtractConfig
from flows.extract_steps import Outcome, ShardRunner
from flows.launch import Message, PoolClosed, WorkerPool
from flows.run_log import TOLD, relay_logs, relay_message, value, without_traceback
from storage.dataset import Dataset, open_dataset

MOST_SHARDS_AT_ONCE = 256
"""Threads of the task runner; the number of shards in work is that of the workers, not this."""
LASTING_AFTER = 2
"""A run ends when so many times as many shards as the workers can hold were set aside in a row."""
PROGRESS_EVERY_S = 2.0
ERROR_SHOWN = 2000
"""Characters of a shard's error in the table of shards."""
SHARDS_TABLE = "shards"
SHARD_COLUMNS = (
    *("shard", "state", "worker", "tokens", "seconds", "tokens/s"),
    *("token_budget", "MB", "ratio", "error"),
)
CHILD_DEPLOYMENT = "extract-shards/extract-shards"
TASK_RUNNER: Any = ThreadPoolTaskRunner(max_workers=MOST_SHARDS_AT_ONCE)

_held: ContextVar[WorkerPool | None] = ContextVar("workers of the run in this process", default=None)
_watching: ContextVar[Callable[[Outcome], None] | None] = ContextVar("parent in this process", default=None)


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
    row = done_row(shard, result)
    logger.info("%s", ", ".join(f"{name} {value}" for name, value in row.items() if value != ""))
    return result


@task(name="check-target", cache_policy=NO_CACHE, persist_result=False)
def check_target(runner: ShardRunner, shards: int) -> None:
    """Start the workers: parity gate and channel scales."""
    return without_traceback(lambda: runner.prepare(relay_message, shards))


def capture_here(config: ExtractConfig, dataset: Dataset, shards: Sequence[int], *, redo: bool) -> Outcome:
    """Capture these shards on the workers of this host, one task each."""
    outcome = Outcome()
    if not shards:
        return outcome
    with held_workers(config, dataset) as pool:
        runner = ShardRunner(pool, redo=redo)
        value(check_target(runner, len(shards)))
        shard_task = extract_shard.with_options(retries=config.workers.attempts - 1)
        with ShownOutcome(outcome, len(shards)) as shown_outcome:
            _submit_as_workers_free_up(
                lambda shard: shard_task.submit(shard, runner), shards, pool.capacity, shown_outcome
            )
    return outcome


@contextlib.contextmanager
def held_workers(config: ExtractConfig, dataset: Dataset) -> Iterator[WorkerPool]:
    """Give the workers that the parent run holds in this process, else some of our own."""
    if (pool := _held.get()) is not None:
        yield pool
        return
    with extract_steps.open_pool(config, dataset) as pool:
        token = _held.set(pool)
        try:
            yield pool
        finally:
            _held.reset(token)
    shown(report.publish_cache, pool.cache)


def failed_names(outcome: Outcome) -> str:
    """Say which shards failed, in a few words."""
    names = ", ".join(map(str, sorted(outcome.failed)[:20]))
    more = ", ..." if len(outcome.failed) > 20 else ""
    return f"{len(outcome.failed)} shards failed: {names}{more}"


class Progress:
    """The progress artifact of a run; it is not told of every shard, but every few seconds."""

    def __init__(self, description: str, total: int) -> None:
        self._total = total
        self._artifact = shown(report.start_progress, "extraction-progress", description)
        self._last = 0.0

    def update(self, done: int, *, now: bool = False) -> None:
        """Tell how many are done."""
        due = now or time.monotonic() - self._last > PROGRESS_EVERY_S
        if due and self._artifact is not None:
            self._last = time.monotonic()
            shown(report.update_progress, self._artifact, done / max(self._total, 1))


class ShownOutcome:
    """Keeps the outcome of a run and shows it while it grows: progress, and a row for each finished shard."""

    def __init__(self, outcome: Outcome, total: int) -> None:
        self.outcome = outcome
        self._progress = Progress("shards of this run", total)
        self._table = Table(SHARDS_TABLE, "Shards of this run")

    def __enter__(self) -> ShownOutcome:
        return self

    def __exit__(self, *exc: object) -> None:
        self._table.send()

    def done(self, shard: int, result: Message) -> None:
        """Note what a worker tells of a captured shard."""
        self.outcome.done[shard] = result
        self._table.put(shard, done_row(shard, result))

    def failed(self, shard: int, error: str) -> None:
        """Note the last error of a shard that is set aside."""
        self.outcome.failed[shard] = error
        self._table.put(shard, failed_row(shard, error))

    def stop(self, error: UserError, untried: Iterable[int]) -> None:
        """Note that these shards are not tried, and why."""
        rest = list(untried)
        self.outcome.stop(error, rest)
        for shard in rest:
            self._table.put(shard, failed_row(shard, self.outcome.failed[shard]))

    def show(self, *, now: bool = False) -> None:
        """Show what is due."""
        self._progress.update(len(self.outcome.done), now=now)
        if self._table.due:
            self._table.send()
        if (watch := _watching.get()) is not None:
            watch(self.outcome)


def done_row(shard: int, result: Message) -> Row:
    """Return what people want to see of a captured shard."""
    row = {**extract_steps.shard_row(shard, result), "token_budget": result.get("token_budget", "")}
    return {name: row[name] for name in SHARD_COLUMNS}


def failed_row(shard: int, error: str) -> Row:
    """Return the row of a shard that is set aside."""
    return {
        **dict.fromkeys(SHARD_COLUMNS, ""),
        "shard": shard,
        "state": "failed",
        "error": error[:ERROR_SHOWN],
    }


def _submit_as_workers_free_up(
    submit: Callable[[int], PrefectFuture[Message]],
    shards: Sequence[int],
    capacity: int,
    shown_outcome: ShownOutcome,
) -> None:
    """Keep as many shards in work as the workers can hold, so that Prefect never has a long queue to show.

    Where none is captured any more the rest is not tried: a full disk or a revoked key fails every shard.
    """
    waiting = deque(shards)
    failed_in_a_row = 0
    running: dict[UUID, int] = {}
    finished: queue.SimpleQueue[PrefectFuture[Message]] = queue.SimpleQueue()
    while waiting or running:
        while waiting and len(running) < capacity:
            shard = waiting.popleft()
            future = submit(shard)
            running[future.task_run_id] = shard
            future.add_done_callback(finished.put)
        try:
            future = finished.get(timeout=TABLE_EVERY_S)
        except queue.Empty:
            shown_outcome.show()
            continue
        shard = running.pop(future.task_run_id)
        result = future.result(raise_on_failure=False)
        if isinstance(result, dict):
            shown_outcome.done(shard, result)
            failed_in_a_row = 0
        else:
            error = str(result) if isinstance(result, TOLD) else repr(result)
            shown_outcome.failed(shard, error)
            get_run_logger().error("shard %d is set aside: %s", shard, result)
            failed_in_a_row += 1
            if waiting and failed_in_a_row >= LASTING_AFTER * capacity:
                shown_outcome.stop(_lasting(failed_in_a_row, len(waiting), error), waiting)
                waiting.clear()
        shown_outcome.show(now=not running)


def _lasting(failed: int, untried: int, error: str) -> UserError:
    return UserError(
        f"{failed} shards in a row could not be captured, so {untried} others were not tried; mend the cause "
        f"and run again, what is captured stays. The last error:\n{error}"
    )


def child_name(shards: Sequence[int]) -> str:
    """Name a child run by its shards."""
    return f"shards-{shards[0]:05d}-{shards[-1]:05d}"


@flow(
    name="extract-shards",
    flow_run_name=lambda: child_name(flow_run.parameters["shards"]),
    task_runner=TASK_RUNNER,
    persist_result=False,
)
def extract_shards(config: ExtractConfig, dataset: str, shards: list[int], redo: bool = False) -> State[Any]:
    """Capture some shards of a data set that is planned already; part of a large extraction.

    The state that it returns has the `Outcome` for its data, for a parent in the same process.

    Args:
        config: The configuration of the whole extraction.
        dataset: The data set's address.
        shards: Numbers of the shards to capture.
        redo: Replace those that are committed already; otherwise they are passed over.
    """
    try:
        with relay_logs():
            data = open_dataset(dataset)
            wanted = shards if redo else sorted(set(shards) & set(data.missing()))
            outcome = capture_here(config, data, wanted, redo=redo)
    except TOLD as error:
        get_run_logger().error("%s", error)
        return Failed(message=str(error), data=error)
    if outcome.stopped:
        return Failed(message=str(outcome.stopped), data=outcome)
    if outcome.failed:
        return Failed(message=failed_names(outcome), data=outcome)
    return Completed(message=f"{len(shards)} shards", data=outcome)


@contextlib.contextmanager
def watched_by(watch: Callable[[Outcome], None]) -> Iterator[None]:
    """Have `watch` told how the child runs in this block get on, at each shard."""
    token = _watching.set(watch)
    try:
        yield
    finally:
        _watching.reset(token)
