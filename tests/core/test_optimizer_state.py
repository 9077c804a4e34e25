"""A checkpoint's state is taken over whole or not at all: what differs is named, and nothing is changed."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from dflash_core.configuration import UserError
from dflash_core.training import Trainer
from tests.core.training_rows import make_row, random_samples, tiny_trainer


def trained(optimizer: str) -> tuple[Trainer, dict[str, Tensor]]:
    """A trainer after one step, and a copy of its state."""
    trainer = tiny_trainer(optimizer={"name": optimizer, "ema_decay": 0.9})
    trainer.step([make_row(random_samples([20, 30]), trainer.drafter.config)], 1)
    return trainer, {name: value.clone() for name, value in trainer.state().items()}


def refused(optimizer: str, state: dict[str, Tensor], words: str) -> None:
    """A new trainer must name what is wrong with the state, and be as it was."""
    trainer = tiny_trainer(optimizer={"name": optimizer, "ema_decay": 0.9})
    before = {name: value.clone() for name, value in trainer.state().items()}
    with pytest.raises(UserError, match=words):
        trainer.load_state(state, 1)
    after = trainer.state()
    assert after.keys() == before.keys() and trainer.optimizer_step == 0
    assert all(torch.equal(after[name], before[name]) for name in before)


MOMENTS = [
    ("adamw", "optimizer/exp_avg/fc.weight"),
    ("adamw", "optimizer/exp_avg_sq/hidden_norm.weight"),
    ("adamw", "optimizer/step/fc.weight"),
    ("muon", "optimizer/momentum_buffer/fc.weight"),
    ("muon", "optimizer/exp_avg/hidden_norm.weight"),
    ("adamw", "optimizer/ema/fc.weight"),
    ("muon", "model/fc.weight"),
]


@pytest.mark.parametrize(("optimizer", "name"), MOMENTS)
def test_a_tensor_that_is_missing_unknown_or_misshapen_is_named(optimizer: str, name: str) -> None:
    _, state = trained(optimizer)
    told = re.escape(name.split("/", 1)[1])
    shape = re.escape(str(tuple(state[name].shape)))
    refused(optimizer, {k: v for k, v in state.items() if k != name}, f": {told} is missing$")
    refused(optimizer, state | {f"{name}s": state[name]}, f": {told}s is unknown$")
    wrong = state | {name: torch.zeros(2, 2)}
    refused(optimizer, wrong, rf": {told} has the shape \(2, 2\) instead of {shape}$")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_after_a_step_no_moment_may_be_missing(optimizer: str) -> None:
    _, state = trained(optimizer)
    weights = {name: value for name, value in state.items() if "model/" in name or "/ema/" in name}
    refused(optimizer, weights, r"is missing; .*and \d+ more$")
    fresh = tiny_trainer(optimizer={"name": optimizer, "ema_decay": 0.9})
    fresh.load_state(weights, 0)  # before the first there are none
    assert torch.equal(fresh.drafter.fc.weight, state["model/fc.weight"])
