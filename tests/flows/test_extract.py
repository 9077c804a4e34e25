"""Extraction from chats to a sealed data set: in plain Python, then as a Prefect flow on a real server."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from typer.testing import CliRunner

from dflash_core.chat import ChatConfig
from dflash_core.configuration import UserError
from dflash_core.records import CapturedSample
from dflash_core.target import Target, TargetOutOfMemory
from flows.channel import Unusable
from flows.config import ExtractConfig, TrainConfig, dump_config
from flows.extract_plan import plan_dataset
from flows.extract_steps import (
    ShardRunner,
    capture_slots,
    finish_dataset,
    open_pool,
    wanted_shards,
    write_responses,
)
from flows.extract_worker import ShardCapturer, device_errors
from flows.launch import WorkerDied, python_module
from storage.calibration import Calibration
from storage.dataset import Dataset, DatasetError, open_dataset
from storage.writer import ShardWriter
from tests.flows.conftest import errors_logged, newest_artifacts
from tests.flows.plain_extraction import run_extraction
from tests.storage.faulty_proxy import Rule, faulty_proxy
from tests.tiny import MASK_TOKEN_ID

MakeConfig = Callable[..., ExtractConfig]


def shard_files(dataset: Dataset) -> dict[str, str]:
    """Name -> etag of every shard object."""
    return {info.key: info.etag for info in dataset.store.list("shards/")}


def spoil(dataset: Dataset, shard: int) -> bytes:
    """Damage the input of a shard so that capturing it fails; return what was there."""
    key = f"samples/{shard:05d}.parquet"
    good = dataset.store.get(key)
    dataset.store.put_bytes(key, b"x" + good[1:], overwrite=True)
    return good


def test_shards_survive_a_killed_worker_and_are_written_once(
    extract_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = extract_config()
    dataset = plan_dataset(config)
    assert wanted_shards(dataset) == list(range(len(dataset.plan.shards))) and len(dataset.plan.shards) > 3
    batch = json.dumps({"kind": "progress", "what": "shard 1", "of": dataset.plan.shards[1].tokens})
    killed = [*python_module("tests.flows.signalled"), "SIGKILL", batch, str(tmp_path / "killed")]
    monkeypatch.setattr("flows.extract_steps.python_module", lambda name: [*killed, name])
    with open_pool(config, dataset) as pool:
        worker = pool.workers[0]
        runner = ShardRunner(pool, redo=False)
        runner.prepare(lambda message: None)
        first = runner.attempt(0, lambda message: None)
        assert not first["found"] and first["tokens"] == dataset.plan.shards[0].tokens
        with pytest.raises(WorkerDied, match="SIGKILL"):
            runner.attempt(1, lambda message: None)
        assert dataset.missing() == wanted_shards(dataset) == list(range(1, len(dataset.plan.shards)))
        for shard in dataset.missing():
            runner.attempt(shard, lambda message: None)
        assert worker.starts == 2
        before = shard_files(dataset)
        assert runner.attempt(0, lambda message: None)["found"]
        redone = ShardRunner(pool, redo=True).attempt(0, lambda message: None)
        assert not redone["found"]
        # The same input gives the same bytes, whoever captures it.
        assert set(shard_files(dataset)) == set(before)
    finish_dataset(dataset)
    assert open_dataset(dataset.uri).sealed
    again = plan_dataset(config)
    assert again.uri == dataset.uri and not wanted_shards(again)
    with pytest.raises(UserError, match=r"no such shards: \[99\]"):
        wanted_shards(again, [99])


class Ear:
    """Takes what a worker says to its parent."""

    def say(self, kind: str, **fields: Any) -> None:
        assert kind == "progress"

    def waiting(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def capturer_of(config: ExtractConfig) -> tuple[ShardCapturer, Dataset]:
    """A worker's innards in this process."""
    dataset = plan_dataset(config)
    target = config.target.model_dump(mode="json")
    setup = {"dataset": dataset.uri, "target": target, "writer": {}, "scratch": None, "parity_samples": 2}
    return ShardCapturer(Ear(), setup), dataset  # type: ignore[arg-type]


def test_a_slot_of_several_gpus_and_packed_batches_exclude_each_other(
    extract_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = extract_config()
    packed = config.model_copy(update={"target": config.target.model_copy(update={"batching": "packed"})})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match=r"several GPUs \(0,1\) .* workers.slots"):
        capturer_of(packed)


