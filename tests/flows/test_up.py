"""`dflash up` as people use it: a real server, the literal command, cancel, kill, retry, Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import httpx
import pytest

from flows.config import ExtractConfig, TrainConfig
from flows.ranks import descendants
from flows.train_steps import read_metrics
from flows.up import runs_below
from storage.checkpoints import Checkpoints
from storage.dataset import open_dataset
from storage.objects import open_store

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
Found = TypeVar("Found")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(what: str, look: Callable[[], Found | None], seconds: float = 180) -> Found:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (found := look()) is not None:
            return found
        time.sleep(0.5)
    raise AssertionError(f"{what} did not happen within {seconds} s")


def command_of(pid: int) -> str:
    """Command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def test_runs_are_known_by_the_processes_below_a_worker() -> None:
    sleeping = "import time; print('here', flush=True); time.sleep(60)"
    inner = f"""import os, subprocess, sys
os.environ["PREFECT__FLOW_RUN_ID"] = "a-run"
subprocess.run([sys.executable, "-c", {sleeping!r}])"""
    with subprocess.Popen([sys.executable, "-c", inner], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == b"here\n"
        assert runs_below(worker.pid) == {"a-run"} and runs_below(worker.pid + 10**6) == set()
        for pid in [*descendants(worker.pid), worker.pid]:
            os.kill(pid, signal.SIGKILL)


class Up:
    """A running `dflash up` in a folder of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.api = f"http://127.0.0.1:{self.port}/api"
        self.ask = httpx.Client(base_url=self.api, timeout=60)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
            "PREFECT_HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",
        }
        self.log = folder / "up.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [BIN / "dflash", "up", "--port", str(self.port), *options],
                cwd=folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def prefect(self, *words: str) -> str:
        """Run a Prefect command from the repository's root, as people do."""
        environment = {**self.environment, "PREFECT_API_URL": self.api}
        done = subprocess.run(
            [BIN / "prefect", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, config: ExtractConfig | TrainConfig, name: str, **parameters: Any) -> UUID:
        """Start a run of a deployment by the literal command; return its id."""
        deployment = "extract-hidden-states" if isinstance(config, ExtractConfig) else "train-drafter"
        params = json.dumps({"config": config.model_dump(mode="json"), **parameters})
        self.prefect("deployment", "run", deployment, "--params", params, "--flow-run-name", name)
        runs = httpx.post(
            f"{self.api}/flow_runs/filter", json={"flow_runs": {"name": {"any_": [name]}}}
        ).json()
        return UUID(runs[0]["id"])

    def cancel(self, run: UUID) -> None:
        """Do what the UI's button does."""
        state = {"type": "CANCELLING", "name": "Cancelling"}
        self.ask.post(f"/flow_runs/{run}/set_state", json={"state": state}).raise_for_status()

    def log_of(self, run: UUID) -> str:
        """What the UI shows under Logs."""
        query = {"logs": {"flow_run_id": {"any_": [str(run)]}}, "limit": 200}
        return "\n".join(row["message"] for row in self.ask.post("/logs/filter", json=query).json())

    def workers(self, module: str = "flows.extract_worker") -> list[int]:
        """Process ids of the workers (or ranks) that work for this server."""
        return [pid for pid in descendants(self.process.pid) if f"-m {module}" in command_of(pid)]

    def run(self, run: UUID) -> dict[str, Any]:
        return self.ask.get(f"/flow_runs/{run}").json()

    def await_state(self, run: UUID, *states: str) -> None:
        def reached() -> bool:
            return self.run(run)["state_type"] in states

        try:
            wait_for(f"state {states}", lambda: reached() or None)
        except AssertionError as error:
            error.add_note(f"it is {self.run(run)['state']}\n{self.log.read_text()[-3000:]}")
            raise

    def retry(self, run: UUID, end: str = "COMPLETED") -> None:
        """Retry a run to its end, twice at most: a busy worker may report a crash once more."""
        for _ in range(2):
            before = self.run(run)["state"]["id"]
            self.prefect("flow-run", "retry", str(run))

            def ended(before: str = before) -> str | None:
                state = self.run(run)["state"]
                over = state["type"] in ("COMPLETED", "FAILED", "CRASHED") and state["id"] != before
                return str(state["type"]) if over else None

            if wait_for("the end of the retry", ended, 400) == end:
                return
        raise AssertionError(self.run(run)["state"])

    def kill(self, run: UUID) -> None:
        """Kill the process of a run, as the kernel does where memory runs out."""
        os.kill(int(self.run(run)["infrastructure_pid"].rpartition(":")[2]), signal.SIGKILL)
        self.await_state(run, "CRASHED")

    def children(self, run: UUID) -> list[dict[str, Any]]:
        """The child runs of a run."""
        query = {"flow_runs": {"parent_flow_run_id": {"any_": [str(run)]}}}
        runs: list[dict[str, Any]] = self.ask.post("/flow_runs/filter", json=query).json()
        return runs

    def table(self, run: UUID | str, key: str) -> list[dict[str, Any]]:
        """The rows of a table that a run shows under Artifacts."""
        query = {"artifacts": {"flow_run_id": {"any_": [str(run)]}, "key": {"any_": [key]}}}
        pages = self.ask.post("/artifacts/filter", json=query).json()
        return [row for page in pages for row in json.loads(page["data"])]

    def shards_done(self, run: UUID) -> int:
        """Count the shards that a run has captured, its children included."""
        this = {"any_": [str(run)]}
        query = {
            "flow_runs": {"operator": "or_", "id": this, "parent_flow_run_id": this},
            "task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}, "name": {"like_": "shard-"}},
        }
        return int(self.ask.post("/task_runs/count", json=query).json())


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with starting(tmp_path_factory.mktemp("up")) as running:
        yield running


@contextlib.contextmanager
def starting(folder: Path, *options: str) -> Iterator[Up]:
    """Have a `dflash up` in this block."""
    running = Up(folder, *options)
    try:
        wait_for("the start", lambda: "Ctrl-C stops" in running.log.read_text() or None, 600)
        yield running
    finally:
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGINT)
            running.process.wait(60)


@pytest.fixture
def long_config(extract_config: Callable[..., ExtractConfig], tmp_path: Path) -> ExtractConfig:
    """An extraction of several hundred shards."""
    path = tmp_path / "many.jsonl"
    with path.open("w") as file:
        for i in range(400):
            turns = [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i} " * 9}]
            file.write(json.dumps({"id": f"many-{i}", "messages": turns}) + "\n")
    return extract_config(chats=[str(path)], shard_tokens=100, codec="lossless")


def in_browser(url: str) -> str:
    """Return what a real browser makes of a page of the UI."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run(["chromium", *flags, url], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout


def await_words(url: str, *words: str) -> None:
    """Look at a page until it shows all of these; a busy server may need a second look."""
    wait_for(f"{words} on {url}", lambda: True if all(word in in_browser(url) for word in words) else None)


def busy_workers(up: Up, run: UUID) -> list[int]:
    """Wait until some shards of the run are done; return who captures the next ones."""
    wait_for("the first shards", lambda: up.shards_done(run) > 3 or None)
    workers = up.workers()
    assert workers
    return workers


def await_end(pids: list[int]) -> None:
    wait_for(f"the end of {pids}", lambda: True if not any(command_of(pid) for pid in pids) else None, 30)


def test_cancelled_training_ends_its_ranks_and_goes_on_where_it_was(
    up: Up, train_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    training = {**train_config().training.model_dump(), "epochs": 2000, "checkpoint_every": 10_000}
    config = train_config(training=training, cpu_ranks=2)

    def cancel_after(steps: int, run: UUID) -> int:
        """Cancel between two checkpoints; return the step that was written down on the way out."""
        wait_for(f"step {steps}", lambda: len(read_metrics(output)) > steps or None)
        ranks = up.workers("flows.train_worker")
        assert len(ranks) > 2  # torchrun and two ranks
        up.cancel(run)
        await_end(ranks)
        up.await_state(run, "CANCELLED")
        return Checkpoints(open_store(str(output)), {}, keep=1).steps()[-1]

    done = cancel_after(5, up.start(config, "training-to-be-cancelled"))
    again = up.start(config, "training-to-be-continued")
    assert cancel_after(done + 5, again) > done + 5
    assert f"continuing after optimizer step {done}," in up.log_of(again)
    steps = [row["step"] for row in read_metrics(output)]
    assert steps == list(range(1, len(steps) + 1))


def test_ranks_write_their_last_checkpoint_before_the_end(
    train_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    training = {**train_config().training.model_dump(), "epochs": 2000, "checkpoint_every": 10_000}
    with starting(tmp_path) as up:
        up.start(train_config(training=training, cpu_ranks=2), "training-to-be-stopped")
        wait_for("step 3", lambda: len(read_metrics(output)) > 3 or None)
        ranks = up.workers("flows.train_worker")
        for pid in ranks[1:]:
            os.kill(pid, signal.SIGSTOP)  # as if the store took long
        up.process.terminate()
        wait_for("the words", lambda: "a training writes a last checkpoint" in up.log.read_text() or None)
        time.sleep(5)
        assert up.process.poll() is None and not (output / "checkpoints").exists()
        for pid in ranks[1:]:
            os.kill(pid, signal.SIGCONT)
        assert up.process.wait(60) == 0
        assert "its worker was stopped during the run; retry it" in up.log.read_text()
    assert not any(command_of(pid) for pid in ranks)
    assert Checkpoints(open_store(str(output)), {}, keep=1).steps()


def test_from_the_literal_command_to_the_end(up: Up, long_config: ExtractConfig) -> None:
    # Cancelled: its worker processes end, what is committed stays.
    run = up.start(long_config, "to-be-cancelled")
    workers = busy_workers(up, run)
    up.prefect("flow-run", "cancel", str(run))
    up.await_state(run, "CANCELLED")
    await_end(workers)
    dataset = open_dataset(long_config.store)
    missing = len(dataset.missing())
    assert 0 < missing < len(dataset.plan.shards) and not dataset.sealed
    # What was captured is in the tables to the last, but for what was in work.
    shown = [row["shard"] for child in up.children(run) for row in up.table(child["id"], "shards")]
    (children,) = [row for row in up.table(run, "child-runs") if row["state"] == "Interrupted"]
    assert len(set(shown)) == len(shown) == children["done"]
    assert 0 <= len(dataset.plan.shards) - missing - len(shown) <= 4

    # Killed: seen as crashed, nothing is left behind, and a retry does what is missing.
    run = up.start(long_config, "to-be-killed")
    workers = busy_workers(up, run)
    up.kill(run)
    await_end(workers)
    assert 0 < len(dataset.missing()) < missing
    up.retry(run)
    assert open_dataset(dataset.uri).sealed
    if shutil.which("chromium"):
        page = f"http://127.0.0.1:{up.port}/v2/runs/flow-run/{run}"
        await_words(f"{page}?tab=TaskRuns", "Completed", "extract-tiny", "shard-00")
        await_words(f"{page}?tab=Logs", "Beginning flow run")

    # Ctrl-C in the middle of a run: everything ends, the run is told so.
    again = long_config.model_copy(update={"store": long_config.store + "-again"})
    run = up.start(again, "to-be-stopped")
    everything = [*busy_workers(up, run), *descendants(up.process.pid)]
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60) == 0
    text = up.log.read_text()
    assert "its worker was stopped during the run; retry it" in text
    assert text.rstrip().endswith("stopped")
    await_end(everything)
