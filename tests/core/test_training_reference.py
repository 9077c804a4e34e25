"""The trainer against training written out as loops: labels, weights, losses, gradients, every metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_core.blocks import build_blocks
from dflash_core.drafter import Drafter
from dflash_core.metrics import Summary
from dflash_core.packing import pack_tokens
from dflash_core.records import Sample
from dflash_core.training import Trainer, TrainingConfig, TrainingRow
from tests.core.reference_training import (
    Block,
    Document,
    Model,
    blocks_of,
    mean_loss,
    metrics_of,
    possible_anchors,
)
from tests.core.tiny_drafter import tiny_config
from tests.core.training_rows import ALONE, make_row, taps_of

MASK = 3
"""So few tokens that a random drafter is often right."""
ROW_TOKENS = 40
PUBLISHED = {"block_size": 8, "num_layers": 1, "layer_types": None}
"""A block for which there is a published decay length."""
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decay": ({}, {"gamma": 1.5}),
    "published decay": (PUBLISHED, {}),
    "dpace": ({}, {"weighting": "dpace"}),
    "dpace, hardly smoothed": (PUBLISHED, {"weighting": "dpace", "dpace_alpha": 0.1}),
    "uniform": ({}, {"weighting": "uniform"}),
    "decay and KL": ({}, {"gamma": 1.5, "kl_weight": 0.4}),
    "dpace and KL": ({}, {"weighting": "dpace", "kl_weight": 0.7}),
    "uniform, KL alone": (PUBLISHED, {"weighting": "uniform", "kl_weight": 1.0}),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def make_sample(name: str, mask: str) -> Sample:
    """`mask`: "." for a token of the prompt, "x" for one of the answer."""
    generator = np.random.default_rng(list(name.encode()))
    return Sample(
        sample_id=name,
        token_ids_T=generator.integers(0, MASK, len(mask)).astype(np.int32),
        loss_mask_T=np.array([m == "x" for m in mask]),
    )


ROWS: list[tuple[list[Sample], int]] = [
    # Two turns; one token; shorter than a block; a prompt alone; padding behind. More anchors than needed.
    (
        [
            make_sample("turns", "...xxxxxx..xxx"),
            make_sample("token", "x"),
            make_sample("short", "xxx"),
            make_sample("asked", "...."),
            make_sample("reply", "..xxxxxxxx"),
        ],
        30,
    ),
    # One as long as the row, with fewer anchors than it has room for.
    ([make_sample("whole", "." * 5 + "x" * (ROW_TOKENS - 5))], 14),
    # Nothing at all.
    ([], 6),
]


def make_trainer(name: str, **training: Any) -> Trainer:
    changes, loss = LOSSES[name]
    optimizer = {"learning_rate": 1e-2, "warmup_fraction": 0.0, "clip_norm": None}
    config = TrainingConfig.model_validate(
        {"compute_dtype": "float32", "loss": {"chunk_slots": 7, **loss}, "optimizer": optimizer, **training}
    )
    drafter = Drafter(tiny_config(vocab_size=MASK + 1, mask_token_id=MASK, **changes), torch.float32)
    drafter.init_weights(0, std=0.3)
    generator = torch.Generator().manual_seed(7)
    embedding, head = (torch.randn(MASK + 1, drafter.config.hidden_size, generator=generator) for _ in "eh")
    return Trainer(drafter, embedding, head, config, total_steps=100, world=ALONE)


def rows_for(trainer: Trainer, epoch: int = 0) -> list[TrainingRow]:
    return [
        make_row(samples, trainer.drafter.config, row_tokens=ROW_TOKENS, anchors=anchors, epoch=epoch)
        for samples, anchors in ROWS
    ]


def documents_for(trainer: Trainer, epoch: int = 0) -> list[Document]:
    """The documents of the same rows. Where there are anchors enough, every possible one is used."""
    return [
        document
        for samples, anchors in ROWS
        for document in _documents(trainer, samples, anchors=anchors, epoch=epoch)
    ]


def _documents(trainer: Trainer, samples: Sequence[Sample], *, anchors: int, epoch: int) -> list[Document]:
    possible = [possible_anchors(sample.loss_mask_T.tolist()) for sample in samples]
    chosen = possible
    if sum(map(len, possible)) > anchors:
        assert len(samples) == 1
        packed = pack_tokens(samples, ROW_TOKENS)
        config = trainer.drafter.config
        blocks = build_blocks(
            packed,
            anchors=anchors,
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            seed=0,
            epoch=epoch,
        )
        chosen = [blocks.anchor_A.tolist()]
        assert len(set(chosen[0])) == anchors and set(chosen[0]) < set(possible[0])
    width = len(trainer.drafter.config.tap_layer_ids) * trainer.drafter.config.hidden_size
    states = [taps_of(sample, width + trainer.drafter.config.hidden_size) for sample in samples]
    return [
        Document(
            tokens=sample.token_ids_T.tolist(),
            supervised=sample.loss_mask_T.tolist(),
            taps_TE=states_TE[:, :width],
            last_hidden_TD=states_TE[:, width:],
            anchors=positions,
        )
        for sample, states_TE, positions in zip(samples, states, chosen, strict=True)
    ]


def model_of(trainer: Trainer, weights: Mapping[str, Tensor] | None = None) -> Model:
    """The trainer's model as it is now, or with other weights."""
    weights = weights or dict(trainer.drafter.named_parameters())
    return Model(
        config=trainer.drafter.config,
        weights={name: p.detach().double().requires_grad_() for name, p in weights.items()},
        embedding_VD=trainer._embedding_VD.double(),
        head_VD=trainer._head_VD.double(),
    )