def test_out_of_memory_halves_the_batches_of_a_shard(extract_config: MakeConfig) -> None:
    capturer, dataset = capturer_of(extract_config(codec="lossless"))
    enough = capturer._capture_shard(0, replace=False)()
    real, sizes = Target.capture, []

    def small_device(target: Target, batch: list[Any]) -> list[CapturedSample]:
        sizes.append(len(batch) * max(sample.num_tokens for sample in batch))
        if sizes[-1] > 300:
            raise TargetOutOfMemory("no room")
        return real(target, batch)

    capturer.target.capture = small_device.__get__(capturer.target)  # type: ignore[method-assign]
    little = capturer._capture_shard(0, replace=True)()
    assert max(sizes) > 300 and little["token_budget"] <= 300 < enough["token_budget"]
    assert little["tokens"] == enough["tokens"] and little["samples"] == enough["samples"]
    for shard, tries_all in ((1, True), (2, False)):
        sizes.clear()
        capturer._capture_shard(shard, replace=False)()
        assert (max(sizes) > 300) == tries_all, "once is luck; what fails twice is remembered"
    capturer.target.capture = (  # type: ignore[method-assign]
        lambda batch: small_device(capturer.target, batch * 9)
    )
    with pytest.raises(UserError, match="out of memory on one sample"):
        capturer._capture_shard(0, replace=True)()
    assert dataset.missing() == list(range(3, len(dataset.plan.shards)))


@pytest.mark.parametrize("what", ["scales", "shard"])
def test_no_room_to_encode_halves_them_too(
    extract_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    capturer, dataset = capturer_of(extract_config(codec="tolerance=0.1" if what == "scales" else "lossless"))
    place = (Calibration if what == "scales" else ShardWriter), "add"
    real, added = getattr(*place), Counter[int]()

    def small_device(self: Any, *captured: Any) -> None:
        added[capturer.token_budget] += len(captured)
        if capturer.token_budget > 300 and added[capturer.token_budget] >= 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        real(self, *captured)

    monkeypatch.setattr(*place, small_device)
    result = capturer.run({"task": what, "shard": 0, "replace": False})
    if callable(result):
        result = result()
        assert result["token_budget"] == 256 and result["tokens"] == dataset.plan.shards[0].tokens
        assert dataset.committed(0)
    else:
        assert dataset.scales() is not None
    assert added[512] >= 3 and added[256] >= len(dataset.samples(0))

    def no_device(self: Any, *captured: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ShardWriter, "add", no_device)
    with pytest.raises(UserError, match="out of memory on one sample"):
        capturer.run({"task": "shard", "shard": 1, "replace": False})


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        ("CUDA error: an illegal memory access was encountered", Unusable),
        ("CUDA driver error: unspecified launch failure", Unusable),
        ("Triton Error [CUDA]: an illegal memory access was encountered", Unusable),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", Unusable),
        ("shapes do not fit", RuntimeError),
    ],
)
def test_a_broken_device_is_told_from_other_errors(error: str, raised: type[Exception]) -> None:
    with pytest.raises(RuntimeError, match=re.escape(error)) as caught, device_errors():
        raise RuntimeError(error)
    assert caught.type is raised


def test_a_target_that_is_spread_has_all_gpus_of_its_worker(
    extract_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slots(*named: str, device_map: Any = "auto") -> tuple[str, ...]:
        target = {**extract_config().target.model_dump(), "device_map": device_map}
        return capture_slots(extract_config(target=target, workers={"slots": named}))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert slots(device_map=None) == ("0", "1", "2", "3")
    assert slots() == ("0,1,2,3",)
    assert slots("0,1", "2,3") == ("0,1", "2,3") and slots("cpu") == ("cpu",)
    with pytest.raises(UserError, match=r"workers.slots \['2', '3'\] have one each"):
        slots("0,1", "2", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="drop device_map"):
        slots()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert slots() == ("cpu",)


def test_loading_the_target_that_answers_is_no_silence(
    extract_config: MakeConfig, chats: Path, tmp_path: Path
) -> None:
    responses = {"output": str(tmp_path / "responses"), "generation": {"max_new_tokens": 2}}
    workers = {"slots": ["cpu"], "silence_timeout_s": 0.5}
    config = extract_config(responses=responses, workers=workers, limit=2)
    write_responses(config, lambda message: None)
    assert len((tmp_path / "responses" / "part-00000.jsonl").read_text().splitlines()) == 2


def answered(text: str) -> str:
    """A chat as a line of JSON."""
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": text}]
    return json.dumps({"messages": turns})


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (["{", "[]"], r"2 of 20 chats cannot be used.*\n.*:19: .*not JSON.*\n.*:20"),
        ([json.dumps({"messages": [{"role": "user", "content": "no answer"}]})] * 2, "2 of 20 chats cannot"),
        ([json.dumps({"messages": [{"role": "ruler", "content": "hm"}]})] * 2, "ruler"),
        ([answered("half a pair: \ud83d")] * 2, "not valid Unicode"),
    ],
)
def test_bad_chats_end_the_run_and_leave_no_data_set(
    extract_config: MakeConfig, chats: Path, tmp_path: Path, bad: list[str], words: str
) -> None:
    spoilt = tmp_path / "spoilt.jsonl"
    spoilt.write_text(chats.read_text() + "\n".join(bad) + "\n")
    with pytest.raises(UserError, match=words):
        plan_dataset(extract_config(chats=[str(spoilt)]))
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    dataset = plan_dataset(extract_config(chats=[str(spoilt)], max_bad_fraction=0.2))
    assert dataset.plan.samples == 18


