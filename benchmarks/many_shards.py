"""Measures what a large number of shards costs around the capture: planning, Prefect, resuming, the UI.

python benchmarks/many_shards.py --shards 10000 --per-child 500

A tiny random target captures chats of a few tokens, one a shard, on the CPU, by the command `dflash extract`
and with a Prefect server (SQLite) of its own. The first run is interrupted half-way, as by Ctrl-C;
the second does the rest and seals the data set. Prints one JSON object (its parts go to stderr as they come):

  plan            chats to a planned data set: seconds, chats/s
  first, second   the two runs: new shards, shards/s from the first to the last, seconds from the start of the
                  process to the first new shard and to the end, peak resident memory of the flow's process
  server          its processor time a task run, peak resident memory, size of the database, seconds until the
                  database has caught up with the end of the runs
  queries_ms      what the UI asks for a run's page (median of five): for the run with its children, and for
                  one child with its tasks
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import prefect
import torch

from flows.config import ExtractConfig, dump_config
from flows.extract_plan import plan_dataset
from flows.up import answers
from storage.dataset import Dataset
from tests.tiny import MASK_TOKEN_ID, write_tiny_target

ROOT = Path(__file__).resolve().parent.parent
LOOK_EVERY_S = 0.5
CATCH_UP_S = 3600.0
QUERIES = 5


def memory_peak_mb(pid: int) -> float:
    """Peak resident memory of a living process so far; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1e3 for line in status.splitlines() if line.startswith("VmHWM")), 0.0)


def processor_seconds(pid: int) -> float:
    """Processor time of a living process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def prefect_server(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server on SQLite; gives its process and the address of its API."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    api = f"http://127.0.0.1:{port}/api"
    command = ["-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "PREFECT_HOME": str(folder), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen([sys.executable, *command], env=environment, stdout=log, stderr=log)
    try:
        wait(lambda: answers(api), 600)
        yield server, api
    finally:
        server.terminate()
        server.wait(60)


def wait(look: Callable[[], bool], seconds: float) -> float:
    """Wait until it is so; return after how many seconds. Raises TimeoutError."""
    began = time.monotonic()
    while not look():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"nothing happened within {seconds:g} s")
        time.sleep(LOOK_EVERY_S)
    return time.monotonic() - began


def make_config(folder: Path, shards: int, per_child: int) -> ExtractConfig:
    """Write the target and so many chats of which none shares a shard with another."""
    write_tiny_target(folder / "target")
    with (folder / "chats.jsonl").open("w") as file:
        for i in range(shards):
            turns = [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"answer {i}"}]
            file.write(json.dumps({"id": f"chat-{i}", "messages": turns}) + "\n")
    target = {"path": str(folder / "target"), "dtype": "float32", "num_taps": 1, "mask_token": MASK_TOKEN_ID}
    values = {
        "name": "many",
        "store": str(folder / "store"),
        "chats": [str(folder / "chats.jsonl")],
        "target": target,
        "codec": "lossless",
        "shard_tokens": 1,
        "shards_per_child": per_child,
        "workers": {"slots": ["cpu"], "writer": {"threads": 1}},
    }
    return ExtractConfig.model_validate(values)


def committed(dataset: Dataset) -> int:
    """How many shards are done, by one look at a folder."""
    folder = Path(dataset.uri.removeprefix("file://")) / "records"
    return sum(path.suffix == ".json" for path in folder.iterdir()) if folder.is_dir() else 0


def run(config: Path, dataset: Dataset, api: str, home: Path, until: int) -> dict[str, Any]:
    """Extract by the command until so many shards are committed, then interrupt it unless these are all."""
    environment = {**os.environ, "PREFECT_API_URL": api, "PREFECT_HOME": str(home), "OMP_NUM_THREADS": "1"}
    before, planned = committed(dataset), len(dataset.plan.shards)
    began = time.monotonic()
    first = last = 0.0
    peak, found, at_first = 0.0, before, before
    with (home / "extract.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "extract", "--config", str(config)],
            env=environment,
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )
    while process.poll() is None:
        time.sleep(LOOK_EVERY_S)
        peak = max(peak, memory_peak_mb(process.pid))
        now = committed(dataset)
        if now > found:
            found, last = now, time.monotonic()
            if not first:
                first, at_first = last, now
        if until <= found < planned:
            process.send_signal(signal.SIGINT)
            process.wait(120)
    rate = (found - at_first) / max(last - first, LOOK_EVERY_S)
    found = committed(dataset)
    if found < until:
        raise RuntimeError((home / "extract.log").read_text()[-3000:])
    return told(
        {
            "new_shards": found - before,
            "shards_per_s": round(rate, 2),
            "first_shard_after_s": round(first - began, 1),
            "seconds": round(time.monotonic() - began, 1),
            "flow_peak_rss_mb": round(peak),
        }
    )


def told(values: dict[str, Any]) -> dict[str, Any]:
    """Say a part of the result that is known already."""
    print(json.dumps(values), file=sys.stderr, flush=True)
    return values


def ask(api: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Ask the server as its UI does."""
    url = f"{api}{path}"
    answer = httpx.get(url, timeout=300) if body is None else httpx.post(url, json=body, timeout=300)
    answer.raise_for_status()
    return answer.json()