@cache
def first_blocks(name: str) -> tuple[Model, list[Block]]:
    """The loops over the first epoch's rows with the initial weights, and the model, which has the gradient
    of the mean loss.
    """
    trainer = make_trainer(name)
    model = model_of(trainer)
    blocks = reference_blocks(trainer, model)
    mean_loss(blocks).backward()
    return model, blocks


def reference_blocks(trainer: Trainer, model: Model, epoch: int = 0) -> list[Block]:
    return blocks_of(model, trainer.config.loss, documents_for(trainer, epoch))


def reference_metrics(trainer: Trainer, blocks: Sequence[Block], times: int = 1) -> dict[str, Any]:
    tokens = times * sum(sample.num_tokens for samples, _ in ROWS for sample in samples)
    return metrics_of(blocks, trainer.drafter.config.block_size, tokens)


def assert_metrics(found: Summary, expected: dict[str, Any]) -> None:
    assert found.as_dict().keys() == expected.keys()
    for name, value in found.as_dict().items():
        assert value == pytest.approx(expected[name], rel=1e-4, nan_ok=True), name


def assert_telling(metrics: dict[str, Any]) -> None:
    """Whatever one metric or slot could be taken for is another number."""
    assert metrics["acceptance_length"] > 1.1
    assert metrics["acceptance_length"] != pytest.approx(metrics["acceptance_length_whole"], rel=1e-3)
    pairs = list(zip(metrics["slot_accuracy"], metrics["slot_acceptance"], strict=True))
    assert all(accuracy > acceptance for accuracy, acceptance in pairs[1:])
    for name in ("slot_loss", "slot_accuracy", "slot_acceptance"):
        assert metrics[name] != pytest.approx(metrics[name][::-1], rel=1e-2)


@every_loss
def test_each_scored_slot_has_the_label_weight_and_losses_of_the_loops(name: str) -> None:
    trainer = make_trainer(name)
    slots = [slot for block in first_blocks(name)[1] for slot in block]
    at = 0
    for row in rows_for(trainer):
        losses, weights_N = trainer.forward(row)
        count = row.batch.count
        expected = slots[at : at + count]
        at += count
        assert row.batch.label_N[:count].tolist() == [slot.label for slot in expected]
        for found, value in (
            (weights_N, [slot.weight for slot in expected]),
            (losses.ce_N, [slot.cross_entropy for slot in expected]),
            (losses.loss_N, [float(slot.loss.detach()) for slot in expected]),
            (losses.correct_N, [float(slot.correct) for slot in expected]),
        ):
            assert found[:count].tolist() == pytest.approx(value, rel=1e-4, abs=1e-5)
            assert not found[count:].any(), "padding"
    assert at == len(slots) > 90


