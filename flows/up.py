"""Prefect servers: `dflash up` with a worker, `dflash join` to work for another, one for a single command."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import typer

from dflash_core.configuration import UserError
from flows.ranks import descendants, running

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

POOL = "dflash"
PREFECT = [sys.executable, "-m", "prefect"]
PREFECT_FILE = Path(__file__).parent.parent / "prefect.yaml"
SERVER_START_S = 600.0
"""The first start creates the database."""
STOP_S = 30.0
LAST_CHECKPOINT_S = 605.0
"""How long the processes of a run may go on after it: as long as a training gives its ranks by default
(`stop_timeout_s`)."""
HEARTBEAT_S = 30
"""How often a flow run says that it lives."""
SILENCE_S = 400
"""A run that has not said so for this long is taken for crashed. More than twice Prefect's own default of
180 s, for runs that were started without our setting."""
SERVER_RETRIES = 9
"""How often a request is repeated that the Prefect server does not take, after 2, 4, 8, ... s: 17 minutes in
all. Prefect's own default ends a run of days when its server is away, or overwhelmed, for one."""
OUR_FLOWS = ("extract-hidden-states", "extract-shards", "build-compile-cache", "train-drafter")
AUTOMATION = "dflash: runs that fell silent have crashed"


def up(host: str, port: int, limit: int, logs: Path) -> None:
    """Start everything, say where it is, and stop everything cleanly on Ctrl-C, SIGTERM or the end of a part.

    `limit` is how many flow runs may go on at a time. Raises UserError when the port is taken or a part does
    not start.
    """
    url = f"http://{host}:{port}"
    if answers(f"{url}/api"):
        raise UserError(f"something answers at {url} already; choose another --port, or use `dflash join`")
    logs.mkdir(parents=True, exist_ok=True)
    environment = _environment(f"{url}/api")
    server_command = [*PREFECT, "server", "start", "--host", host, "--port", str(port)]
    with _until_stopped(), _process(server_command, environment, logs / "server.log") as server:
        typer.echo(f"starting the Prefect server (log: {logs / 'server.log'})")
        _wait_for_server(url, server, logs / "server.log")
        _work(environment, limit, {"the server": server}, lambda: _say_ready(url))


def join(limit: int, healthcheck: bool) -> None:
    """Register the deployments with the server that Prefect is configured for, and work for it until stopped.

    Runs have this folder as their working folder. Raises UserError when there is no such server.
    """
    from prefect.settings import PREFECT_API_URL

    api = PREFECT_API_URL.value()
    if not api or not answers(api):
        raise UserError(f"no Prefect server answers at {api}; set PREFECT_API_URL, or start one: dflash up")
    environment = _environment(api)
    with _until_stopped():
        _work(environment, limit, {}, lambda: typer.echo(f"working for {api}; Ctrl-C stops"), healthcheck)


