"""Which graphs the project compiles: what of a configuration enters them, and which sources."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.compile_fingerprint import GraphSet, graph_set
from dflash_core.drafter import DrafterConfig
from dflash_core.training import TrainingConfig

if TYPE_CHECKING:
    from dflash_core.target import TargetConfig

HERE = Path(__file__).parent
TRAINING_SOURCES = ("drafter.py", "draft_layers.py", "fp8.py", "mask.py", "loss.py", "loss_kernel.py")
EXTRACTION_SOURCES = ("fused.py", "packed_body.py")

# What is not named here counts, so that a new field can cost a compile but never hide one.
VALUES_OF_DRAFTER = {"rope_theta", "mask_token_id", "tap_convention", "tap_layer_ids", "target_num_layers"}
"""Fields of a drafter that change values in tensors, but no shape and no kernel."""
VALUES_OF_TRAINING = {
    "rows_per_step",
    "epochs",
    "max_steps",
    "seed",
    "loss",
    "optimizer",
    "compile",
    "on_recompile",
    "init_from",
    "validation_fraction",
    "validate_every",
    "validation_rows",
    "checkpoint_every",
    "keep_checkpoints",
    "log_every",
}
"""Fields of a training configuration that enter no graph."""
VALUES_OF_LOSS = {"gamma", "dpace_alpha", "kl_weight"}


def training_graphs(drafter: DrafterConfig, training: TrainingConfig) -> GraphSet:
    """Identify the graphs of a training step, its backward, and an evaluation step."""
    parts = {
        "drafter": drafter.model_dump(mode="json", exclude=VALUES_OF_DRAFTER),
        "training": training.model_dump(mode="json", exclude=VALUES_OF_TRAINING),
        "loss": training.loss.model_dump(mode="json", exclude=VALUES_OF_LOSS),
    }
    settings = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
    settings |= {"drafter.taps": len(drafter.tap_layer_ids), "loss.kl": training.loss.kl_weight > 0}
    name = (
        f"train-{drafter.hidden_size}w-{drafter.num_layers}l-"
        f"{training.row_tokens}x{training.anchors_per_row}x{drafter.block_size}"
    )
    return graph_set(name, settings, [HERE / source for source in TRAINING_SOURCES])


def extraction_graphs(target: TargetConfig, shape: dict[str, Any]) -> GraphSet:
    """Identify what a target compiles while its hidden states are captured.

    `shape` is what the target's own configuration says of its layers (model type, widths, number of layers).
    """
    fields = {"taps", "num_taps", "last_hidden", "dtype", "attention", "batching", "batch_tokens"}
    settings = {**target.model_dump(mode="json", include=fields), **shape}
    name = f"capture-{shape.get('model_type', 'target')}-{shape.get('hidden_size', 0)}w"
    return graph_set(name, settings, [HERE / source for source in EXTRACTION_SOURCES])
