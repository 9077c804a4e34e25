"""Chats to an evaluated drafter through a real S3 server: every stage real, the target tiny and random."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dflash_core.configuration import UserError
from dflash_core.export import load_exported
from flows import train_steps
from flows.config import ExtractConfig, TrainConfig
from flows.extract_steps import write_responses
from flows.launch import Message
from flows.train_steps import TrainingLog
from storage.dataset import open_dataset
from storage.objects import open_store
from tests.flows.plain_extraction import run_extraction
from tests.tiny import MASK_TOKEN_ID, tiny_model, tiny_tokenizer

DRAFTER = {
    "block_size": 4,
    "num_layers": 2,
    "intermediate_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
}
TRAINING = {
    "row_tokens": 512,
    "anchors_per_row": 64,
    "epochs": 400,
    "max_steps": 300,
    "compute_dtype": "float32",
    "validation_fraction": 0.0,
    "checkpoint_every": 250,
    "optimizer": {"learning_rate": 3e-3},
    "loss": {"weighting": "uniform"},
}


def _silent(message: Message) -> None:
    """What the processes say is in the way here."""


@pytest.fixture(scope="module")
def writing_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target that writes printable ASCII alone: what it writes survives being text."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[94:] = 0.0  # tokens 0..93 are "!" to "~"
    folder = tmp_path_factory.mktemp("writing-target")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_from_prompts_to_accepted_blocks(tmp_path: Path, writing_target: Path, s3_uri: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"say {i}"}]} for i in range(4)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    extract = ExtractConfig.model_validate(
        {
            "name": "end-to-end",
            "store": f"{s3_uri}/store",
            "chats": [str(prompts)],
            "target": {
                "path": str(writing_target),
                "dtype": "float32",
                "num_taps": 3,
                "mask_token": MASK_TOKEN_ID,
            },
            "responses": {"output": str(tmp_path / "responses"), "generation": {"max_new_tokens": 48}},
            "codec": "lossless",
            "shard_tokens": 150,
            "workers": {"slots": ["cpu"]},
        }
    )
    write_responses(extract, _silent)
    dataset, outcome = run_extraction(extract)
    assert not outcome.failed and len(dataset.plan.shards) > 1
    assert open_dataset(f"{s3_uri}/store").manifest().tokens == dataset.plan.tokens

    train = TrainConfig.model_validate(
        {
            "dataset": dataset.uri,
            "target": str(writing_target),
            "output": f"{s3_uri}/training",
            "drafter": DRAFTER,
            "training": TRAINING,
            "overfit": {"max_steps": 150, "learning_rate": 3e-3},
            "evaluation": {
                "prompts": {"trained on": str(prompts)},
                "max_new_tokens": 40,
                "dtype": "float32",
                "minimum_acceptance_length": 2.0,
            },
        }
    )
    data, drafter = train_steps.open_training_data(train)
    assert train_steps.overfit_one_sample(train, data, drafter, _silent) > 3.8
    hopeless = train.model_copy(update={"overfit": train.overfit.model_copy(update={"max_steps": 2})})  # type: ignore[union-attr]
    with pytest.raises(UserError, match="overfit gate: after 2 steps"):
        train_steps.overfit_one_sample(hopeless, data, drafter, _silent)

    result = TrainingLog()
    with train_steps.output_folder(train) as folder:
        train_steps.train(train, data, drafter, folder, result, _silent)
        train_steps.evaluate(train, data, folder, result, _silent)
        report = train_steps.write_report(train, data, result, folder)
        assert load_exported(folder / train_steps.DRAFTER_FOLDER).config.block_size == 4
    family = report["acceptance"]["families"]["trained on"]
    assert family["lossless"] and family["equal_texts"] == family["prompts"] == 4
    assert family["acceptance_length"] > 2.0
    store = open_store(f"{s3_uri}/training")
    assert {"drafter/config.json", "drafter/model.safetensors", "report.json", "training.png"} <= {
        info.key for info in store.list("")
    }