def test_a_missing_mask_token_is_told_before_anything_is_captured(
    extract_config: MakeConfig, train_config: Callable[..., TrainConfig], caplog: pytest.LogCaptureFixture
) -> None:
    config = extract_config()
    plan_dataset(config)
    assert not caplog.messages
    bare = config.model_copy(update={"target": config.target.model_copy(update={"mask_token": None})})
    spec = plan_dataset(bare).spec
    plan_dataset(bare)  # the shards may not be captured yet
    first, second = caplog.messages
    assert first == second and "has no default mask token; set target.mask_token to a token's text" in first
    assert "unused rows" in first and "drafter.mask_token_id" in first
    shape = train_config().drafter
    with pytest.raises(UserError, match=r"drafter\.mask_token_id"):
        shape.for_target(spec.target, spec.capture)
    named = shape.model_copy(update={"mask_token_id": MASK_TOKEN_ID})
    assert named.for_target(spec.target, spec.capture).mask_token_id == MASK_TOKEN_ID


def test_a_mask_token_that_cannot_be_is_refused_at_planning(extract_config: MakeConfig) -> None:
    config = extract_config()
    for wrong in ("no such token", 320, -1):
        target = config.target.model_copy(update={"mask_token": wrong})
        with pytest.raises(UserError, match="mask_token"):
            plan_dataset(config.model_copy(update={"target": target}))
    assert not Path(config.store).exists()


def test_a_chat_that_holds_the_mask_token_is_bad(extract_config: MakeConfig) -> None:
    target = {**extract_config().target.model_dump(), "mask_token": "<|im_end|>"}
    with pytest.raises(UserError, match="holds the mask token"):
        plan_dataset(extract_config(target=target))


def test_a_second_chat_of_the_same_id_is_dropped_and_said(
    extract_config: MakeConfig, chats: Path, caplog: pytest.LogCaptureFixture
) -> None:
    twice = [str(chats), str(chats)]
    dataset = plan_dataset(extract_config(chats=twice))
    assert (dataset.plan.samples, dataset.plan.duplicates_dropped) == (18, 18)
    assert "18 chats had the id of an earlier one and were dropped" in caplog.text
    with pytest.raises(DatasetError, match="duplicate_ids: drop"):
        plan_dataset(extract_config(chats=twice, duplicate_ids="error"))


def test_whatever_changes_the_content_changes_the_data_set(extract_config: MakeConfig) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"chat": ChatConfig(max_length=64).model_dump()},
        {"limit": 5},
        {"codec": "lossless"},
        {"shard_tokens": 500},
    ]
    uris = [plan_dataset(extract_config(**change)).uri for change in changes]
    assert len(set(uris)) == len(changes)
    same = extract_config(workers={"slots": ["cpu", "cpu"]}, parity_samples=1)
    assert plan_dataset(same).uri == uris[0]


