"""What a plan makes of chats that come under one id."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_core.configuration import UserError
from flows.config import ExtractConfig
from flows.extract_plan import plan_dataset


def numbered(path: Path, words: str, count: int) -> str:
    """Write chats with the ids 0, 1 ..."""
    turns = [
        [{"role": "user", "content": f"{words} {i}"}, {"role": "assistant", "content": "an answer"}]
        for i in range(count)
    ]
    lines = [json.dumps({"id": i, "messages": turns[i]}) + "\n" for i in range(count)]
    path.write_text("".join(lines))
    return str(path)


def test_two_files_that_number_other_chats_alike_are_not_halved(
    extract_config: Callable[..., ExtractConfig], tmp_path: Path
) -> None:
    a, b = numbered(tmp_path / "a.jsonl", "apples", 6), numbered(tmp_path / "b.jsonl", "pears", 6)
    sentence = rf"6 of 12 chats cannot .*\n  {b}:1: '0' is the id of another chat too, {a}:1: give each"
    with pytest.raises(UserError, match=sentence):
        plan_dataset(extract_config(chats=[a, b]))
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    plan = plan_dataset(extract_config(chats=[a, b, a], max_bad_fraction=0.5)).plan
    assert (plan.samples, plan.duplicates_dropped) == (6, 6)


def test_what_became_of_the_chats_is_told_when_none_is_left(
    extract_config: Callable[..., ExtractConfig], tmp_path: Path
) -> None:
    chats = numbered(tmp_path / "a.jsonl", "apples", 6)
    config = extract_config(chats=[chats])
    demanding = config.chat.model_copy(update={"min_supervised": 1000})
    with pytest.raises(
        UserError, match=rf"no chat of {chats} gives a sample: 6 chats read, 0 kept; dropped: 6"
    ):
        plan_dataset(config.model_copy(update={"chat": demanding}))


def test_many_alike_end_the_run_before_all_is_read(
    extract_config: Callable[..., ExtractConfig], tmp_path: Path
) -> None:
    a, b = numbered(tmp_path / "a.jsonl", "apples", 990), numbered(tmp_path / "b.jsonl", "pears", 990)
    with pytest.raises(UserError, match="11 of 1001 chats cannot be used"):
        plan_dataset(extract_config(chats=[a, b]))


@pytest.mark.parametrize("below_the_last", [0, 1])
def test_a_tap_that_no_drafter_may_read_is_told_before_it_is_stored(
    extract_config: Callable[..., ExtractConfig],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    below_the_last: int,
) -> None:
    config = extract_config(chats=[numbered(tmp_path / "a.jsonl", "apples", 6)])
    highest = plan_dataset(config).spec.target.num_layers - 1 - below_the_last
    caplog.clear()
    target = config.target.model_copy(update={"tap_layer_ids": (0, highest)})
    plan_dataset(config.model_copy(update={"target": target}))
    assert (f"layer {highest} is the target's last" in caplog.text) == (below_the_last == 0)
