"""A large extraction as child runs of some hundreds of shards each: here, or on the machines of a pool."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter, WorkerFilter
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import PrefectException
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelling

from dflash_core.configuration import UserError
from flows.artifacts import Row, Table, read_table, shown
from flows.config import ExtractConfig
from flows.extract_shards import (
    CHILD_DEPLOYMENT,
    SHARDS_TABLE,
    Progress,
    capture_here,
    child_name,
    extract_shards,
    held_workers,
    watched_by,
)
from flows.extract_steps import Outcome
from storage.dataset import Dataset

Found = TypeVar("Found")
LOOK_EVERY_S = 2.0
STARVED_AFTER_S = 30.0
"""When a parent says that none of its children has a place; again after `STARVED_AGAIN_S`."""
STARVED_AGAIN_S = 600.0
PAGE = 200
"""What the server returns at a time at most."""


@dataclass
class Child:
    """A child run, and what is known of its shards."""

    shards: list[int]
    run: UUID | None = None
    """Its id, where it is a run of the pool that has been started."""
    state: str = "Scheduled"
    words: str = "not tried"
    """How it ended."""
    seconds: float = 0.0
    """How long it has been running."""
    outcome: Outcome = field(default_factory=Outcome)
    """So far."""

    def row(self) -> Row:
        """Return what people want to see of it."""
        tokens = sum(result["tokens"] for result in self.outcome.done.values())
        return {
            "child": child_name(self.shards),
            "state": self.state,
            "shards": len(self.shards),
            "done": len(self.outcome.done),
            "failed": len(self.outcome.failed),
            "tokens": tokens,
            "tokens/s": round(tokens / self.seconds) if self.seconds else 0,
        }


class ShownChildren:
    """Shows the children of a run while they work: progress, and a row for each."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children
        self._progress = Progress("child runs of this extraction", len(children))
        self._table = Table("child-runs", "Child runs of this extraction")

    def __enter__(self) -> ShownChildren:
        self.show()
        return self

    def __exit__(self, *exc: object) -> None:
        self.show()

    @property
    def due(self) -> bool:
        """Whether it is time to show how they get on."""
        return self._table.due

    def show(self) -> None:
        """Show how they get on."""
        for number, child in enumerate(self._children):
            self._table.put(number, child.row())
        self._table.send()

    def ended(self, count: int) -> None:
        """Tell how many have ended."""
        self._progress.update(count, now=True)


def capture(config: ExtractConfig, dataset: Dataset, shards: Sequence[int], *, redo: bool) -> Outcome:
    """Capture these shards: more than `shards_per_child` in child runs, which are waited for.

    Children become runs of the deployment `extract-shards` where this run came from a pool that other
    machines work for. Elsewhere they run here, one after the other, on workers that are started once, until
    one ends with an error for the user to mend. Children of the pool that an earlier, killed attempt of this
    run left behind keep their shards.
    """
    size = config.shards_per_child
    children = _living_children()
    if not children and not 0 < size < len(shards):
        return capture_here(config, dataset, shards, redo=redo)
    taken = {shard for child in children for shard in child.shards}
    rest = [shard for shard in shards if shard not in taken]
    step = size or len(rest) or 1
    children += [Child(rest[i : i + step]) for i in range(0, len(rest), step)]

    def parameters(child: Child) -> dict[str, Any]:
        return {
            "config": config.model_dump(mode="json"),
            "dataset": dataset.uri,
            "shards": child.shards,
            "redo": redo,
        }

    outcome = Outcome()
    with ShownChildren(children) as table:
        if taken or _other_machines():
            _run_on_the_pool(children, parameters, table)
        else:
            with held_workers(config, dataset):
                outcome.stopped = _run_here(children, parameters, table)
    left = set(dataset.missing())
    for child in children:
        for shard in child.shards:
            if shard in left or (redo and shard not in child.outcome.done):
                outcome.failed[shard] = child.outcome.failed.get(shard, child.words)
    return outcome


def redone_by_this_run() -> set[int]:
    """Return the shards that earlier attempts of this run have captured, their children included."""
    if flow_run.run_count < 2:
        return set()
    this = {"any_": [flow_run.id]}
    runs = FlowRunFilter.model_validate({"operator": "or_", "id": this, "parent_flow_run_id": this})
    captured = {"name": {"like_": "shard-"}, "state": {"type": {"any_": ["COMPLETED"]}}}
    tasks = TaskRunFilter.model_validate(captured)
    with get_client(sync_client=True) as client:
        names = [
            task.name for task in _all(client.read_task_runs, flow_run_filter=runs, task_run_filter=tasks)
        ]
    return {int(name.removeprefix("shard-")) for name in names if name.startswith("shard-")}


def _other_machines() -> bool:
    """Whether this run came from a pool that more than one worker serves now."""
    if not deployment.id:
        return False
    with get_client(sync_client=True) as client:
        pool = client.read_flow_run(UUID(flow_run.id)).work_pool_name
        if pool is None:
            return False
        online = WorkerFilter.model_validate({"status": {"any_": ["ONLINE"]}})
        return len(client.read_workers_for_work_pool(pool, worker_filter=online)) > 1


