"""A command without a Prefect server: it brings one of its own, which is there until the run has ended."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.config import ExtractConfig, dump_config
from flows.ranks import descendants
from storage.dataset import open_dataset

pytestmark = pytest.mark.slow
DFLASH = Path(sys.executable).parent / "dflash"


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_stopped_command_ends_soon_with_its_server_and_can_be_run_again(
    extract_config: Callable[..., ExtractConfig], chats: Path, tmp_path: Path, stop: signal.Signals
) -> None:
    many = tmp_path / "many.jsonl"
    lines = [json.loads(line) for line in chats.read_text().splitlines()]
    copies = [{**line, "id": f"{line['id']} copy {copy}"} for copy in range(5) for line in lines]
    many.write_text("".join(json.dumps(line) + "\n" for line in copies))
    config = extract_config(chats=[str(many)])
    (tmp_path / "extract.yaml").write_text(dump_config(config))
    home = tmp_path / "prefect"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment["PREFECT_HOME"] = str(home)

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [DFLASH, "extract", "--config", "extract.yaml"],
            cwd=tmp_path,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Under nohup it would be ignored, by the command as well.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )

    command = start()
    wait_until(lambda: any((tmp_path / "store").glob("*/records/*")), command)
    helpers = descendants(command.pid)
    os.killpg(command.pid, stop)  # as a terminal does: the whole group hears it
    _, words = command.communicate(timeout=90)
    assert command.returncode not in (0, None) and "using a temporary one" in words
    last_line = words.splitlines()[-1]
    assert last_line.startswith(f"interrupted: finished shards are kept in {config.store}, and the same com")
    assert helpers and not [pid for pid in helpers if Path(f"/proc/{pid}").exists()]
    assert states(home) == ["CRASHED"]
    dataset = open_dataset(str(tmp_path / "store"))
    assert not dataset.sealed and dataset.missing()
    if stop != signal.SIGTERM:
        return  # once is enough

    command = start()
    _, words = command.communicate(timeout=300)
    assert command.returncode == 0, words
    assert dataset.sealed and sorted(states(home)) == ["COMPLETED", "CRASHED"]


def wait_until(look: Callable[[], bool], command: subprocess.Popen[str], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end and command.poll() is None, command.stderr
        time.sleep(0.1)


def states(home: Path) -> list[str]:
    """Read from a server's database, which it has left, how its flow runs ended."""
    with sqlite3.connect(home / "prefect.db") as database:
        return [
            state
            for (state,) in database.execute(
                "select state_type from flow_run where parent_task_run_id is null"
            )
        ]