@pytest.mark.usefixtures("prefect")
def test_a_failed_shard_is_set_aside_and_a_second_run_does_only_that(
    extract_config: MakeConfig, tmp_path: Path
) -> None:
    from flows.extract import extract_hidden_states

    config = extract_config(workers={"slots": ["cpu"], "attempts": 1}, codec="lossless")
    dataset = plan_dataset(config)
    good = spoil(dataset, 1)
    with pytest.raises(DatasetError, match="damaged"):
        dataset.samples(1)

    state = extract_hidden_states(config, return_state=True)
    assert state.is_failed() and "1 shards failed: 1;" in (state.message or "")
    first, second = errors_logged(state)
    assert first.startswith("shard 1 is set aside: ") and "--only 1" in second
    assert dataset.missing() == [1] and not dataset.sealed
    before = shard_files(dataset)

    dataset.store.put_bytes("samples/00001.parquet", good, overwrite=True)
    result = CliRunner().invoke(cli_app(), ["extract", "--config", str(write(tmp_path, config))])
    assert result.exit_code == 0, result.output
    dataset = open_dataset(dataset.uri)
    assert dataset.sealed and not dataset.missing()
    assert before.items() < shard_files(dataset).items()

    artifacts = newest_artifacts()
    assert {"extraction-progress", "shards", "failed-shards", "data-set"} <= set(artifacts)
    assert "--only 1" in str(artifacts["failed-shards"])
    assert dataset.uri in str(artifacts["data-set"])


@pytest.mark.usefixtures("prefect")
@pytest.mark.parametrize("shards_per_child", [0, 8])
def test_a_cause_that_lasts_ends_the_run(
    extract_config: MakeConfig, tmp_path: Path, shards_per_child: int
) -> None:
    workers = {"slots": ["cpu"], "attempts": 1}
    config = extract_config(
        workers=workers, codec="lossless", shard_tokens=100, shards_per_child=shards_per_child
    )
    dataset = plan_dataset(config)
    planned = len(dataset.plan.shards)
    assert planned > 9
    good = {shard: spoil(dataset, shard) for shard in range(1, planned)}

    from flows.extract import extract_hidden_states

    state = extract_hidden_states(config, return_state=True)
    error = state.result(raise_on_failure=False)
    assert state.is_failed() and isinstance(error, UserError)
    assert re.search(r"4 shards in a row .*\n.*damaged", str(error))
    assert dataset.missing() == list(range(1, planned)) and not dataset.sealed
    told = errors_logged(state)
    assert told[-1] == str(error) and "redo just them with\ndflash extract --config FILE\n" in told[-2]
    # A spoilt one fails at once: up to 3 do while the sound one is captured (a fourth would end the run),
    # then 4 in a row, and one more was in work at the end.
    assert sum(" is set aside: " in line for line in told) <= 3 + 4 + 1

    for shard, data in good.items():
        dataset.store.put_bytes(f"samples/{shard:05d}.parquet", data, overwrite=True)
    result = CliRunner().invoke(cli_app(), ["extract", "--config", str(write(tmp_path, config))])
    assert result.exit_code == 0, result.output
    assert open_dataset(dataset.uri).sealed


