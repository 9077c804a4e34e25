"""One rank's main loop on a real small data set: it learns, validates, stops, resumes bit for bit, and
exports.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from dflash_core.compile_watch import Watch
from dflash_core.configuration import UserError
from dflash_core.distributed import World
from dflash_core.export import load_exported
from dflash_core.training import NonFiniteError, TrainingConfig
from flows.config import TrainConfig
from flows.launch import Message
from flows.ranks import RanksFailed, run_ranks
from flows.train_data import StepPlace, TrainingData
from flows.train_worker import TrainJob, identity_of, load_weights, train, warn_of_idle_parts
from storage.checkpoints import Checkpoints
from storage.dataset import Dataset, open_dataset
from storage.objects import open_store
from tests.storage.made import TARGET, VOCABULARY, WIDTH, made_dataset, made_samples, made_spec, write_missing

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """60 samples, sealed."""
    folder = tmp_path_factory.mktemp("data")
    target = TARGET.model_copy(update={"mask_token_id": VOCABULARY - 1})
    made = made_dataset(folder, made_spec("lossless", target=target), made_samples(60))
    write_missing(made, folder)
    return open_dataset(made.uri)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Config, embedding and head of a target of the data set's shape."""
    folder = tmp_path_factory.mktemp("target")
    Qwen3Config(hidden_size=WIDTH, vocab_size=VOCABULARY, num_hidden_layers=6).save_pretrained(folder)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    torch.manual_seed(0)
    save_file({name: torch.randn(VOCABULARY, WIDTH) for name in names}, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums must not depend on the number of threads, and SIGTERM must end pytest again afterwards."""
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, handler)


def make_job(dataset: Dataset, target: str, folder: Path, **training: Any) -> TrainJob:
    values: dict[str, Any] = {
        "row_tokens": 64,
        "anchors_per_row": 12,
        "rows_per_step": 2,
        "max_steps": 12,
        "compute_dtype": "float32",
        "loss": {"gamma": 3.0},
        "optimizer": {"learning_rate": 3e-3, "ema_decay": 0.9},
        "validation_fraction": 0.2,
        "validate_every": 6,
        "checkpoint_every": 5,
        "log_every": 1,
    }
    shape = {"block_size": 4, "num_layers": 2, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2}
    config = TrainConfig.model_validate(
        {
            "dataset": dataset.uri,
            "target": target,
            "output": str(folder),
            "drafter": shape | {"head_dim": 8, "tap_layer_ids": (1, 3)},
            "training": values | training,
            "cpu_ranks": 1,
        }
    )
    drafter = config.drafter.for_target(dataset.spec.target, dataset.spec.capture)
    return TrainJob(config=config, drafter=drafter, dataset=dataset.uri, export=str(folder / "drafter"))


def run_here(job: TrainJob) -> None:
    folder = Path(job.config.output)
    folder.mkdir(parents=True, exist_ok=True)
    train(job, folder, ALONE, Watch.from_environment())


def metrics(job: TrainJob) -> list[dict[str, Any]]:
    lines = (Path(job.config.output) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def last_state(job: TrainJob) -> dict[str, torch.Tensor]:
    checkpoints = Checkpoints(open_store(job.config.output), {}, keep=9)
    return checkpoints.load(checkpoints.record(checkpoints.steps()[-1]))


def write_job(job: TrainJob) -> str:
    folder = Path(job.config.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(job.model_dump_json())
    return str(folder / "run.json")


def stopped_when(
    job: TrainJob, folder: Path, ranks: int, gpus: Sequence[str] = (), **said: Any
) -> dict[str, Any]:
    """Run the ranks, of which the first is asked to stop when it has said this; return its last message."""
    heard: list[dict[str, Any]] = []
    arguments = ["SIGTERM", json.dumps(said), str(folder / "asked"), "flows.train_worker", write_job(job)]
    environment = {"OMP_NUM_THREADS": "1"}
    run_ranks(
        "tests.flows.signalled",
        arguments,
        ranks=ranks,
        gpus=gpus,
        environment=environment,
        on_message=heard.append,
    )
    return next(message for message in heard if message["kind"] == "finished")


@pytest.fixture(scope="module")
def whole(dataset: Dataset, target: str, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """A run from start to end on one rank."""
    torch.set_num_threads(1)
    job = make_job(dataset, target, tmp_path_factory.mktemp("whole"))
    run_here(job)
    return job


def test_a_run_learns_validates_and_exports(whole: TrainJob, dataset: Dataset) -> None:
    rows = metrics(whole)
    training = [row for row in rows if "loss" in row]
    assert [row["step"] for row in training] == list(range(1, 13))
    assert training[-1]["loss"] < training[0]["loss"]
    assert training[-1]["total_steps"] == 12 and training[0]["learning_rate"] > 0
    validation = [row for row in rows if "validation/acceptance_length" in row]
    assert [row["step"] for row in validation] == [6, 12]
    checkpoints = Checkpoints(open_store(whole.config.output), {}, keep=9)
    assert checkpoints.steps() == [6, 10, 12]
    best = checkpoints.best()
    assert best is not None and best.score == max(r["validation/acceptance_length"] for r in validation)
    drafter = load_exported(Path(whole.export), target=dataset.spec.target, dtype=torch.float32)
    saved = checkpoints.load(checkpoints.record(best.optimizer_step))
    assert torch.equal(drafter.fc.weight.bfloat16(), saved["optimizer/ema/fc.weight"].bfloat16())
    assert list((Path(whole.config.output) / "tensorboard").iterdir())


def test_a_finished_run_is_not_repeated(whole: TrainJob) -> None:
    before = metrics(whole)
    run_here(whole)
    assert metrics(whole) == before


def test_stopped_and_resumed_equals_uninterrupted(
    whole: TrainJob, dataset: Dataset, target: str, tmp_path: Path
) -> None:
    job = make_job(dataset, target, tmp_path / "stopped")
    finished = stopped_when(job, tmp_path, ranks=1, kind="started")
    assert finished["stopped"] and 0 < finished["optimizer_step"] < 12
    assert not Path(job.export).exists()
    run_here(job)
    expected, found = last_state(whole), last_state(job)
    assert expected.keys() == found.keys() and len(expected) > 50
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    losses = [(row["step"], row["loss"]) for row in metrics(job) if "loss" in row]
    assert losses == [(row["step"], row["loss"]) for row in metrics(whole) if "loss" in row]


def whole_and_stopped(
    dataset: Dataset, target: str, folder: Path, gpus: Sequence[str] = (), **training: Any
) -> tuple[list[Message], TrainJob, TrainJob]:
    """Run ranks to the end, and others that are stopped after eight steps and continued; return what the
    first ones said. The shapes are such that a GPU can take them.
    """
    values = {"row_tokens": 128, "anchors_per_row": 32, "epochs": 24, "max_steps": 24}
    often = {"log_every": 4, "checkpoint_every": 8, "validate_every": 24}
    jobs = [
        make_job(dataset, target, folder / name, **values, **often, **training)
        for name in ("whole", "stopped")
    ]
    whole, stopped = (
        job.model_copy(update={"drafter": job.drafter.model_copy(update={"head_dim": 64})}) for job in jobs
    )
    ranks: dict[str, Any] = {"ranks": 1, "gpus": gpus, "environment": {"OMP_NUM_THREADS": "1"}}
    told: list[Message] = []
    run_ranks("flows.train_worker", [write_job(whole)], **ranks, on_message=told.append)
    finished = stopped_when(stopped, folder, 1, gpus, kind="checkpoint", step=8)
    assert finished["stopped"] and 8 < finished["optimizer_step"] < 12
    run_ranks("flows.train_worker", [write_job(stopped)], **ranks)
    return told, whole, stopped


def assert_same_course(whole: TrainJob, stopped: TrainJob, noise: float) -> None:
    """All rows were read as often, each reading but the divided one is of the same rows, with losses as far
    apart as `noise`.
    """
    counts = ("context_tokens", "blocks", "scored_slots")
    one, other = ({row["step"]: row for row in metrics(job) if "loss" in row} for job in (whole, stopped))
    for name in counts:
        assert sum(row[name] for row in one.values()) == sum(row[name] for row in other.values())
    assert list(one) == [4, 8, 12, 16, 20, 24] and len(other) == 7
    for step in (4, 8, 16, 20, 24):
        assert [other[step][name] for name in counts] == [one[step][name] for name in counts]
        assert other[step]["loss"] == pytest.approx(one[step]["loss"], rel=noise)
    assert one[24]["loss"] < 0.95 * one[4]["loss"]


def test_a_run_stopped_between_two_readings_goes_on_as_the_whole_one(
    dataset: Dataset, target: str, tmp_path: Path
) -> None:
    _, whole, stopped = whole_and_stopped(dataset, target, tmp_path)
    assert_same_course(whole, stopped, noise=1e-6)


def test_a_checkpoint_is_safe_before_its_validation_which_is_not_silent(
    dataset: Dataset, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(make_job(dataset, target, tmp_path, max_steps=6, checkpoint_every=99, validation_rows=3))
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [m["kind"] for m in said if m["kind"] != "metrics" or "validation/loss" in m]
    assert kinds[1:] == ["checkpoint", "progress", "progress", "progress", "metrics", "exported", "finished"]


def test_a_request_to_stop_cuts_a_validation_short_on_all_ranks(
    dataset: Dataset, target: str, tmp_path: Path
) -> None:
    job = make_job(dataset, target, tmp_path, validation_fraction=0.9, validate_every=2, checkpoint_every=99)
    finished = stopped_when(job, tmp_path, ranks=2, kind="progress", done=1)
    assert finished["stopped"] and finished["optimizer_step"] == 2
    assert not [row for row in metrics(job) if "validation/loss" in row]
    assert Checkpoints(open_store(job.config.output), {}, keep=9).steps() == [2]


def begun(whole: TrainJob, job: TrainJob, step: int) -> Path:
    """Put one checkpoint of a whole run where another is to continue; return that one's folder."""
    store, source = open_store(job.config.output), open_store(whole.config.output)
    for info in list(source.list(f"checkpoints/step-{step:08d}")):
        store.put_bytes(info.key, source.get(info.key))
    return Path(job.config.output)


def test_a_score_that_the_store_was_not_told_counts_after_a_resume(
    whole: TrainJob, dataset: Dataset, target: str, tmp_path: Path
) -> None:
    job = make_job(dataset, target, tmp_path)
    row = {"step": 6, "validation/acceptance_length": 3.9}
    (begun(whole, job, 6) / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    run_here(job)
    best = Checkpoints(open_store(job.config.output), {}, keep=9).best()
    assert best is not None and (best.optimizer_step, best.score) == (6, 3.9)


def test_a_last_step_that_was_not_validated_is(
    whole: TrainJob, dataset: Dataset, target: str, tmp_path: Path
) -> None:
    job = make_job(dataset, target, tmp_path)
    begun(whole, job, 12)
    run_here(job)
    assert metrics(job) == [row for row in metrics(whole) if row["step"] == 12 and "validation/loss" in row]
    best = Checkpoints(open_store(job.config.output), {}, keep=9).best()
    assert best is not None and best.optimizer_step == 12


def test_a_drafter_that_engines_would_misread_fails_its_run(
    dataset: Dataset, target: str, tmp_path: Path
) -> None:
    job = make_job(dataset, target, tmp_path, max_steps=1, validation_fraction=0.0)
    last = job.drafter.model_copy(update={"tap_layer_ids": (1, 5)})
    words = r"not be served as it was trained: SGLang: captures .* last layer; z-lab: reads .* final norm$"
    with pytest.raises(UserError, match=words):
        run_here(job.model_copy(update={"drafter": last}))
    assert load_exported(Path(job.export)).config.tap_layer_ids == (1, 5)


def test_validation_rows_are_bounded_and_as_many_on_each_rank(dataset: Dataset, target: str) -> None:
    job = make_job(dataset, target, Path("nowhere"), validation_fraction=0.9, validation_rows=4)
    shares = []
    for rank in range(3):
        world = World(rank=rank, size=3, device=torch.device("cpu"))
        shares.append(list(TrainingData(dataset, job.drafter, job.config.training, world).validation_rows()))
    assert [len(share) for share in shares] == [2, 2, 2]
    assert sum(row.batch.num_tokens > 0 for share in shares for row in share) == 4


def test_two_ranks_continue_what_one_began(
    whole: TrainJob, dataset: Dataset, target: str, tmp_path: Path
) -> None:
    job = make_job(dataset, target, tmp_path / "ranks")
    begun(whole, job, 6)
    heard: list[dict[str, Any]] = []
    run_ranks(
        "flows.train_worker",
        [write_job(job)],
        ranks=2,
        environment={"OMP_NUM_THREADS": "1"},
        on_message=heard.append,
    )
    assert any("with 2 ranks instead of 1" in m.get("text", "") for m in heard)
    expected = {row["step"]: row for row in metrics(whole) if "loss" in row}
    found = {row["step"]: row for row in metrics(job) if "loss" in row}
    assert list(found) == list(range(7, 13))
    for step, row in found.items():
        assert row["loss"] == pytest.approx(expected[step]["loss"], rel=1e-4)
        assert row["blocks"] == expected[step]["blocks"]
        assert row["context_tokens"] == expected[step]["context_tokens"]


def test_where_the_best_checkpoint_is_damaged_the_last_is_exported(
    dataset: Dataset, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(dataset, target, tmp_path)
    run_here(job)
    checkpoints = Checkpoints(open_store(job.config.output), {}, keep=9)
    first, last = checkpoints.steps()[0], checkpoints.steps()[-1]
    (tmp_path / checkpoints.record(first).object).unlink()
    (tmp_path / "best.json").write_text(json.dumps({"optimizer_step": first, "score": 99.0}))
    capsys.readouterr()
    run_here(job)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    exported = next(message for message in said if message["kind"] == "exported")
    assert exported["step"] == last and exported["acceptance_length"] is None


def as_released(exported: str, folder: Path) -> str:
    """Copy a drafter with the config.json of public releases: nothing of ours in it, no key twice."""
    shutil.copytree(exported, folder)
    config = json.loads((folder / "config.json").read_text())
    for name in ("dflash_pipeline", "rope_parameters", "torch_dtype"):
        del config[name]
    for name in ("block_size", "num_target_layers"):
        del config["dflash_config"][name]
    config |= {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "use_cache": True}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("released", [False, True])
def test_a_run_may_start_from_an_exported_drafter(
    whole: TrainJob, dataset: Dataset, target: str, tmp_path: Path, released: bool
) -> None:
    folder = as_released(whole.export, tmp_path / "released") if released else whole.export
    job = make_job(dataset, target, tmp_path, init_from=folder, max_steps=1)
    drafter, _, _ = load_weights(job, ALONE)
    start = load_exported(Path(whole.export), dtype=torch.float32)
    assert all(torch.equal(p, q) for p, q in zip(drafter.parameters(), start.parameters(), strict=True))
    run_here(job)
    cold, warm = metrics(whole)[0]["loss"], metrics(job)[0]["loss"]
    assert warm < cold
    other = job.model_copy(update={"drafter": job.drafter.model_copy(update={"intermediate_size": 32})})
    with pytest.raises(UserError, match="intermediate_size: 48 there, 32 here"):
        load_weights(other, ALONE)


def test_a_run_that_is_killed_after_a_validation_has_told_the_store_of_it(
    dataset: Dataset, target: str, tmp_path: Path
) -> None:
    job = make_job(dataset, target, tmp_path, checkpoint_every=99)
    two_steps_later = json.dumps({"kind": "metrics", "step": 8})
    arguments = ["SIGKILL", two_steps_later, str(tmp_path / "asked"), "flows.train_worker", write_job(job)]
    with pytest.raises(RanksFailed):
        run_ranks("tests.flows.signalled", arguments, ranks=1, environment={"OMP_NUM_THREADS": "1"})
    best = Checkpoints(open_store(job.config.output), {}, keep=9).best()
    (validation,) = [row for row in metrics(job) if "validation/acceptance_length" in row]
    assert best is not None and best.optimizer_step == validation["step"] == 6
    assert best.score == validation["validation/acceptance_length"]


def test_a_run_that_has_begun_no_longer_needs_what_it_started_from(
    whole: TrainJob, dataset: Dataset, target: str, tmp_path: Path
) -> None:
    started_from = tmp_path / "gone"
    shutil.copytree(whole.export, started_from)
    job = make_job(dataset, target, tmp_path / "run", init_from=str(started_from))
    stopped_when(job, tmp_path, ranks=1, kind="started")
    shutil.rmtree(started_from)
    run_here(job)
    assert [row["step"] for row in metrics(job) if "loss" in row] == list(range(1, 13))


def test_what_has_nothing_to_do_is_named(
    dataset: Dataset, target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(dataset, target, tmp_path, rows_per_step=3, validation_fraction=1e-9)
    for ranks, expected in ((1, []), (2, ["2 ranks take 2 rows each: 1 of these are padding"])):
        caplog.clear()
        world = World(rank=0, size=ranks, device=torch.device("cpu"))
        warn_of_idle_parts(TrainingData(dataset, job.drafter, job.config.training, world))
        assert len(caplog.messages) == 1 + len(expected)
        assert all(words in caplog.text for words in [*expected, "nothing is validated"])


def test_uncompiled_training_is_refused_on_a_gpu() -> None:
    assert TrainingConfig().compiles_on("cuda") and not TrainingConfig().compiles_on("cpu")
    assert not TrainingConfig(compile=False).compiles_on("cpu")
    with pytest.raises(UserError, match="unfused"):
        TrainingConfig(compile=False).compiles_on("cuda")


def test_another_configuration_is_refused(whole: TrainJob, dataset: Dataset, target: str) -> None:
    job = make_job(dataset, target, Path(whole.config.output), seed=1)
    with pytest.raises(UserError, match=r"training.seed: 0 -> 1"):
        run_here(job)
    free = {"log_every": 3, "validate_every": 5, "validation_rows": 1}
    run_here(make_job(dataset, target, Path(whole.config.output), **free))


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_run_that_explodes_names_step_shards_and_samples(
    dataset: Dataset, target: str, tmp_path: Path, log_every: int
) -> None:
    optimizer = {"learning_rate": 1e30, "clip_norm": None, "warmup_fraction": 0.0}
    job = make_job(dataset, target, tmp_path, optimizer=optimizer, log_every=log_every, checkpoint_every=1)
    with pytest.raises(NonFiniteError, match=r"optimizer step \d+ .*shards \d.*; samples chat-") as caught:
        run_here(job)
    found = Checkpoints(open_store(job.config.output), identity_of(job, dataset), keep=9).latest()
    assert found is not None and found[0].position.optimizer_step == caught.value.optimizer_step
    assert all(torch.isfinite(value).all() for value in found[1].values())


def test_each_sample_is_seen_once_an_epoch_whatever_the_ranks(dataset: Dataset, target: str) -> None:
    job = make_job(dataset, target, Path("nowhere"))
    seen = []
    for size in (1, 3):
        world_seen: list[str] = []
        for rank in range(size):
            world = World(rank=rank, size=size, device=torch.device("cpu"))
            data = TrainingData(dataset, job.drafter, job.config.training, world)
            steps = data.steps(StepPlace(epoch=0, step_in_epoch=0), data.steps_in_epoch(0))
            for _, rows in steps:
                world_seen += [name for row in rows for name in row.batch.sample_ids]
        expected = [dataset.index.sample_ids[int(i)].as_py() for i in data.training_samples]
        assert sorted(world_seen) == sorted(expected)
        seen.append(sorted(world_seen))
        held_out = {dataset.index.sample_ids[int(i)].as_py() for i in data.validation_samples}
        assert held_out and not held_out & set(world_seen)
    assert seen[0] == seen[1]


def test_rows_hold_the_states_of_their_samples(dataset: Dataset, target: str) -> None:
    from tests.storage.made import made_states

    job = make_job(dataset, target, Path("nowhere"))
    data = TrainingData(dataset, job.drafter, job.config.training, ALONE)
    samples = {s.sample_id: s for p in dataset.plan.shards for s in dataset.samples(p.shard)}
    for row in data.validation_rows():
        at = 0
        for name in row.batch.sample_ids:
            sample = samples[name]
            states = made_states(sample, dataset.columns)
            expected = torch.cat([states["layer_001"], states["layer_003"]], dim=1)
            assert torch.equal(row.taps_CE[at : at + sample.num_tokens], expected)
            at += sample.num_tokens
        assert row.batch.num_tokens == at and not row.taps_CE[at:].any()


def test_too_long_samples_and_missing_taps_are_refused(dataset: Dataset, target: str) -> None:
    job = make_job(dataset, target, Path("nowhere"), row_tokens=16)
    with pytest.raises(
        UserError, match=r"sample chat-\d+ has \d+ tokens, more than training.row_tokens = 16"
    ):
        TrainingData(dataset, job.drafter, job.config.training, ALONE)
    job = make_job(dataset, target, Path("nowhere"), loss={"gamma": 3.0, "kl_weight": 0.5})
    with pytest.raises(UserError, match="last hidden state"):
        TrainingData(dataset, job.drafter, job.config.training, ALONE)
    drafter = job.drafter.model_copy(update={"tap_layer_ids": (1, 2)})
    with pytest.raises(UserError, match="layer_002"):
        TrainingData(dataset, drafter, job.config.training, ALONE)


@pytest.mark.parametrize(("codec", "warned"), [("tolerance=0.1", True), ("tolerance=0.02", False)])
def test_a_coarse_teacher_is_warned_of(
    tmp_path: Path, target: str, caplog: pytest.LogCaptureFixture, codec: str, warned: bool
) -> None:
    shape = TARGET.model_copy(update={"mask_token_id": VOCABULARY - 1})
    spec = made_spec(codec, target=shape)
    capture = spec.capture.model_copy(update={"last_hidden": "after_final_norm"})
    made = made_dataset(tmp_path, spec.model_copy(update={"capture": capture}), made_samples(20))
    write_missing(made, tmp_path)
    job = make_job(made, target, tmp_path, loss={"gamma": 3.0, "kl_weight": 0.5})
    TrainingData(open_dataset(made.uri), job.drafter, job.config.training, ALONE)
    assert ("teacher" in caplog.text) == warned


def test_total_steps_counts_epochs(dataset: Dataset, target: str) -> None:
    job = make_job(dataset, target, Path("nowhere"), max_steps=None, epochs=2)
    data = TrainingData(dataset, job.drafter, job.config.training, ALONE)
    rows = [len(data.epoch_rows(e)) for e in (0, 1)]
    assert data.total_steps() == sum(int(np.ceil(n / 2)) for n in rows)


def test_an_epoch_is_planned_once(dataset: Dataset, target: str) -> None:
    job = make_job(dataset, target, Path("nowhere"), max_steps=None, epochs=4)
    data = TrainingData(dataset, job.drafter, job.config.training, ALONE)
    plans = [data.epoch_rows(epoch) for epoch in range(4)]
    data.total_steps()
    assert all(data.epoch_rows(epoch) is plan for epoch, plan in enumerate(plans))
