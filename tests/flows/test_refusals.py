"""What would cost hours later is refused at once, in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core.configuration import UserError
from dflash_core.distributed import own_device
from dflash_core.target_identity import load_text_config
from flows.cli import parse_numbers
from flows.config import TrainConfig
from flows.extract_steps import worker_slots
from flows.train_steps import open_training_data, output_folder
from storage.dataset import Dataset
from storage.objects import StoreError, open_store
from tests.tiny import write_tiny_target

MakeConfig = Callable[..., TrainConfig]
SHAPE: dict[str, Any] = {
    "block_size": 8,
    "num_layers": 2,
    "intermediate_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
}


def test_a_gpu_that_is_not_there_never_means_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    beyond = str(torch.cuda.device_count())
    for slots in ([beyond], ["cpu", beyond], ["x"]):
        with pytest.raises(UserError, match="is named, but torch sees"):
            worker_slots(slots)
    assert worker_slots(["cpu", "cpu"]) == ("cpu", "cpu")
    if not torch.cuda.is_available():
        assert own_device() == "cpu"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        with pytest.raises(UserError, match="was given GPU 3, but torch"):
            own_device()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ("full_attention",)}, "1 entries for 2 layers"),
        ({"layer_types": ("sliding_attention",) * 2}, "sliding_window is missing"),
        ({"num_kv_heads": 3}, "not a multiple of num_kv_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"mask_token_id": 9999}, "outside the vocabulary of 320"),
        ({"tap_layer_ids": (3, 1)}, "ascending order"),
        ({"tap_layer_ids": ()}, "tap_layer_ids"),
    ],
)
def test_faults_of_the_shape_are_told_before_training(
    train_config: MakeConfig, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        open_training_data(train_config(drafter=SHAPE | change))


def test_weights_that_may_be_the_same_in_another_form(
    train_config: MakeConfig, sealed: Dataset, tmp_path: Path
) -> None:
    copy = write_tiny_target(tmp_path / "copy", seed=1)
    with pytest.raises(UserError, match=f"two targets.* as it was given then, {sealed.spec.target.name!r}"):
        open_training_data(train_config(target=str(copy)))


def test_prompts_and_output_are_looked_at_before_training(train_config: MakeConfig, tmp_path: Path) -> None:
    missing = {"prompts": {"family": str(tmp_path / "nothing.jsonl")}}
    with pytest.raises(UserError, match=r"nothing\.jsonl"):
        open_training_data(train_config(evaluation=missing))
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="cannot be made"),
        output_folder(train_config(output=str(tmp_path / "file" / "below"))),
    ):
        pass


def test_numbers_of_gpus_need_no_quotes(train_config: MakeConfig) -> None:
    assert train_config(gpus=[5, "6"]).gpus == ("5", "6")


def test_what_was_meant_is_said_of_addresses_folders_and_numbers(tmp_path: Path) -> None:
    for typo in ("s3:/bucket/prefix", "s3//bucket/prefix", "s3/bucket", "gs:/bucket"):
        with pytest.raises(StoreError, match="mistyped: write s3://bucket/prefix"):
            open_store(typo)
    with pytest.raises(UserError, match="nowhere does not exist"):
        load_text_config(str(tmp_path / "nowhere"), None)
    with pytest.raises(UserError, match=r"holds no config\.json"):
        load_text_config(str(tmp_path), None)
    with pytest.raises(UserError, match="from 'nowhere': no folder of that name is here"):
        load_text_config("nowhere", None)
    for numbers in ("", "2,", "2,x"):
        with pytest.raises(UserError, match="--only takes numbers"):
            parse_numbers(numbers)
