"""The services of docker-compose.yml by hand, and two machines on them that share only server and store.

Prefect runs on Postgres where its programs are installed, else on SQLite; the store is SeaweedFS. The
machines are network namespaces where the kernel lets us make some.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest

from flows.config import ExtractConfig
from storage.dataset import open_dataset
from tests.flows.networks import Network, network_of
from tests.flows.test_up import BIN, ROOT, free_port, wait_for
from tests.storage.seaweed import SeaweedServer, running_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two machines with networks of their own, if that can be had."""
    with network_of(["one", "two"]) as network:
        yield network


@pytest.fixture(scope="module")
def store(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """An object store that both machines reach."""
    with running_server(tmp_path_factory.mktemp("store"), network.host) as server:
        yield server


@pytest.fixture(scope="module")
def database() -> Iterator[str | None]:
    """Address of a fresh Postgres, None where there is no Postgres here."""
    if shutil.which("initdb") is None or shutil.which("postgres") is None:
        yield None
        return
    # Postgres refuses to run as root.
    user: dict[str, Any] = {"user": "nobody"} if getpass.getuser() == "root" else {}
    with tempfile.TemporaryDirectory(prefix="dflash-postgres-") as folder:
        if user:
            shutil.chown(folder, "nobody")
        data, port = f"{folder}/data", free_port()
        initialise = ["initdb", "--pgdata", data, "--username", "prefect", "--auth", "trust", "--no-sync"]
        subprocess.run(initialise, check=True, capture_output=True, cwd=folder, **user)
        server = subprocess.Popen(
            ["postgres", "-D", data, "-p", str(port), "-k", folder, "-c", "listen_addresses=127.0.0.1"],
            cwd=folder,
            stderr=subprocess.DEVNULL,
            **user,
        )
        ready = ["pg_isready", "--host", "127.0.0.1", "--port", str(port)]
        wait_for(
            "Postgres", lambda: not subprocess.run(ready, capture_output=True, check=False).returncode or None
        )
        try:
            yield f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)


@contextlib.contextmanager
def running(command: list[Any], folder: Path, environment: dict[str, str]) -> Iterator[Path]:
    """Run a process in a folder of its own; gives its log; SIGTERM must end it well."""
    folder.mkdir()
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield log
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.long
def test_two_machines_share_a_large_extraction(
    network: Network,
    database: str | None,
    store: SeaweedServer,
    extract_config: Callable[..., ExtractConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    uri, port = f"{store.uri}/shared", free_port()
    api = f"http://{network.host}:{port}/api"
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    common = {**plain, "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "OMP_NUM_THREADS": "1"}
    for_server = {**common, "PREFECT_HOME": str(tmp_path / "server-home")}
    if database is not None:
        for_server["PREFECT_API_DATABASE_CONNECTION_URL"] = database
    serve = [BIN / "prefect", "server", "start", "--host", network.host, "--port", str(port)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(serve, tmp_path / "server", for_server))
        wait_for("the server", lambda: healthy(api) or None, 600)
        logs = []
        for name, enter in network.machines.items():
            home = {"PREFECT_HOME": str(tmp_path / f"{name}-home"), "PREFECT_API_URL": api}
            join = [*enter, BIN / "dflash", "join", "--limit", "3"]
            log = stack.enter_context(running(join, tmp_path / name, {**common, **home}))
            wait_for("a machine", lambda log=log: "Ctrl-C stops" in log.read_text() or None, 300)
            logs.append(log)

        config = extract_config(store=uri, shards_per_child=2, shard_tokens=400, codec="lossless")
        ask = httpx.Client(base_url=api, timeout=60)
        switch_on_training(ask)
        run = start_extraction(api, config)
        state = wait_for("the end", lambda: final_state(ask, run), 400)
        assert state["type"] == "COMPLETED", (state, [log.read_text()[-3000:] for log in logs])
        trained = wait_for("the training that follows", lambda: run_of(ask, "train-drafter"))

    dataset = open_dataset(uri)
    assert dataset.sealed and len(dataset.plan.shards) > 4
    assert trained["parameters"]["dataset"] == dataset.uri
    # Each machine took a part: the whole extraction, or some of its children.
    for log in logs:
        assert "Beginning" in log.read_text(), log.read_text()
        assert log.read_text().rstrip().endswith("stopped")


def test_the_machines_share_no_network(network: Network, store: SeaweedServer) -> None:
    if network.refusal:
        pytest.skip(f"the machines shared one network, namespaces are refused here: {network.refusal}")
    with running_loopback() as port:
        for enter in network.machines.values():
            assert reaches([], "127.0.0.1", port) and not reaches(enter, "127.0.0.1", port)
            assert reaches(enter, network.host, store.port)


@contextlib.contextmanager
def running_loopback() -> Iterator[int]:
    """A port of this machine's own loopback that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def reaches(enter: list[str], host: str, port: int) -> bool:
    """Whether a process on a machine can connect."""
    connect = f"import socket; socket.create_connection(({host!r}, {port}), 10)"
    done = subprocess.run([*enter, sys.executable, "-c", connect], capture_output=True, check=False)
    return done.returncode == 0


def healthy(api: str) -> bool:
    try:
        return httpx.get(f"{api}/health", timeout=30).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def start_extraction(api: str, config: ExtractConfig) -> UUID:
    """Start a run of the deployment as the UI does."""
    with httpx.Client(base_url=api, timeout=60) as ask:
        deployment = ask.get("/deployments/name/extract-hidden-states/extract-hidden-states").json()
        parameters = {"config": config.model_dump(mode="json")}
        made = ask.post(
            f"/deployments/{deployment['id']}/create_flow_run",
            json={"parameters": parameters, "state": {"type": "SCHEDULED"}},
        )
        assert made.status_code in (200, 201), made.text
        return UUID(made.json()["id"])


def switch_on_training(ask: httpx.Client) -> None:
    """Enable the trigger that prefect.yaml ships switched off."""
    found = {entry["name"]: entry for entry in ask.post("/automations/filter", json={}).json()}
    trigger = found["train-after-extraction"]
    assert not trigger["enabled"]
    ask.patch(f"/automations/{trigger['id']}", json={"enabled": True}).raise_for_status()


def run_of(ask: httpx.Client, flow: str) -> dict[str, Any] | None:
    runs: list[dict[str, Any]] = ask.post(
        "/flow_runs/filter", json={"flows": {"name": {"any_": [flow]}}}
    ).json()
    return runs[0] if runs else None


def final_state(ask: httpx.Client, run: UUID) -> dict[str, Any] | None:
    state: dict[str, Any] = ask.get(f"/flow_runs/{run}").json()["state"]
    return state if state["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") else None


def test_the_compose_file_starts_the_same_servers() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    assert '["prefect", "server", "start", "--host", "0.0.0.0"]' in text
    assert '["dflash", "join", "--limit", "3", "--healthcheck"]' in text
