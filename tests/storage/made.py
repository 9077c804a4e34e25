"""Small made-up data sets: samples, states that follow from the tokens, and how a worker writes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from dflash_core.records import CapturedSample, CaptureSpec, Sample, TargetSpec
from storage.calibration import Calibration
from storage.codec import parse_codec
from storage.dataset import Dataset, DatasetSpec, create_dataset
from storage.objects import Store, open_store
from storage.writer import ShardWriter, WriterConfig

WIDTH, VOCABULARY = 32, 97
TARGET = TargetSpec(
    name="made-up",
    weights_sha256="0" * 64,
    tokenizer_sha256="1" * 64,
    model_type="qwen3",
    num_layers=6,
    hidden_size=WIDTH,
    vocab_size=VOCABULARY,
    rope_theta=10_000.0,
)


def made_spec(codec: str = "tolerance=0.1", **changes: object) -> DatasetSpec:
    """A spec with tiny shards: about 4 samples of 20 tokens each, row groups of at most 24 tokens."""
    settings = {
        "target": TARGET,
        "capture": CaptureSpec(tap_layer_ids=(1, 3, 5)),
        "codec": codec,
        "input_sha256": "2" * 64,
        "chat": {"max_tokens": 100, "template": {"name": "chatml"}},
        "shard_tokens": 80,
        "row_group_bytes": 24 * WIDTH * 3 * 2,
        "row_group_fill_bytes": 16 * WIDTH * 3 * 2,
        "calibration_tokens": 100,
    }
    return DatasetSpec.model_validate(settings | changes)


def made_samples(count: int, longest: int = 40, seed: int = 0) -> list[Sample]:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest + 1, count)
    return [
        Sample(
            sample_id=f"chat-{i:06d}",
            token_ids_T=random.integers(0, VOCABULARY, length).astype(np.int32),
            loss_mask_T=random.random(length) < 0.5,
        )
        for i, length in enumerate(lengths)
    ]


def made_states(sample: Sample, columns: Iterable[str]) -> dict[str, torch.Tensor]:
    """bf16 [T, WIDTH] per column, a function of the tokens; with a loud channel and a loud token."""
    states = {}
    for number, column in enumerate(columns):
        table = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(number))
        states_TD = table[torch.from_numpy(np.array(sample.token_ids_T)).long()]
        states_TD[:, 3] *= 300
        states_TD[0] *= 50
        states[column] = states_TD.bfloat16()
    return states


def capture(sample: Sample, dataset: Dataset) -> CapturedSample:
    return CapturedSample(sample=sample, states=made_states(sample, dataset.columns))


def made_dataset(store: Store | str | Path, spec: DatasetSpec, samples: list[Sample]) -> Dataset:
    """Create the data set, scales included."""
    root = open_store(store) if isinstance(store, str | Path) else store
    dataset = create_dataset(root, "made", spec, samples)
    if parse_codec(spec.codec).needs_scales and dataset.scales() is None:
        calibration = Calibration()
        for sample in dataset.calibration_samples():
            calibration.add(made_states(sample, dataset.columns))
        dataset.publish_scales(calibration.scales())
    return dataset


def write_shard(dataset: Dataset, shard: int, scratch: Path | None = None, *, replace: bool = False) -> None:
    config = WriterConfig(threads=1)
    with ShardWriter(dataset, shard, scratch, config, replace=replace) as writer:
        for sample in dataset.samples(shard):
            writer.add(capture(sample, dataset))
        writer.close()


def write_missing(dataset: Dataset, scratch: Path | None = None) -> None:
    """What a worker does, then the seal."""
    for shard in dataset.missing():
        write_shard(dataset, shard, scratch)
    dataset.seal()


def contents(store: Store) -> dict[str, bytes]:
    """Every object of a store."""
    return {info.key: store.get(info.key) for info in store.list()}