def query_times(api: str, run_id: str) -> dict[str, float]:
    """Milliseconds of the queries that a flow run's page in the UI makes."""
    mine = {"flow_run_id": {"any_": [run_id]}}
    tasks = {"task_runs": {**mine, "subflow_runs": {"exists_": False}}, "sort": "EXPECTED_START_TIME_DESC"}
    children = {"flow_runs": {"parent_flow_run_id": {"any_": [run_id]}}, "limit": 20}
    questions: dict[str, tuple[str, dict[str, Any] | None]] = {
        "run": (f"/flow_runs/{run_id}", None),
        "graph": (f"/flow_runs/{run_id}/graph-v2", None),
        "tasks": ("/task_runs/paginate", {**tasks, "page": 1, "limit": 20}),
        "task_count": ("/task_runs/count", {"task_runs": mine}),
        "children": ("/flow_runs/filter", children),
        "logs": ("/logs/filter", {"logs": mine, "limit": 200, "offset": 0, "sort": "TIMESTAMP_ASC"}),
        "artifacts": ("/artifacts/filter", {"artifacts": mine}),
    }
    times = {}
    for name, (path, body) in questions.items():
        taken = []
        for _ in range(QUERIES):
            began = time.monotonic()
            ask(api, path, body)
            taken.append(time.monotonic() - began)
        times[name] = round(1e3 * statistics.median(taken), 1)
    return times


def measure(folder: Path, shards: int, per_child: int) -> dict[str, Any]:
    """Do everything in this folder."""
    config = make_config(folder, shards, per_child)
    path = folder / "extract.yaml"
    path.write_text(dump_config(config))
    began = time.monotonic()
    dataset = plan_dataset(config)
    planning = time.monotonic() - began
    plan = told({"seconds": round(planning, 1), "chats_per_s": round(shards / planning)})
    home = folder / "prefect"
    home.mkdir()
    with prefect_server(home) as (server, api):
        idle = processor_seconds(server.pid)
        first = run(path, dataset, api, home, shards // 2)
        second = run(path, dataset, api, home, shards)
        named = {"task_runs": {"name": {"like_": "shard-"}, "state": {"type": {"any_": ["COMPLETED"]}}}}
        lag = wait(lambda: ask(api, "/task_runs/count", named) >= shards, CATCH_UP_S)
        task_runs = ask(api, "/task_runs/count", {})
        whole = {"flows": {"name": {"any_": ["extract-hidden-states"]}}, "sort": "START_TIME_DESC"}
        parts = {"flows": {"name": {"any_": ["extract-shards"]}}, "sort": "START_TIME_ASC"}
        parent, children = ask(api, "/flow_runs/filter", whole)[0], ask(api, "/flow_runs/filter", parts)
        server_seconds = processor_seconds(server.pid) - idle
        pages = {"run": query_times(api, parent["id"])}
        if children:
            pages["child"] = query_times(api, children[0]["id"])
        server_peak = memory_peak_mb(server.pid)
    return {
        "shards": shards,
        "shards_per_child": per_child,
        "sealed": dataset.sealed,
        "plan": plan,
        "first": first,
        "second": second,
        "flow_runs": 2 + len(children),
        "task_runs": task_runs,
        "server": {
            "processor_ms_per_task_run": round(1e3 * server_seconds / task_runs, 1),
            "peak_rss_mb": round(server_peak),
            "database_mb": round(sum(file.stat().st_size for file in home.glob("prefect.db*")) / 1e6, 1),
            "behind_s": round(lag, 1),
        },
        "queries_ms": pages,
    }


def main() -> None:
    about, raw = __doc__, argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=raw)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--per-child", type=int, default=250, help="shards of a child run; 0: no child runs")
    parser.add_argument("--keep", type=Path, help="work in this folder and leave it")
    args = parser.parse_args()
    # A shell's background job ignores SIGINT, and so would the runs that are to be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = args.keep or Path(tempfile.mkdtemp(prefix="dflash-many-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        result = measure(folder, args.shards, args.per_child)
    finally:
        if args.keep is None:
            shutil.rmtree(folder)
    versions = {
        "python": platform.python_version(),
        "prefect": prefect.__version__,
        "torch": torch.__version__,
    }
    print(json.dumps({**result, "cores": os.cpu_count(), "versions": versions}, indent=1))


if __name__ == "__main__":
    main()
