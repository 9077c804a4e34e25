"""Where a run's numbers go: what TensorBoard and W&B hold afterwards."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from flows.train_log import METRICS_FILE, TENSORBOARD_FOLDER, WANDB_FILE, TrainLog


def write(folder: Path, steps: range) -> None:
    with TrainLog(folder, first=True, settings={"a": 1}, start_step=steps.start - 1) as out:
        for step in steps:
            values = {"loss": 1.0 / step, "slot_loss": [0.5, float("nan")], "nothing": None}
            out.metrics(step, values)


def await_next_second() -> None:
    """Wait until a new file of TensorBoard's comes after those that are there, as a resumed run's does.

    They are read in the order of their names: the second of the start, and within one second of one process a
    count of its writers, in which 10 comes before 9.
    """
    second = int(time.time())
    while int(time.time()) <= second:
        time.sleep(0.01)


def test_tensorboard_and_file_hold_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, range(1, 6))
    await_next_second()
    write(tmp_path, range(4, 8))
    board = EventAccumulator(str(tmp_path / TENSORBOARD_FOLDER)).Reload()
    assert board.Tags()["scalars"] == ["loss", "slot_loss/01"]
    found = {event.step: event.value for event in board.Scalars("loss")}
    assert found == pytest.approx({step: 1.0 / step for step in range(1, 8)})
    rows = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert rows[-1]["slot_loss"] == [0.5, None]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with TrainLog(tmp_path / "run", first=False, settings={}, start_step=0) as out:
        out.metrics(1, {"loss": 1.0})
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_is_the_same_run_on_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install -e '.[wandb]'")
    for name, value in {"MODE": "offline", "PROJECT": "dflash", "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    write(tmp_path, range(1, 4))
    run = (tmp_path / WANDB_FILE).read_text()
    write(tmp_path, range(3, 6))
    assert (tmp_path / WANDB_FILE).read_text() == run
    runs = {path.stem for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")}
    assert runs == {f"run-{run}"}
