"""Rows that training reads from a real small store: each hidden state is the one that was stored for its
token.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dflash_core.distributed import World
from dflash_core.drafter import DrafterConfig
from dflash_core.records import LAST_HIDDEN, CaptureSpec, Sample, tap_column
from dflash_core.training import TrainingConfig, TrainingRow
from flows.train_data import StepPlace, TrainingData
from storage.dataset import Dataset, open_dataset
from tests.storage.made import (
    TARGET,
    VOCABULARY,
    WIDTH,
    made_dataset,
    made_samples,
    made_spec,
    made_states,
    write_missing,
)

STORED_TAPS = (1, 3, 5)
ROW_TOKENS = 64


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """30 samples with three taps and the last hidden state, sealed; some are cut over row groups."""
    folder = tmp_path_factory.mktemp("data")
    capture = CaptureSpec(tap_layer_ids=STORED_TAPS, last_hidden="after_final_norm")
    target = TARGET.model_copy(update={"mask_token_id": VOCABULARY - 1})
    made = made_dataset(folder, made_spec("lossless", target=target, capture=capture), made_samples(30))
    write_missing(made, folder)
    return open_dataset(made.uri)


def data_of(dataset: Dataset, taps: tuple[int, ...], kl_weight: float) -> TrainingData:
    drafter = DrafterConfig(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        rope_theta=TARGET.rope_theta,
        vocab_size=VOCABULARY,
        block_size=4,
        mask_token_id=VOCABULARY - 1,
        tap_layer_ids=taps,
        target_num_layers=TARGET.num_layers,
    )
    training = TrainingConfig.model_validate(
        {
            "row_tokens": ROW_TOKENS,
            "anchors_per_row": 16,
            "rows_per_step": 2,
            "validation_fraction": 0.3,
            "loss": {"gamma": 3.0, "kl_weight": kl_weight},
        }
    )
    return TrainingData(dataset, drafter, training, World(rank=0, size=1, device=torch.device("cpu")))


def rows_of(data: TrainingData) -> Iterator[TrainingRow]:
    """An epoch, the rows of padding that fill up its last step included, and the rows of validation."""
    for _, rows in data.steps(StepPlace(epoch=0, step_in_epoch=0), data.steps_in_epoch(0)):
        yield from rows
    yield from data.validation_rows()


@pytest.fixture(scope="module")
def samples(dataset: Dataset) -> dict[str, Sample]:
    return {s.sample_id: s for p in dataset.plan.shards for s in dataset.samples(p.shard)}


@pytest.fixture(scope="module")
def states(dataset: Dataset, samples: dict[str, Sample]) -> dict[str, dict[str, torch.Tensor]]:
    """What was stored: by sample, then by column."""
    return {name: made_states(sample, dataset.columns) for name, sample in samples.items()}


@pytest.mark.parametrize("taps", [STORED_TAPS, (1, 5), (3,)])
def test_the_last_hidden_state_of_a_row_is_the_stored_one_token_by_token(
    dataset: Dataset,
    samples: dict[str, Sample],
    states: dict[str, dict[str, torch.Tensor]],
    taps: tuple[int, ...],
) -> None:
    """Beside the taps, and whichever of them the drafter reads."""
    seen: list[str] = []
    most = 0
    for row in rows_of(data_of(dataset, taps, kl_weight=0.5)):
        assert row.last_hidden_CD is not None and row.last_hidden_CD.shape == (ROW_TOKENS, WIDTH)
        at = 0
        for name in row.batch.sample_ids:
            stored = states[name]
            for t in range(samples[name].num_tokens):
                assert torch.equal(row.last_hidden_CD[at], stored[LAST_HIDDEN][t]), (name, t)
                assert torch.equal(row.taps_CE[at], torch.cat([stored[tap_column(i)][t] for i in taps]))
                at += 1
        assert row.batch.num_tokens == at
        assert not row.last_hidden_CD[at:].any() and not row.taps_CE[at:].any(), "padding"
        seen += row.batch.sample_ids
        most = max(most, len(row.batch.sample_ids))
    assert most > 2 and len(seen) == len(set(seen)) > 20


def test_the_teacher_of_a_scored_slot_is_the_stored_state_of_the_token_before_it(
    dataset: Dataset, samples: dict[str, Sample], states: dict[str, dict[str, torch.Tensor]]
) -> None:
    compared = 0
    for row in rows_of(data_of(dataset, STORED_TAPS, kl_weight=0.5)):
        assert row.last_hidden_CD is not None
        place = [(name, t) for name in row.batch.sample_ids for t in range(samples[name].num_tokens)]
        for n in range(row.batch.count):
            name, t = place[int(row.batch.teacher_N[n])]
            assert torch.equal(row.last_hidden_CD[int(row.batch.teacher_N[n])], states[name][LAST_HIDDEN][t])
            assert int(row.batch.label_N[n]) == samples[name].token_ids_T[t + 1]
            compared += 1
    assert compared > 100


def test_without_kl_the_last_hidden_state_is_not_read(dataset: Dataset) -> None:
    for row in rows_of(data_of(dataset, (1, 5), kl_weight=0.0)):
        assert row.last_hidden_CD is None and row.taps_CE.shape == (ROW_TOKENS, 2 * WIDTH)
