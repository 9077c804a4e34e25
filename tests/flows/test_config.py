"""Configurations: what is odd is refused by name, and what is written is what is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_core.configuration import UserError
from flows.config import ExtractConfig, dump_config, load_config
from flows.configuration_reference import PAGE, page

GOOD = "store: s3://bucket/prefix\nchats: [chats.jsonl]\ntarget: {path: some/target}\n"
RESPONSES = "responses: {output: answers}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_defaults_are_filled_in_and_written_out(tmp_path: Path) -> None:
    config = load_config(ExtractConfig, write(tmp_path, GOOD))
    assert config.codec == "tolerance=0.1" and config.workers.attempts == 3
    again = load_config(ExtractConfig, write(tmp_path, dump_config(config)))
    assert again == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD + "shard_token: 5\n", "shard_token: unknown name; did you mean shard_tokens?"),
        (GOOD + "workers: {slot: [cpu]}\n", "workers.slot: unknown name; did you mean slots?"),
        (GOOD + "shard_tokens: 0\n", "shard_tokens: .*greater than or equal to 1.*got 0"),
        (GOOD + "shard_tokens: many\n", "shard_tokens: .*got 'many'"),
        (GOOD + "codec: tolerance=7\n", "codec: .*tolerance=7"),
        (GOOD + "name: Not a name\n", "name: "),
        (GOOD + RESPONSES + "workers: {slots: ['0,1']}\n", "on one GPU.*responses.endpoint"),
        (GOOD.replace("path", "device_map: auto, path") + RESPONSES, "on one GPU.*responses.endpoint"),
        ("store: here\n", "(?s)chats: missing.*target: missing"),
        ("- a\n- b\n", "must hold names and values"),
        ("a: [\n", "is no YAML"),
    ],
)
def test_what_is_odd_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=words) as caught:
        load_config(ExtractConfig, path)
    assert str(path) in str(caught.value)


def test_a_file_in_another_encoding_is_said(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes((GOOD + "name: caf\u00e9\n").encode("latin-1"))
    with pytest.raises(UserError, match=r"run\.yaml is not UTF-8"):
        load_config(ExtractConfig, path)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no configuration at .*absent\.yaml"):
        load_config(ExtractConfig, tmp_path / "absent.yaml")


def test_the_reference_says_what_the_configurations_say() -> None:
    text = page()
    assert "](#workersconfig)" in text and "## WorkersConfig" in text
    assert PAGE.read_text() == text, "run: python -m flows.configuration_reference"