def _living_children() -> list[Child]:
    """Return the runs of the pool that earlier attempts of this run have started and that have not ended."""
    if not deployment.id or flow_run.run_count < 2:
        return []
    query = {"parent_flow_run_id": {"any_": [flow_run.id]}, "deployment_id": {"is_null_": False}}
    children = FlowRunFilter.model_validate(query)
    with get_client(sync_client=True) as client:
        living = [
            run
            for run in _all(client.read_flow_runs, flow_run_filter=children)
            if run.state and not (run.state.is_final() or run.state.is_cancelling())
        ]
    if living:
        get_run_logger().info("%d child runs of an earlier attempt go on", len(living))
    return [Child(run.parameters["shards"], run.id) for run in living]


def _all(read: Callable[..., list[Found]], **filters: Any) -> Iterator[Found]:
    """Yield all that a query of the client finds, page by page."""
    for offset in itertools.count(0, PAGE):
        page = read(**filters, limit=PAGE, offset=offset)
        yield from page
        if len(page) < PAGE:
            return


def _run_here(
    children: Sequence[Child], parameters: Callable[[Child], dict[str, Any]], table: ShownChildren
) -> UserError | None:
    """Run one child after the other in this process; returns the error of the one that ended them all."""
    with _lasting_interrupts() as raise_if_interrupted:
        for count, child in enumerate(children, start=1):
            child.state = "Running"
            try:
                with watched_by(_watch(child, table)):
                    state = extract_shards(**parameters(child), return_state=True)
                raise_if_interrupted()
            except BaseException:
                child.state = "Interrupted"
                raise
            child.state, child.words = state.name or "", state.message or state.name or ""
            table.ended(count)
            ended: Any = state.result(raise_on_failure=False)
            if isinstance(ended, Outcome):
                child.outcome = ended
                ended = ended.stopped
            if isinstance(ended, UserError):
                return ended
    return None


def _watch(child: Child, table: ShownChildren) -> Callable[[Outcome], None]:
    began = time.monotonic()

    def watch(outcome: Outcome) -> None:
        child.outcome, child.seconds = outcome, time.monotonic() - began
        if table.due:
            table.show()

    return watch


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


def _run_on_the_pool(
    children: Sequence[Child], parameters: Callable[[Child], dict[str, Any]], table: ShownChildren
) -> None:
    """Have any machine of the pool take children, and wait until all have ended."""
    waiting: dict[UUID, Child] = {child.run: child for child in children if child.run}
    starved = _Starved()
    with get_client(sync_client=True) as client:
        try:
            for child in children:
                if child.run is None:
                    # A request that is sent again, its answer being lost, finds the run by its key.
                    name = child_name(child.shards)
                    started: Any = run_deployment(
                        CHILD_DEPLOYMENT,
                        parameters=parameters(child),
                        flow_run_name=name,
                        idempotency_key=f"{flow_run.id}-{flow_run.run_count}-{name}",
                        timeout=0,
                        as_subflow=True,
                    )
                    child.run = started.id
                    waiting[started.id] = child
            while waiting:
                time.sleep(LOOK_EVERY_S)
                due = table.due
                at_work = False
                for run in _read_runs(client, list(waiting)):
                    child = waiting[run.id]
                    state = run.state
                    assert state is not None
                    child.state, child.words = state.name or "", state.message or state.name or ""
                    child.seconds = run.estimated_run_time.total_seconds()
                    at_work = at_work or not state.is_scheduled()
                    if state.is_final() or (due and state.is_running()):
                        child.outcome = _outcome_of(run.id)
                    if state.is_final():
                        del waiting[run.id]
                        table.ended(len(children) - len(waiting))
                if due:
                    table.show()
                starved.look(len(waiting), at_work)
        finally:
            # Left over when this run is cancelled or fails: the children end with it.
            for run_id, child in waiting.items():
                try:
                    client.set_flow_run_state(run_id, Cancelling())
                    child.state = "Cancelling"
                except (PrefectException, httpx.HTTPError) as error:
                    get_run_logger().error("child run %s goes on, cancel it by hand: %s", run_id, error)


def _read_runs(client: SyncPrefectClient, ids: Sequence[UUID]) -> Iterator[FlowRun]:
    for i in range(0, len(ids), PAGE):
        some = FlowRunFilter.model_validate({"id": {"any_": ids[i : i + PAGE]}})
        yield from client.read_flow_runs(flow_run_filter=some)


def _outcome_of(run: UUID) -> Outcome:
    """Read off its table how the shards of another run ended so far."""
    outcome = Outcome()
    for row in shown(read_table, run, SHARDS_TABLE) or []:
        if row["state"] == "failed":
            outcome.failed[row["shard"]] = row["error"]
        else:
            outcome.done[row["shard"]] = row
    return outcome


class _Starved:
    """Says when no child has found a place on the pool for some time."""

    def __init__(self) -> None:
        self._say_at = time.monotonic() + STARVED_AFTER_S

    def look(self, waiting: int, at_work: bool) -> None:
        """Take note of how many have not ended, and whether any of them works."""
        now = time.monotonic()
        if at_work:
            self._say_at = now + STARVED_AFTER_S
        elif waiting and now >= self._say_at:
            self._say_at = now + STARVED_AGAIN_S
            get_run_logger().warning(
                "%d child runs wait for a free place, none is at work: other runs, this one too, take all "
                "places of the pool's machines; wait for these to end, or raise --limit of `dflash up` and "
                "`dflash join`",
                waiting,
            )
