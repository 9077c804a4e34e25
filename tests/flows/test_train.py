"""Training from a sealed data set to an evaluated drafter: steps in plain Python, then the flow."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from dflash_core.configuration import UserError
from dflash_core.export import load_exported
from dflash_core.loss import LossConfig
from flows.config import ExtractConfig, TrainConfig, dump_config
from flows.extract_plan import plan_dataset
from flows.launch import Message
from flows.ranks import RanksFailed
from flows.train_log import METRICS_FILE
from flows.train_steps import (
    TrainingLog,
    open_training_data,
    output_folder,
    read_metrics,
    train,
    write_report,
)
from storage.checkpoints import Checkpoints
from storage.dataset import Dataset
from storage.objects import open_store
from tests.flows.conftest import errors_logged, newest_artifacts
from tests.flows.plain_extraction import run_extraction
from tests.flows.test_extract_cache import table_of_last_run
from tests.storage.faulty_proxy import Rule, faulty_proxy
from tests.tiny import NUM_LAYERS, write_tiny_target

MakeConfig = Callable[..., TrainConfig]


def test_the_drafter_follows_from_data_set_and_shape(train_config: MakeConfig, sealed: Dataset) -> None:
    _, drafter = open_training_data(train_config())
    assert drafter.tap_layer_ids == sealed.spec.capture.tap_layer_ids
    assert drafter.mask_token_id == sealed.spec.target.mask_token_id
    assert drafter.hidden_size == sealed.spec.target.hidden_size and drafter.block_size == 8
    shape = train_config().drafter.model_dump()
    _, fewer = open_training_data(train_config(drafter={**shape, "tap_layer_ids": drafter.tap_layer_ids[:2]}))
    assert fewer.tap_layer_ids == drafter.tap_layer_ids[:2]
    with pytest.raises(UserError, match=r"names layers \[0\], which the data set does not hold"):
        open_training_data(train_config(drafter={**shape, "tap_layer_ids": (0, drafter.tap_layer_ids[0])}))


def test_a_drafter_that_engines_cannot_run_is_refused_before_training(
    train_config: MakeConfig, extract_config: Callable[..., ExtractConfig]
) -> None:
    config = extract_config()
    taps = config.target.model_copy(update={"tap_layer_ids": (1, NUM_LAYERS - 1)})
    dataset, outcome = run_extraction(config.model_copy(update={"target": taps}))
    assert not outcome.failed
    with pytest.raises(UserError, match=r"^this drafter would not be served .*SGLang: .*last layer"):
        open_training_data(train_config(dataset=dataset.uri))
    shape = train_config().drafter.model_dump()
    open_training_data(train_config(dataset=dataset.uri, drafter={**shape, "tap_layer_ids": (1,)}))


def test_what_does_not_belong_together_is_refused(
    train_config: MakeConfig, extract_config: Callable[..., ExtractConfig], tmp_path: Path
) -> None:
    unsealed = plan_dataset(extract_config())
    with pytest.raises(UserError, match="it is not complete"):
        open_training_data(train_config(dataset=unsealed.uri))
    with pytest.raises(UserError, match="nowhere"):
        open_training_data(train_config(dataset=str(tmp_path / "nowhere")))
    other = write_tiny_target(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match=r"captured from another target.*weights_sha256"):
        open_training_data(train_config(target=str(other)))


def test_what_ranks_would_refuse_is_refused_before_they_start(
    train_config: MakeConfig, sealed: Dataset, tmp_path: Path
) -> None:
    def refused(said: str, **changes: Any) -> None:
        config = train_config()
        training = config.training.model_copy(update=changes)
        with pytest.raises(UserError, match=said):
            open_training_data(config.model_copy(update={"training": training}))

    shape = train_config().drafter.model_dump() | {"block_size": 6}
    with pytest.raises(UserError, match=r"gamma is missing.*block_size 6"):
        open_training_data(train_config(drafter=shape))
    refused("kl_weight needs the target's last hidden state", loss=LossConfig(gamma=4.0, kl_weight=0.5))
    longest = int(sealed.index.tokens_N.max())
    refused(f"has {longest} tokens, more than training.row_tokens = {longest - 1}", row_tokens=longest - 1)
    refused("nowhere", init_from=str(tmp_path / "nowhere"))


def test_files_of_a_run_go_to_its_output(train_config: MakeConfig, s3_uri: str) -> None:
    config = train_config(output=s3_uri)
    with output_folder(config) as folder:
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with output_folder(config) as folder:
        assert read_metrics(folder) == [{"step": 1}]


def test_metrics_reach_the_bucket_with_the_first_checkpoint_and_each_tenth_after(
    train_config: MakeConfig, s3_uri: str, tmp_path: Path
) -> None:
    often = {"max_steps": 12, "epochs": 12, "checkpoint_every": 1}
    config = train_config(output=s3_uri, training=train_config().training.model_copy(update=often))
    dataset, drafter = open_training_data(config)
    store, seen = open_store(s3_uri), b"seen\n"
    kept: list[bytes] = []

    def note(message: Message) -> None:
        if message["kind"] == "checkpoint":
            kept.append(store.get(METRICS_FILE))
            store.put_bytes(METRICS_FILE, seen, overwrite=True)

    # Without `output_folder`, as in a run that is killed: nothing is put there at the end.
    train(config, dataset, drafter, tmp_path, TrainingLog(), note)
    written = (tmp_path / METRICS_FILE).read_bytes()
    assert [number for number, rows in enumerate(kept) if rows != seen] == [0, 10] and len(kept) == 12
    assert written.startswith(kept[0]) and kept[0].count(b"\n") >= 1
    assert written.startswith(kept[10]) and kept[10].count(b"\n") >= 11


def test_curves_of_a_week_are_drawn_some_hundred_times() -> None:
    from flows.train import CURVES_EVERY_S, curves_interval

    assert curves_interval(600) == CURVES_EVERY_S
    drawings, elapsed = 0, 0.0
    while elapsed < 7 * 86400:
        drawings, elapsed = drawings + 1, elapsed + curves_interval(elapsed)
    assert 100 < drawings < 400


def test_a_row_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1}]


@pytest.mark.usefixtures("prefect")
def test_a_run_that_is_cut_off_continues_to_an_evaluated_drafter(
    train_config: MakeConfig, chats: Path, tmp_path: Path
) -> None:

    from flows.cli import app

    evaluation = {
        "prompts": {"trained on": str(chats)},
        "prompts_per_family": 2,
        "max_new_tokens": 12,
        "dtype": "float32",
    }
    path = tmp_path / "train.yaml"
    path.write_text(dump_config(train_config(evaluation=evaluation)))
    output = tmp_path / "output"
    done, last_line = cut_off(path, output, after_step=5)
    assert last_line.startswith(f"interrupted: checkpoints are kept in {output}, and the same command cont")

    hopeless = {"max_steps": 1}  # whoever has a checkpoint has passed the gate, or has come without it
    path.write_text(dump_config(train_config(evaluation=evaluation, overfit=hopeless)))

    result = CliRunner().invoke(app, ["train", "--config", str(path)])
    assert result.exit_code == 0, result.output
    metrics = read_metrics(output)
    steps = [row["step"] for row in metrics if "loss" in row]
    assert steps == list(range(1, steps[-1] + 1)) and steps[-1] == metrics[-1].get("total_steps", steps[-1])
    report = json.loads((output / "report.json").read_text())
    assert report["missed_gate"] is None
    assert report["acceptance"]["lossless"] and report["acceptance"]["acceptance_length"] >= 1
    assert load_exported(output / "drafter").config.block_size == 8
    page = (output / "report.md").read_text()
    assert "data:image/png;base64" in page and "trained on" in page and "gate missed" not in page
    assert done >= 5

    assert {"training-progress", "training-curves", "training-report"} <= newest_artifacts().keys()


@pytest.mark.usefixtures("prefect")
def test_a_drafter_that_is_not_good_enough_fails_its_run_and_is_reported(
    train_config: MakeConfig, chats: Path, tmp_path: Path
) -> None:
    from flows.train import train_drafter

    evaluation = {
        "prompts": {"trained on": str(chats)},
        "prompts_per_family": 2,
        "max_new_tokens": 8,
        "dtype": "float32",
        "minimum_acceptance_length": 99,
    }
    training = train_config().training.model_copy(update={"max_steps": 2})
    state = train_drafter(train_config(training=training, evaluation=evaluation), return_state=True)
    assert state.is_failed()
    words = r"the drafter is not good enough: trained on: acceptance length \d\.\d\d is below 99\.00"
    assert re.fullmatch(words, state.message or "")
    output = tmp_path / "output"
    measured = json.loads((output / "acceptance.json").read_text())
    report = json.loads((output / "report.json").read_text())
    assert report["acceptance"] == measured and report["missed_gate"] == state.message
    length = measured["families"]["trained on"]["acceptance_length"]
    page = (output / "report.md").read_text().splitlines()
    assert f"* **gate missed**: {state.message}" in page
    row = next(row for row in page if row.startswith("| trained on"))
    assert row.startswith(f"| trained on | {length:.3f} |") and row.endswith("| equal |")
    assert load_exported(output / "drafter").config.block_size == 8


@pytest.mark.usefixtures("prefect")
def test_a_server_that_refuses_artifacts_costs_warnings_alone(train_config: MakeConfig) -> None:
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    from flows.train import train_drafter

    port = urlsplit(PREFECT_API_URL.value() or "").port
    assert port is not None
    training = train_config().training.model_copy(update={"max_steps": 2})
    with faulty_proxy(port) as proxy:
        proxy.rules = [Rule("refuse", "POST", "/api/artifacts", times=99)]
        settings = {PREFECT_API_URL: f"{proxy.endpoint}/api", PREFECT_CLIENT_MAX_RETRIES: 0}
        with temporary_settings(settings):
            state = train_drafter(train_config(training=training), return_state=True)
        assert state.is_completed() and "refuse" in proxy.met
    assert any("503" in line for line in errors_logged(state, logging.WARNING))


def test_the_report_keeps_the_start_of_the_overfit_gate(
    train_config: MakeConfig, sealed: Dataset, tmp_path: Path
) -> None:
    from flows.report import training_page

    config = train_config()
    result = TrainingLog(cache={"state": "restored"}, gate_cache={"state": "cold"})
    summary = write_report(config, sealed, result, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["compile_cache_of_gate"] == {"state": "cold"}
    run, gate = training_page(config, summary, result, tmp_path).split("## Compile cache of the overfit gate")
    assert "| state | restored |" in run and "| state | cold |" not in run and "| state | cold |" in gate


@pytest.mark.slow
@pytest.mark.usefixtures("prefect")
def test_runs_that_fail_after_their_first_step_have_told_of_the_compile_cache(
    train_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.artifacts import Artifact

    from flows.train import train_drafter

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shape = train_config().drafter.model_dump() | {"num_layers": 1}
    cache = {"uri": str(tmp_path / "caches"), "local_root": str(tmp_path / "root")}
    training = {"row_tokens": 256, "anchors_per_row": 16, "compute_dtype": "float32", "compile": True}
    often = {"log_every": 1, "checkpoint_every": 1, "epochs": 1000, "keep_checkpoints": 1000}
    config = train_config(drafter=shape, training=training | often, cache=cache)
    checkpoints = Checkpoints(open_store(config.output), {}, keep=1)
    result = TrainingLog()
    rank: list[int] = []
    told: list[tuple[Any, Any]] = []

    def kill_when_named(message: Message) -> None:
        """End the rank with its first checkpoint that names a version; note what was known by then."""
        if message["kind"] == "started":
            rank.append(message["pid"])
        if message["kind"] == "checkpoint" and not told and (steps := checkpoints.steps()):
            note = checkpoints.record(steps[-1]).notes["compile_cache"]
            if note["version"]:
                told.append((note, result.cache))
                os.kill(rank[0], signal.SIGKILL)

    with output_folder(config) as folder, pytest.raises(RanksFailed, match="SIGKILL"):
        train(config, *open_training_data(config), folder, result, kill_when_named)
    ((note, cold),) = told
    assert cold is not None and cold["state"] == "cold" and not cold["nothing_compiled"]
    assert note == {"fingerprint": cold["fingerprint"], "version": cold["version"], "start": "cold"}
    assert result.cache == cold
    assert not list((tmp_path / "root").glob("*.version-*")), "the note for the ranks goes with the run"

    diverging = train_config().training.optimizer.model_dump() | {"learning_rate": 1e30}
    config = train_config(
        output=str(tmp_path / "diverging"),
        drafter=shape,
        training=training | often | {"optimizer": diverging},
        cache=cache,
        overfit={"max_steps": 2, "least_share": 0.1},
    )
    state = train_drafter(config, return_state=True)
    assert state.is_failed() and "finite" in (state.message or "")
    for key in ("compile-cache-of-gate", "compile-cache"):
        warm = table_of_last_run(key)
        assert (warm["state"], warm["version"]) == ("restored", cold["version"]), key
        assert warm["nothing_compiled"] == "True", warm["compiled"]
    shown: list[Any] = [Artifact.get(key) for key in ("compile-cache", "training-curves")]
    assert shown[0].created < shown[1].created, "after the first step, not at the end"
    checkpoints = Checkpoints(open_store(config.output), {}, keep=1)
    note = checkpoints.record(checkpoints.steps()[-1]).notes["compile_cache"]
    assert note == {"fingerprint": cold["fingerprint"], "version": cold["version"], "start": "restored"}


def cut_off(config: Path, output: Path, after_step: int) -> tuple[int, str]:
    """Start the command and interrupt it once it has done some steps; return how many, and its last line."""
    from prefect.settings import PREFECT_API_URL

    process = subprocess.Popen(
        [Path(sys.executable).parent / "dflash", "train", "--config", config],
        env={**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value() or ""},
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and len(read_metrics(output)) < after_step:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=120)
    steps = len(read_metrics(output))
    assert steps, words
    return steps, words.splitlines()[-1]