@every_loss
def test_a_step_follows_the_gradient_of_the_loops(name: str) -> None:
    """Adam's first moment after one step is a tenth of the gradient."""
    trainer = make_trainer(name)
    model, blocks = first_blocks(name)
    rows = rows_for(trainer)
    trainer.step(rows, len(rows))
    state = trainer.state()
    square = 0.0
    for parameter, weight in model.weights.items():
        assert weight.grad is not None
        found = 10 * state[f"optimizer/exp_avg/{parameter}"].double()
        assert float((found - weight.grad).norm() / weight.grad.norm()) < 1e-4, parameter
        square += float(weight.grad.pow(2).sum())
    summary, found_norm = trainer.summary()
    assert found_norm == pytest.approx(math.sqrt(square), rel=1e-4)
    assert summary.loss == pytest.approx(float(mean_loss(blocks).detach()), rel=1e-4)


@every_loss
def test_every_metric_of_two_steps_is_counted_as_the_loops_count(name: str) -> None:
    trainer = make_trainer(name)
    first, second = rows_for(trainer), rows_for(trainer, epoch=1)
    trainer.step(first, len(first))
    blocks = [*first_blocks(name)[1], *reference_blocks(trainer, model_of(trainer), epoch=1)]
    trainer.step(second, len(second))
    expected = reference_metrics(trainer, blocks, times=2)
    assert_telling(expected)
    assert_metrics(trainer.summary()[0], expected)


@every_loss
def test_every_metric_of_validation_is_counted_as_the_loops_count(name: str) -> None:
    trainer = make_trainer(name)
    expected = reference_metrics(trainer, first_blocks(name)[1])
    assert_telling(expected)
    assert_metrics(trainer.validate(rows_for(trainer)), expected)
    assert_metrics(trainer.validate(rows_for(trainer)), expected)  # and starts anew each time


def test_without_whole_blocks_their_metrics_are_not_numbers() -> None:
    trainer = make_trainer("decay")
    samples = [make_sample("short", "xxx"), make_sample("other", ".xx")]
    row = make_row(samples, trainer.drafter.config, row_tokens=ROW_TOKENS, anchors=4)
    documents = _documents(trainer, samples, anchors=4, epoch=0)
    expected = metrics_of(blocks_of(model_of(trainer), trainer.config.loss, documents), 5, 6)
    assert math.isnan(expected["acceptance_length_whole"]) and math.isnan(expected["slot_loss"][3])
    assert expected["blocks"] == 3 and expected["scored_slots"] == 4
    assert_metrics(trainer.validate([row]), expected)


def test_validation_is_that_of_the_averaged_weights() -> None:
    optimizer = {"learning_rate": 3e-2, "warmup_fraction": 0.0, "ema_decay": 0.3}
    trainer, plain = make_trainer("dpace and KL", optimizer=optimizer), make_trainer("dpace and KL")
    average = {name: p.detach().clone() for name, p in trainer.drafter.named_parameters()}
    rows = rows_for(trainer)
    for decay in (1 / 10, 2 / 11, 3 / 12, 0.3):
        trainer.step(rows, len(rows))
        for name, p in trainer.drafter.named_parameters():
            average[name] = decay * average[name] + (1 - decay) * p.detach()
    own = {name: p.detach().clone() for name, p in trainer.drafter.named_parameters()}
    found = trainer.validate(rows)
    assert_metrics(found, reference_metrics(trainer, reference_blocks(trainer, model_of(trainer, average))))
    plain.drafter.load_state_dict(average)
    assert_metrics(found, plain.validate(rows).as_dict())
    plain.drafter.load_state_dict(own)
    assert found.loss != pytest.approx(plain.validate(rows).loss, rel=1e-2), "not that of the last step"
    for name, p in trainer.drafter.named_parameters():
        assert torch.equal(p, own[name]), "learning goes on from the run's own weights"
