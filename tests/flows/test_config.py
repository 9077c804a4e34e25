"""Configurations: what is odd is refused by name, and what is written is what is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_core.configuration import UserError
from flows.config import ExtractConfig, TrainConfig, dump_config, load_config
from flows.configuration_reference import PAGE, page

GOOD = "store: s3://bucket/prefix\nchats: [chats.jsonl]\ntarget: {path: some/target}\n"
RESPONSES = "responses: {output: answers}\n"
TRAIN = """dataset: store
target: some/target
output: here
drafter: {block_size: 8, intermediate_size: 64, num_heads: 4, num_kv_heads: 2}
"""


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
        (GOOD + "codecs: lossless\n", r"codecs: unknown name; did you mean codec\?"),
        (GOOD + "slots: [cpu]\n", "slots: unknown name; docs/configuration.md"),
        (GOOD + "store: there\n", "run.yaml, line 4: store stands in line 1 already"),
        (GOOD + "workers: {attempts: 1, scratch: a, 'attempts': 2}\n", "line 4: attempts stands in line 4"),
        (GOOD + "1: a\n", "line 4: a name must be text"),
        (GOOD + "limit: true\n", "limit: .*valid integer .got True"),
        (GOOD + "limit: '50'\n", "limit: .*valid integer .got '50'"),
        (GOOD + "limit: 1.0\n", "limit: .*valid integer .got 1.0"),
        (GOOD + "chat: {enable_thinking: 'yes'}\n", "chat.enable_thinking: .*valid boolean .got 'yes'"),
        (GOOD.replace("path", "tap_layer_ids: [true], path"), "target.tap_layer_ids.0: .*got True"),
        (GOOD.replace("path", "revision: 12, path"), "revision: .*valid string; quotes make it one"),
        (GOOD + "max_bad_fraction: .nan\n", "line 4: .nan is no finite number"),
        (GOOD + "workers:\n  silence_timeout_s: .inf\n", "line 5: .inf is no finite number"),
        (GOOD + "name: !!set {a}\n", "holds a value that no field takes"),
        (GOOD + "limit: !!bool maybe\n", "holds a value that no field takes"),
        (GOOD + "chat: &chat {template_arguments: {a: *chat}}\n", "no field takes: Circular reference"),
        (GOOD + "workers:\n", "workers: Input should be names and values .got None"),
        (GOOD.replace("[chats.jsonl]", "chats.jsonl"), "chats: Input should be a list .got 'chats.jsonl'"),
        (GOOD.replace("s3://bucket/prefix", "''"), "store: .*at least 1 character"),
        (GOOD.replace("some/target", "''"), "target.path: no target is named"),
        (GOOD.replace("chats.jsonl", "''"), "chats.0: .*at least 1 character"),
        (GOOD + "responses: {output: ''}\n", "responses.output: .*at least 1 character"),
        (GOOD + "responses: {output: a, generation: {seed: -1}}\n", "generation.seed: .*got -1"),
        (GOOD + "workers: {slots: [gpu]}\n", "workers.slots.0: no slot: name a GPU .*got 'gpu'"),
        (GOOD + "workers: {slots: [true]}\n", "workers.slots.0: .*valid string"),
        (GOOD + "workers: {slots: ['0,1', 1]}\n", "workers.slots: GPU 1 is named more than once"),
        ("# nothing\n", "run.yaml is empty"),
        (TRAIN, "is a configuration for `dflash train`; here one for `dflash extract` is needed"),
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TRAIN + "training: {seed: -1}\n", "training.seed: .*got -1"),
        (TRAIN + f"training: {{seed: {2**80}}}\n", "training.seed: .*less than 9223372036854775808"),
        (TRAIN.replace("block_size: 8", "block_size: 1000000"), "drafter.block_size: .*equal to 256 "),
        (TRAIN.replace("here", "''"), "output: .*at least 1 character"),
        (TRAIN.replace("store", "''"), "dataset: .*at least 1 character"),
        (TRAIN.replace("some/target", "''"), "target: no target is named"),
        (TRAIN + "gpus: ['0,1']\n", "gpus.0: no device: name a GPU .*got '0,1'"),
        (TRAIN + "gpus: [0, '0']\n", "gpus: GPU 0 is named more than once"),
        (
            TRAIN + "evaluation: {prompts: {all: chats}, minimum_acceptance_length: -1}\n",
            "evaluation.minimum_acceptance_length: .*got -1",
        ),
        (
            TRAIN + "training: {layer_products: fp8, compute_dtype: float32}\n",
            "training: training.layer_products fp8 goes with compute_dtype bfloat16$",
        ),
    ],
)
def test_what_no_rank_could_do_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_config(TrainConfig, write(tmp_path, text))


@pytest.mark.parametrize(
    "address", ["s3://AKIA123:hidden-word@bucket/p", "s3://AKIA123/hidden-word", "s3://a:[hidden-word@bucket"]
)
def test_an_address_with_credentials_is_refused_and_not_shown(tmp_path: Path, address: str) -> None:
    address = f"'{address}'"
    for kind, text in (
        (ExtractConfig, GOOD.replace("s3://bucket/prefix", address)),
        (TrainConfig, TRAIN.replace("here", address)),
        (TrainConfig, TRAIN + f"cache: {{uri: {address}}}\n"),
    ):
        with pytest.raises(UserError, match=r"write s3://|AWS_SECRET_ACCESS_KEY") as caught:
            load_config(kind, write(tmp_path, text))
        assert "hidden-word" not in str(caught.value) and caught.value.__cause__ is None


def test_numbers_to_another_base_are_refused(tmp_path: Path) -> None:
    for number in ("010", "1:30", "0_7"):
        with pytest.raises(UserError, match=f"line 4: YAML reads {number} to another base"):
            load_config(ExtractConfig, write(tmp_path, GOOD + f"limit: {number}\n"))
    assert load_config(ExtractConfig, write(tmp_path, GOOD + "limit: 0x1f\n")).limit == 31


def test_numbers_and_dates_are_what_they_look_like(tmp_path: Path) -> None:
    text = TRAIN + "gpus: [5, '6']\nrevision: 2024-01-31\n"
    text += "training: {optimizer: {learning_rate: 1e-3, clip_norm: 1}, loss: {gamma: 2.5e1}}\n"
    config = load_config(TrainConfig, write(tmp_path, text))
    assert config.gpus == ("5", "6") and config.revision == "2024-01-31"
    optimizer, loss = config.training.optimizer, config.training.loss
    assert (optimizer.learning_rate, optimizer.clip_norm, loss.gamma) == (0.001, 1.0, 25.0)


@pytest.mark.parametrize("revision", ["1e5", "2024-01-31", "1_0", "no", "1.5e3", "0x1f", "null"])
def test_text_that_looks_like_something_else_is_written_as_text(tmp_path: Path, revision: str) -> None:
    values: dict[str, Any] = yaml.safe_load(TRAIN) | {"revision": revision}
    config = TrainConfig.model_validate(values)
    assert load_config(TrainConfig, write(tmp_path, dump_config(config))) == config


def test_a_target_may_lie_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    path = write(tmp_path, TRAIN.replace("some/target", "~/target"))
    assert load_config(TrainConfig, path).target == "/home/me/target"


def test_a_merged_part_may_be_changed(tmp_path: Path) -> None:
    text = GOOD + "chat: {template_arguments: {a: &a {x: 1}, b: {c: &c {<<: *a, x: 2}}, d: {<<: *c, x: 3}}}\n"
    arguments = load_config(ExtractConfig, write(tmp_path, text)).chat.template_arguments
    assert arguments == {"a": {"x": 1}, "b": {"c": {"x": 2}}, "d": {"x": 3}}


def test_a_pipe_is_read_as_a_file_is(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, GOOD.encode())
    os.close(writing)
    try:
        config = load_config(ExtractConfig, f"/dev/fd/{reading}")
    finally:
        os.close(reading)
    assert config == load_config(ExtractConfig, write(tmp_path, GOOD))
    with pytest.raises(UserError, match=r"no configuration at .*: Is a directory"):
        load_config(ExtractConfig, tmp_path)


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
