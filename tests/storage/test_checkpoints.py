"""Checkpoints on a real store: round trip, retention, refusal, damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_core.configuration import UserError
from storage.checkpoints import (
    Best,
    CheckpointDamaged,
    Checkpoints,
    Position,
    differences,
    write_safetensors,
)
from storage.objects import Store, StoreError, open_store
from tests.storage.blocked import Block, blocked

__all__ = ["blocked"]

IDENTITY = {"drafter": {"num_layers": 2, "taps": [1, 3]}, "seed": 0}


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "file":
        return open_store(tmp_path / "run")
    return open_store(f"{request.getfixturevalue('s3_uri')}/run")


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "a/w": torch.full((3, 4), value),
        "b": torch.arange(5, dtype=torch.bfloat16),
        "step": torch.tensor(value),
        "rng": torch.arange(7, dtype=torch.uint8),
        "empty": torch.zeros(0, 2),
    }


def at(step: int) -> Position:
    return Position(optimizer_step=step, epoch=step // 10, step_in_epoch=step % 10)


def save_all(store: Store, steps: list[int], keep: int = 2, scores: dict[int, float] | None = None) -> None:
    """Be a run that begins with what is there."""
    checkpoints = Checkpoints(store, IDENTITY, keep=keep)
    checkpoints.latest()
    for step in steps:
        checkpoints.save(at(step), tensors(step), {"ranks": 1})
        if scores and step in scores:
            checkpoints.mark_best(Best(optimizer_step=step, score=scores[step]))
    checkpoints.close()


def test_round_trip_and_retention(store: Store) -> None:
    assert Checkpoints(store, IDENTITY, keep=2).latest() is None
    save_all(store, [5, 10, 15, 20], scores={5: 2.5, 15: 2.0})
    checkpoints = Checkpoints(store, IDENTITY, keep=2)
    assert checkpoints.steps() == [5, 15, 20]
    best = checkpoints.best()
    assert best is not None and best.optimizer_step == 5 and best.score == 2.5
    found = checkpoints.latest()
    assert found is not None
    record, loaded = found
    assert record.position == at(20) and record.notes == {"ranks": 1}
    expected = tensors(20)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[k], expected[k]) and loaded[k].dtype == expected[k].dtype for k in expected)
    assert torch.equal(checkpoints.load(checkpoints.record(5))["a/w"], tensors(5)["a/w"])
    objects = [info.key for info in store.list("checkpoints/") if info.key.endswith(".safetensors")]
    assert len(objects) == 3


def test_saving_copies_before_it_returns(tmp_path: Path) -> None:
    checkpoints = Checkpoints(open_store(tmp_path), IDENTITY, keep=1)
    state = tensors(1.0)
    checkpoints.save(at(1), state, {})
    state["a/w"].fill_(9.0)
    checkpoints.close()
    assert torch.equal(checkpoints.load(checkpoints.record(1))["a/w"], torch.ones(3, 4))


def test_another_configuration_is_refused_by_key(store: Store) -> None:
    save_all(store, [5])
    other = {"drafter": {"num_layers": 3, "taps": [1, 3]}, "seed": 0, "new": True}
    with pytest.raises(UserError, match=r"(?s)drafter.num_layers: 2 -> 3.*new: null -> true") as caught:
        Checkpoints(store, other, keep=2).latest()
    assert "seed" not in str(caught.value) and "taps" not in str(caught.value)


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    save_all(store, [5, 10])
    checkpoints = Checkpoints(store, IDENTITY, keep=2)
    path = tmp_path / checkpoints.record(10).object
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.chmod(0o644)
    path.write_bytes(bytes(data))
    found = checkpoints.latest()
    assert found is not None and found[0].position.optimizer_step == 5
    assert "is damaged" in caplog.text
    (tmp_path / checkpoints.record(5).object).unlink()
    with pytest.raises(CheckpointDamaged, match="none of the checkpoints"):
        checkpoints.latest()


def test_after_damage_the_run_goes_on_from_before_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save_all(store, [10, 20], scores={10: 1.0, 20: 3.0})
    checkpoints = Checkpoints(store, IDENTITY, keep=2)
    (tmp_path / checkpoints.record(20).object).unlink()
    save_all(store, [15])
    assert checkpoints.steps() == [10, 15] and checkpoints.best() is None
    save_all(store, [17], scores={17: 2.0})
    best = checkpoints.best()
    assert checkpoints.steps() == [15, 17] and best is not None and best.score == 2.0


def test_a_damaged_one_that_is_reached_again_is_written_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save_all(store, [5, 10])
    path = tmp_path / Checkpoints(store, IDENTITY, keep=2).record(10).object
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    save_all(store, [10])
    found = Checkpoints(store, IDENTITY, keep=2).latest()
    assert found is not None and found[0].position.optimizer_step == 10


def test_a_checkpoint_that_was_deleted_is_not_the_best(store: Store) -> None:
    save_all(store, [5, 10], scores={5: 9.0})
    for info in list(store.list("checkpoints/")):
        store.delete(info.key)
    checkpoints = Checkpoints(store, IDENTITY, keep=2)
    assert checkpoints.latest() is None and checkpoints.best() is None
    save_all(store, [5], scores={5: 2.0})
    best = checkpoints.best()
    assert best is not None and best.score == 2.0


@pytest.mark.parametrize("torn", [b"", b'{"optimizer_step": 5, "sco', b"\xff\xfe"])
def test_a_damaged_note_of_the_best_is_none_and_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, torn: bytes
) -> None:
    store = open_store(tmp_path)
    save_all(store, [5], scores={5: 9.0})
    store.put_bytes("best.json", torn, overwrite=True)
    assert Checkpoints(store, IDENTITY, keep=2).best() is None
    assert "best.json is damaged" in caplog.text
    save_all(store, [10], scores={10: 2.0})  # also on the thread that writes
    best = Checkpoints(store, IDENTITY, keep=2).best()
    assert best is not None and best.optimizer_step == 10


def test_tensors_without_a_record_do_not_exist(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save_all(store, [5, 10])
    store.delete("checkpoints/step-00000010.json")
    found = Checkpoints(store, IDENTITY, keep=2).latest()
    assert found is not None and found[0].position.optimizer_step == 5
    save_all(store, [15])
    assert not [i.key for i in store.list("checkpoints/step-00000010")]


def test_a_step_that_is_reached_again_replaces_the_old_one(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save_all(store, [5])
    checkpoints = Checkpoints(store, IDENTITY, keep=2)
    checkpoints.latest()
    checkpoints.save(at(5), tensors(7.0), {})
    checkpoints.close()
    found = checkpoints.latest()
    assert found is not None and torch.equal(found[1]["a/w"], torch.full((3, 4), 7.0))
    assert len([i for i in store.list("checkpoints/") if i.key.endswith(".safetensors")]) == 1


def test_a_failed_write_is_named_at_once_and_the_next_one_takes_place(
    blocked: Block,
) -> None:
    folder = blocked(1)
    with Checkpoints(folder.store, IDENTITY, keep=2) as checkpoints:
        checkpoints.save(at(5), tensors(5), {})
        assert folder.named.acquire(timeout=20)
        checkpoints.mark_best(Best(optimizer_step=5, score=9.0))
        checkpoints.save(at(10), tensors(10), {})
        checkpoints.mark_best(Best(optimizer_step=10, score=2.0))
    assert checkpoints.steps() == [10]
    assert checkpoints.best() == Best(optimizer_step=10, score=2.0)


def test_the_last_one_must_be_written(blocked: Block) -> None:
    checkpoints = Checkpoints(blocked(9).store, IDENTITY, keep=2)
    checkpoints.save(at(5), tensors(5), {})
    checkpoints.save(at(10), tensors(10), {})
    with pytest.raises(StoreError, match=r"run has no checkpoint of step 5, 10, .*not a folder|is a file"):
        checkpoints.close()


@pytest.mark.parametrize("failures", [2, 9])
def test_after_two_failed_writes_the_third_decides(blocked: Block, failures: int) -> None:
    checkpoints = Checkpoints(blocked(failures).store, IDENTITY, keep=2)
    checkpoints.save(at(5), tensors(5), {})
    checkpoints.save(at(10), tensors(10), {})
    if failures > 2:
        with pytest.raises(StoreError, match="no checkpoint of step 5, 10, 15, a new run"):
            checkpoints.save(at(15), tensors(15), {})
    else:
        checkpoints.save(at(15), tensors(15), {})
    checkpoints.close()
    assert checkpoints.steps() == ([] if failures > 2 else [15])


def test_a_score_that_could_not_be_told_is_told_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for retry in ("the next one", "the end"):
        folder = tmp_path / retry
        checkpoints = Checkpoints(open_store(folder), IDENTITY, keep=1)
        checkpoints.save(at(5), tensors(5), {})
        checkpoints.wait()
        (folder / "best.json").mkdir()
        checkpoints.mark_best(Best(optimizer_step=5, score=3.0))
        with pytest.raises(StoreError, match=r"best\.json"):
            checkpoints.wait()
        assert "score of step 5" in caplog.text
        (folder / "best.json").rmdir()
        if retry == "the next one":
            checkpoints.save(at(10), tensors(10), {})
        checkpoints.close()
        assert checkpoints.best() == Best(optimizer_step=5, score=3.0)


@pytest.mark.parametrize("step", [5, 10, 15])
def test_another_runs_checkpoints_are_left_alone(store: Store, step: int) -> None:
    save_all(store, [3], scores={3: 1.0})
    one, other = (Checkpoints(store, IDENTITY, keep=1) for _ in range(2))
    assert one.latest() is not None and other.latest() is not None
    for number in (5, 10):
        one.save(at(number), tensors(number), {})
    one.wait()
    other.save(at(step), tensors(-1), {})
    other.mark_best(Best(optimizer_step=10, score=9.0))
    with pytest.raises(UserError, match=r"began \(step 10\): another run .* give one another output"):
        other.close()
    one.save(at(20), tensors(20), {})
    one.close()
    assert one.steps() == [3, 20] and one.best() == Best(optimizer_step=3, score=1.0)
    assert torch.equal(one.load(one.record(20))["a/w"], tensors(20)["a/w"])


def test_of_two_runs_that_write_a_step_at_once_one_is_refused(tmp_path: Path) -> None:
    for number in range(8):
        store = open_store(tmp_path / str(number))
        runs = [Checkpoints(store, IDENTITY, keep=1) for _ in range(2)]
        for value, run in enumerate(runs):
            run.save(at(5), tensors(value), {})
        refused = []
        for run in runs:
            try:
                run.close()
            except UserError:
                refused.append(run)
        assert len(refused) == 1
        (won,) = {*runs} - {*refused}
        value = runs.index(won)
        assert torch.equal(won.load(won.record(5))["a/w"], tensors(value)["a/w"])


def test_what_else_lies_there_is_left_alone(store: Store) -> None:
    foreign = ["notes.json", "step-00000005 (copy).json", "step-5.safetensors", "old/step-00000001.json"]
    for name in foreign:
        store.put_bytes(f"checkpoints/{name}", b"{}")
    save_all(store, [5, 10, 15], keep=1)
    checkpoints = Checkpoints(store, IDENTITY, keep=1)
    found = checkpoints.latest()
    assert found is not None and found[0].position == at(15) and checkpoints.steps() == [15]
    left = {info.key.removeprefix("checkpoints/") for info in store.list("checkpoints/")}
    assert left == {*foreign, "step-00000015.json", Path(checkpoints.record(15).object).name}


def test_a_folders_checkpoint_is_read_where_it_lies(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    with Checkpoints(store, IDENTITY, keep=1) as checkpoints:
        checkpoints.save(at(1), tensors(1), {})
    no_folder = tmp_path / "no folder"
    no_folder.write_text("")
    found = Checkpoints(store, IDENTITY, keep=1, scratch=no_folder).latest()
    assert found is not None and torch.equal(found[1]["a/w"], tensors(1)["a/w"])


def test_written_files_are_safetensors(tmp_path: Path) -> None:
    expected = tensors(2.0)
    with (tmp_path / "x").open("wb") as file:
        _, size = write_safetensors(file, expected)
    assert (tmp_path / "x").stat().st_size == size
    loaded = load_file(tmp_path / "x")
    assert all(torch.equal(loaded[k], v) for k, v in expected.items())


def test_differences_name_nested_keys() -> None:
    old: dict[str, Any] = {"a": {"b": 1, "c": [1]}, "d": None}
    assert differences(old, json.loads(json.dumps(old))) == []
    assert differences(old, {"a": {"b": 2, "c": [1]}}) == ["a.b: 1 -> 2"]