@contextlib.contextmanager
def temporary_server(log: Path) -> Iterator[str]:
    """Run a server without a UI for as long as the block lasts; yields the address of its API.

    Unlike the temporary server of Prefect's own it is out of Ctrl-C's reach. SIGTERM and a closed terminal
    end the block as Ctrl-C does: the server is there to be told how the runs ended, and goes after them.
    Raises UserError when it does not start.
    """
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [*PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--no-ui", "--no-scheduler", "--no-late-runs"]
    ends = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in ends}
    try:
        with _process(command, _environment(f"{url}/api"), log) as server:
            _wait_for_server(url, server, log)
            try:
                yield f"{url}/api"
            finally:
                _send_last_words()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send_last_words() -> None:
    """Have logs and events that still wait reach the server; Prefect itself would do so too late."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for waiting in (APILogWorker, EventsWorker):
        waiting.drain_all(timeout=STOP_S)


def _work(
    environment: dict[str, str],
    limit: int,
    others: dict[str, subprocess.Popen[bytes]],
    ready: Callable[[], None],
    healthcheck: bool = False,
) -> None:
    """Register, and run a worker of the pool until it, or one of the other processes, ends."""
    command = [*PREFECT, "worker", "start", "--pool", POOL, "--type", "process", "--limit", str(limit)]
    command += [
        "--name",
        f"{socket.gethostname()}-{os.getpid()}",
        *(["--with-healthcheck"] if healthcheck else []),
    ]
    with _client(environment["PREFECT_API_URL"]) as client:
        register(client, environment)
        with _process(command, environment, None) as worker:
            try:
                ready()
                _until_one_ends({**others, "the worker": worker})
            finally:
                runs, below = runs_below(worker.pid), descendants(worker.pid)
                _stop(worker)
                _await_end(below)
                mark_crashed(client, runs)


def _environment(api: str) -> dict[str, str]:
    return {
        **os.environ,
        "PREFECT_API_URL": api,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
        "PREFECT_CLIENT_MAX_RETRIES": str(SERVER_RETRIES),
    }


@contextlib.contextmanager
def _until_stopped() -> Iterator[None]:
    """Have Ctrl-C and SIGTERM end the block, and say so."""
    # An own handler also frees the children from an ignored SIGINT, which a shell gives to background jobs
    # and without which Prefect's worker cannot be stopped.
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        yield
    typer.echo("stopped")


def register(client: SyncPrefectClient, environment: Mapping[str, str]) -> None:
    """Make the work pool, the deployments and the automation that finds silent runs; may be repeated."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound

    if not PREFECT_FILE.exists():
        raise UserError(
            f"{PREFECT_FILE} is missing: install the package with `pip install --editable` from a checkout"
        )
    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
    done = subprocess.run(
        [*PREFECT, "--no-prompt", "deploy", "--all", "--prefect-file", str(PREFECT_FILE)],
        env=dict(environment),
        cwd=PREFECT_FILE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise UserError(
            f"the deployments could not be registered:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    watch_for_silence()


def watch_for_silence() -> None:
    """Have the server mark runs as crashed whose process is gone without a word (once; kept by name)."""
    from prefect.automations import Automation
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import EventTrigger, Posture
    from prefect.events.schemas.events import ResourceSpecification
    from prefect.exceptions import ObjectNotFound

    with contextlib.suppress(ObjectNotFound, ValueError):
        Automation.read(name=AUTOMATION)  # type: ignore[unused-coroutine]
        return
    beat = "prefect.flow-run.heartbeat"
    crash = ChangeFlowRunState(
        name=None, state=StateType.CRASHED, message="its process fell silent", force=False
    )
    ends = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
    Automation(
        name=AUTOMATION,
        trigger=EventTrigger(
            after={beat},
            expect={beat} | ends,
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            match_related=ResourceSpecification(
                {"prefect.resource.role": ["flow"], "prefect.resource.name": list(OUR_FLOWS)}
            ),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=SILENCE_S),
        ),
        actions=[crash],
    ).create()


def runs_below(worker: int) -> set[str]:
    """Return the ids of the flow runs that a worker's process has started."""
    runs = set()
    for pid in descendants(worker):
        with contextlib.suppress(OSError):
            for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, value = variable.partition(b"=")
                if name == b"PREFECT__FLOW_RUN_ID":
                    runs.add(value.decode())
    return runs


def mark_crashed(client: SyncPrefectClient, ended: Collection[str]) -> None:
    """End the runs whose processes have just been ended; Prefect would show them as running for ever."""
    from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
    from prefect.client.schemas.objects import StateType
    from prefect.states import Crashed

    going = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
    runs = client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": going}}}),
        work_pool_filter=WorkPoolFilter.model_validate({"name": {"any_": [POOL]}}),
    )
    for run in runs:
        if str(run.id) in ended:
            message = "its worker was stopped during the run; retry it to continue where it was"
            client.set_flow_run_state(run.id, Crashed(message=message), force=True)
            typer.echo(f"run {run.name}: {message}")


def _say_ready(url: str) -> None:
    typer.echo(f"\nPrefect is at {url}\nIn another terminal, from {PREFECT_FILE.parent}:")
    if url != "http://127.0.0.1:4200":
        typer.echo(f"  export PREFECT_API_URL={url}/api")
    typer.echo("  prefect deployment run extract-hidden-states --watch")
    typer.echo("  prefect deployment run train-drafter --watch")
    typer.echo("Ctrl-C stops everything.\n")


@contextlib.contextmanager
def _process(
    command: list[str], environment: Mapping[str, str], log: Path | None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in a session of its own (Ctrl-C reaches us alone) and end it with the block."""
    with contextlib.ExitStack() as stack:
        output: Any = stack.enter_context(log.open("ab")) if log else None
        process = subprocess.Popen(
            command, env=dict(environment), stdout=output, stderr=output, start_new_session=True
        )
        try:
            yield process
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _await_end(pids: Collection[int]) -> None:
    """Wait for processes that end by themselves, in sessions of their own: in a container they would end with
    us, in the middle of a checkpoint.
    """
    end = time.monotonic() + LAST_CHECKPOINT_S
    if left := running(pids):
        typer.echo(
            f"waiting for {len(left)} processes of runs: a training writes a last checkpoint, which may take "
            f"{LAST_CHECKPOINT_S:.0f} s; Ctrl-C does not wait"
        )
    with contextlib.suppress(KeyboardInterrupt):
        while running(left) and time.monotonic() < end:
            time.sleep(0.2)


def _wait_for_server(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + SERVER_START_S
    while not answers(f"{url}/api"):
        if server.poll() is not None:
            raise UserError(
                f"the Prefect server ended with code {server.returncode}:\n{log.read_text()[-2000:]}"
            )
        if time.monotonic() > deadline:
            raise UserError(f"the Prefect server did not answer within {SERVER_START_S:.0f} s; see {log}")
        time.sleep(0.5)


def answers(api: str) -> bool:
    """Whether a Prefect API is there, such as http://127.0.0.1:4200/api."""
    try:
        return httpx.get(f"{api}/health", timeout=5).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def _client(api: str) -> Iterator[SyncPrefectClient]:
    """Speak to the new server, whatever Prefect is configured for."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: api}), get_client(sync_client=True) as client:
        yield client


def _until_one_ends(processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    while True:
        for name, process in processes.items():
            if process.poll() is not None:
                raise UserError(f"{name} ended with code {process.returncode}")
        time.sleep(1)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
