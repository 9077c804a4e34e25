"""Shards as Prefect tasks on the workers of a host, and large plans as child runs of some hundreds each."""

from __future__ import annotations

import contextlib
import itertools
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any
from uuid import UUID

import httpx
from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, TaskRun
from prefect.deployments import run_deployment
from prefect.exceptions import PrefectException
from prefect.futures import PrefectFuture
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelling, Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.tasks import Task

from dflash_core.configuration import UserError
from flows import extract_steps, report
from flows.artifacts import shown
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
CHILDREN_EVERY_S = 2.0
CHILD_DEPLOYMENT = "extract-shards/extract-shards"
TASK_RUNNER: Any = ThreadPoolTaskRunner(max_workers=MOST_SHARDS_AT_ONCE)

_held: ContextVar[WorkerPool | None] = ContextVar("workers of the run in this process", default=None)


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


@task(name="check-target", cache_policy=NO_CACHE, persist_result=False)
def check_target(runner: ShardRunner, shards: int) -> None:
    """Start the workers: parity gate and channel scales."""
    return without_traceback(lambda: runner.prepare(relay_message, shards))


def capture_here(config: ExtractConfig, dataset: Dataset, shards: Sequence[int], *, redo: bool) -> Outcome:
    """Capture these shards on the workers of this host, one task each."""
    outcome = Outcome()
    if not shards:
        return outcome
    with _workers(config, dataset) as pool:
        runner = ShardRunner(pool, redo=redo)
        value(check_target(runner, len(shards)))
        shard_task = extract_shard.with_options(retries=config.workers.attempts - 1)
        _submit_as_workers_free_up(
            lambda shard: shard_task.submit(shard, runner),
            shards,
            pool.capacity,
            outcome,
            Progress("shards of this run", len(shards)),
        )
    shown(report.publish_shards, outcome)
    return outcome


@contextlib.contextmanager
def _workers(config: ExtractConfig, dataset: Dataset) -> Iterator[WorkerPool]:
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


def _submit_as_workers_free_up(
    submit: Callable[[int], PrefectFuture[Message]],
    shards: Sequence[int],
    capacity: int,
    outcome: Outcome,
    progress: Progress,
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
        future = finished.get()
        shard = running.pop(future.task_run_id)
        result = future.result(raise_on_failure=False)
        if isinstance(result, dict):
            outcome.done[shard] = result
            failed_in_a_row = 0
        else:
            outcome.failed[shard] = str(result) if isinstance(result, TOLD) else repr(result)
            get_run_logger().error("shard %d is set aside: %s", shard, result)
            failed_in_a_row += 1
        if waiting and failed_in_a_row >= LASTING_AFTER * capacity:
            outcome.stop(_lasting(failed_in_a_row, len(waiting), outcome.failed[shard]), waiting)
            waiting.clear()
        progress.update(len(outcome.done), now=not running)


def _lasting(failed: int, untried: int, error: str) -> UserError:
    return UserError(
        f"{failed} shards in a row could not be captured, so {untried} others were not tried; mend the cause "
        f"and run again, what is captured stays. The last error:\n{error}"
    )


def child_name() -> str:
    """Name a child run by its shards."""
    shards = flow_run.parameters["shards"]
    return f"shards-{shards[0]:05d}-{shards[-1]:05d}"


@flow(
    name="extract-shards",
    flow_run_name=child_name,
    task_runner=TASK_RUNNER,
    persist_result=False,
)
def extract_shards(config: ExtractConfig, dataset: str, shards: list[int], redo: bool = False) -> State[Any]:
    """Capture some shards of a data set that is planned already; part of a large extraction.

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
        return Failed(message=str(outcome.stopped), data=outcome.stopped)
    if outcome.failed:
        return Failed(message=failed_names(outcome))
    return Completed(message=f"{len(shards)} shards")


def extract_in_children(
    config: ExtractConfig, dataset: Dataset, shards: Sequence[int], *, redo: bool
) -> Outcome:
    """Split the shards among child runs and wait for them all.

    A run that came from a deployment starts its children as runs of the deployment `extract-shards`, so that
    any worker of the pool may take them; another one runs them here, one after the other, on workers that it
    starts once, until one ends with an error for the user to mend. What became of the shards is read off the
    store.
    """
    size = config.shards_per_child
    chunks = [list(shards[i : i + size]) for i in range(0, len(shards), size)]
    parameters = [
        {"config": config.model_dump(mode="json"), "dataset": dataset.uri, "shards": chunk, "redo": redo}
        for chunk in chunks
    ]
    progress = Progress("child runs of this extraction", len(chunks))
    outcome = Outcome()
    if deployment.id:
        states = _run_on_the_pool(parameters, progress)
    else:
        states = []
        with _workers(config, dataset), _lasting_interrupts() as raise_if_interrupted:
            for done, values in enumerate(parameters, start=1):
                states.append(extract_shards(**values, return_state=True))
                raise_if_interrupted()
                progress.update(done, now=True)
                error = states[-1].result(raise_on_failure=False)
                if isinstance(error, UserError):
                    outcome.stop(error, itertools.chain.from_iterable(chunks[done:]))
                    break
    left = set(dataset.missing())
    for chunk, state in zip(chunks, states, strict=False):
        for shard in chunk:
            if shard in left or (redo and not state.is_completed()):
                outcome.failed[shard] = state.message or state.name or "failed"
    return outcome


@contextlib.contextmanager
def _lasting_interrupts() -> Iterator[Callable[[], None]]:
    """Give a function that raises a Ctrl-C of this block again.

    Prefect drops one that arrives when a child run has just ended, and the next child would begin.
    """
    interrupted = False

    def note(number: int, frame: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    def raise_if_interrupted() -> None:
        if interrupted:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield raise_if_interrupted
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def _run_on_the_pool(parameters: Sequence[dict[str, Any]], progress: Progress) -> list[State[Any]]:
    """Start a child run for each set of parameters, and return their states when the last has ended."""
    started: list[UUID] = []
    waiting: set[UUID] = set()
    states: dict[UUID, State[Any]] = {}
    with get_client(sync_client=True) as client:
        try:
            for values in parameters:
                run: Any = run_deployment(CHILD_DEPLOYMENT, parameters=values, timeout=0, as_subflow=True)
                started.append(run.id)
                waiting.add(run.id)
            while waiting:
                time.sleep(CHILDREN_EVERY_S)
                for run_id in list(waiting):
                    state = client.read_flow_run(run_id).state
                    if state is not None and state.is_final():
                        states[run_id] = state
                        waiting.remove(run_id)
                progress.update(len(states), now=True)
        finally:
            # Left over when this run is cancelled or fails: the children end with it.
            for run_id in waiting:
                try:
                    client.set_flow_run_state(run_id, Cancelling())
                except (PrefectException, httpx.HTTPError) as error:
                    get_run_logger().error("child run %s goes on, cancel it by hand: %s", run_id, error)
    return [states[run_id] for run_id in started]