@pytest.mark.usefixtures("prefect")
@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_a_server_that_refuses_artifacts_costs_warnings_alone(
    extract_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    from flows.extract import extract_hidden_states

    port = urlsplit(PREFECT_API_URL.value() or "").port
    assert port is not None
    config = extract_config(limit=4)
    with faulty_proxy(port) as proxy:
        relay: Any = proxy.RequestHandlerClass
        monkeypatch.setattr(relay, "do_PATCH", relay.do_GET, raising=False)
        proxy.rules = [Rule("refuse", method, "/api/artifacts", times=99)]
        settings = {PREFECT_API_URL: f"{proxy.endpoint}/api", PREFECT_CLIENT_MAX_RETRIES: 0}
        with temporary_settings(settings):
            state = extract_hidden_states(config, return_state=True)
            told = errors_logged(state, logging.WARNING)
    assert state.is_completed() and "refuse" in proxy.met
    assert any("503" in line for line in told)


@pytest.mark.usefixtures("prefect")
def test_named_shards_are_redone_whatever_else_is_missing(extract_config: MakeConfig) -> None:
    from flows.extract import extract_hidden_states

    config = extract_config(codec="lossless")
    dataset = plan_dataset(config)
    planned = range(len(dataset.plan.shards))
    state = extract_hidden_states(config, only=[1, 3], return_state=True)
    assert state.is_completed() and f"{len(planned) - 2} others of" in (state.message or "")
    assert dataset.missing() == [shard for shard in planned if shard not in (1, 3)] and not dataset.sealed
    (warning,) = errors_logged(state, logging.WARNING)
    assert "not sealed yet" in warning and "dflash extract --config FILE\n" in warning

    rest, outcome = run_extraction(config, dataset.missing())
    assert rest.sealed and not outcome.left and not outcome.failed


@pytest.mark.usefixtures("prefect")
def test_a_large_plan_is_split_into_child_runs_that_share_their_workers(
    extract_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    from prefect.client.orchestration import get_client

    from flows.extract import extract_hidden_states

    config = extract_config(shards_per_child=3, codec="fp8")
    planned = len(plan_dataset(config).plan.shards)
    assert planned > 3
    task_log = logging.getLogger("prefect.task_runs")
    task_log.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "prefect")
    try:
        state = extract_hidden_states(config, return_state=True)
    finally:
        task_log.removeHandler(caplog.handler)
    assert state.is_completed(), state.message
    with get_client(sync_client=True) as client:
        names = {run.name for run in client.read_flow_runs()}
    assert {"shards-00000-00002", f"shards-{planned - planned % 3:05d}-{planned - 1:05d}"} <= names
    assert len(set(re.findall(r"process (\d+) is ready", caplog.text))) == 1, caplog.text


@pytest.mark.usefixtures("prefect")
def test_one_bad_shard_condemns_no_other_of_its_child_run(extract_config: MakeConfig) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter

    from flows.extract import extract_hidden_states

    workers = {"slots": ["cpu"], "attempts": 1}
    config = extract_config(shards_per_child=3, shard_tokens=300, codec="lossless", workers=workers)
    dataset = plan_dataset(config)
    planned = len(dataset.plan.shards)
    assert planned > 5
    spoil(dataset, 1)
    spoil(dataset, 4)
    state = extract_hidden_states(config, only=list(range(planned)), return_state=True)
    assert state.is_failed() and "2 shards failed: 1, 4;" in (state.message or "")
    assert dataset.missing() == [1, 4]
    assert "--only 1,4\n" in errors_logged(state)[-1]
    this = ArtifactFilter.model_validate({"flow_run_id": {"any_": [state.state_details.flow_run_id]}})
    with get_client(sync_client=True) as client:
        shown = {a.key: str(a.data) for a in client.read_artifacts(artifact_filter=this)}
    for shard in (1, 4):
        assert re.search(rf"\n\| {shard} \| .*samples/{shard:05d}\.parquet", shown["failed-shards"]), shown
    counts = [(row["state"], row["done"], row["failed"]) for row in json.loads(shown["child-runs"])]
    assert counts[:2] == [("Failed", 2, 1)] * 2 and sum(done for _, done, _ in counts) == planned - 2


@pytest.mark.usefixtures("prefect")
def test_children_without_a_place_are_told_of_and_end_with_their_parent(
    extract_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect import flow
    from prefect.client.orchestration import get_client

    from flows import extract_children
    from flows.extract_shards import extract_shards

    monkeypatch.setattr(extract_children, "STARVED_AFTER_S", 1.0)
    monkeypatch.setattr(extract_children, "LOOK_EVERY_S", 0.2)
    config = extract_config()
    children = [extract_children.Child([0, 1]), extract_children.Child([2])]

    def parameters(child: extract_children.Child) -> dict[str, Any]:
        values = {"dataset": "nowhere", "shards": child.shards, "redo": False}
        return {"config": config.model_dump(mode="json"), **values}

    @flow
    def parent() -> None:
        with extract_children.ShownChildren(children) as table:
            extract_children._run_on_the_pool(children, parameters, table)

    class Interrupt(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "wait for a free place" in record.getMessage():
                told.append(record.getMessage())
                raise KeyboardInterrupt

    told: list[str] = []
    interrupt = Interrupt()
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(extract_shards), "extract-shards")
        logging.getLogger("prefect.flow_runs").addHandler(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                parent()
        finally:
            logging.getLogger("prefect.flow_runs").removeHandler(interrupt)
            states = {run: client.read_flow_run(run).state for run in [c.run for c in children] if run}
            client.delete_deployment(deployment)
    assert told[0].startswith("2 child runs wait for a free place, none is at work: ")
    assert [state.name for state in states.values() if state] == ["Cancelled"] * 2


def cli_app() -> Any:
    from flows.cli import app

    return app


@pytest.mark.usefixtures("prefect")
def test_an_interrupt_between_two_child_runs_ends_the_extraction(extract_config: MakeConfig) -> None:
    from flows.extract import extract_hidden_states
    from flows.extract_shards import extract_shards

    def interrupt(flow: Any, run: Any, state: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    config = extract_config(shards_per_child=2, codec="fp8")
    dataset = plan_dataset(config)
    extract_shards.on_completion_hooks.append(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            extract_hidden_states(config, return_state=True)
    finally:
        extract_shards.on_completion_hooks.remove(interrupt)
    assert len(dataset.plan.shards) - len(dataset.missing()) == 2


def write(folder: Path, config: ExtractConfig) -> Path:
    path = folder / "extract.yaml"
    path.write_text(dump_config(config))
    return path
