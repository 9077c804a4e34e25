"""Which configurations share compiled graphs, and which do not."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_core.compile_graphs import (
    COMPILED_IN_EXTRACTION,
    HERE,
    VALUES_OF_TRAINING,
    sources_of,
    training_graphs,
)
from dflash_core.training import TrainingConfig
from tests.core.tiny_drafter import tiny_config

DRAFTER = tiny_config()
TRAINING = TrainingConfig.model_validate({"loss": {"gamma": 4.0}})


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 7},
        {"epochs": 2, "max_steps": 5},
        {"optimizer": {"learning_rate": 1e-5}},
        {"loss": {"gamma": 9.0}},
        {"rows_per_step": 8},
        {"validation_fraction": 0.5},
    ],
)
def test_values_share_graphs(change: dict[str, Any]) -> None:
    other = TrainingConfig.model_validate({"loss": {"gamma": 4.0}} | change)
    assert other != TRAINING
    assert training_graphs(DRAFTER, other) == training_graphs(DRAFTER, TRAINING)


@pytest.mark.parametrize(
    "change",
    [
        {"row_tokens": 8192},
        {"anchors_per_row": 64},
        {"compute_dtype": "float32"},
        {"checkpoint_layers": True},
        {"layer_products": "fp8"},
        {"loss": {"gamma": 4.0, "kl_weight": 0.5}},
        {"loss": {"gamma": 4.0, "chunk_slots": 1024}},
    ],
)
def test_shapes_and_switches_do_not(change: dict[str, Any]) -> None:
    other = TrainingConfig.model_validate({"loss": {"gamma": 4.0}} | change)
    assert training_graphs(DRAFTER, other) != training_graphs(DRAFTER, TRAINING)


def test_shape_of_the_drafter_counts_and_its_taps_values_do_not() -> None:
    plain = training_graphs(DRAFTER, TRAINING)
    same = DRAFTER.model_copy(update={"rope_theta": 5e6, "mask_token_id": 3})
    assert training_graphs(same, TRAINING) == plain
    for field in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "block_size", "vocab_size"):
        wider = DRAFTER.model_copy(update={field: getattr(DRAFTER, field) * 2})
        assert training_graphs(wider, TRAINING) != plain, field
    more_taps = DRAFTER.model_copy(update={"tap_layer_ids": (*DRAFTER.tap_layer_ids, 5)})
    assert training_graphs(more_taps, TRAINING) != plain


def test_lists_name_what_exists() -> None:
    assert set(TrainingConfig.model_fields) >= VALUES_OF_TRAINING
    sources = set(training_graphs(DRAFTER, TRAINING).sources)
    assert {"drafter.py", "fp8.py", "mask.py", "loss.py"} <= sources, "what is imported counts"
    kernels = {path.name for path in HERE.glob("*.py") if "@triton.jit" in path.read_text()}
    assert kernels <= sources | {path.name for path in sources_of(COMPILED_IN_EXTRACTION)}
    assert not {"training.py", "metrics.py", "optimizer.py"} & sources, "nothing else does"
    assert [path.name for path in sources_of(["configuration.py"])] == ["configuration.py"]
    compiled = {path.name for path in HERE.glob("*.py") if "torch.compile(" in path.read_text()}
    assert compiled - {"compile_watch.py"} <= {"drafter.py", "fused.py", "target.py"}, (
        "another file compiles: add it to a graph set"
    )
