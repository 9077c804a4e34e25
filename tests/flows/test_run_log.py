"""An error is told once, where people look; what is not foreseen keeps its traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.config import ExtractConfig, TrainConfig, dump_config
from tests.flows.conftest import errors_logged

pytestmark = pytest.mark.usefixtures("prefect")


def test_what_the_user_can_mend_is_one_record_of_the_run(train_config: Callable[..., TrainConfig]) -> None:
    from flows.train import train_drafter

    state = train_drafter(train_config(dataset="absent"), return_state=True)
    assert state.is_failed() and "absent" in (state.message or "")
    assert errors_logged(state) == [state.message]


def test_what_the_user_can_mend_is_one_line_of_the_command_and_exit_code_two(
    extract_config: Callable[..., ExtractConfig], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from flows.cli import app

    path = tmp_path / "extract.yaml"
    path.write_text(dump_config(extract_config(chats=["absent.jsonl"])))
    result = CliRunner().invoke(app, ["extract", "--config", str(path)])
    assert result.exit_code == 2
    assert "error: input 'absent.jsonl' does not exist" in result.output
    assert (result.output + "".join(capfd.readouterr())).count("absent.jsonl") == 1
    assert not (tmp_path / "store").exists()


def test_what_a_worker_tells_is_not_told_again_but_faults_of_ours_keep_their_traceback() -> None:
    from prefect import flow, task

    from flows.launch import WorkerDied
    from flows.run_log import relay_logs, tell_error, value, without_traceback

    @task
    def step(error: Exception) -> None:
        def fail() -> None:
            raise error

        return without_traceback(fail)

    @flow
    def run(error: Exception) -> None:
        with relay_logs():
            try:
                value(step(error))
            except WorkerDied as told:
                tell_error(told)
                raise

    assert errors_logged(run(WorkerDied("worker 1 died"), return_state=True)) == ["worker 1 died"]
    records = errors_logged(run(KeyError("a fault"), return_state=True))
    assert all("Traceback" in record and "a fault" in record for record in records) and records
