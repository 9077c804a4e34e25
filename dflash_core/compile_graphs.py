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
TRAINING_SOURCES = ("drafter.py", "mask.py", "loss.py", "loss_kernel.py")
EXTRACTION_SOURCES = ("fused.py", "packed_body.py")

ONLY_NUMBERS = frozenset(
    {"rope_theta", "mask_token_id", "tap_convention", "tap_layer_ids", "target_num_layers"}
)
"""Fields of a drafter that change values in tensors, but no shape and no kernel."""


def training_graphs(drafter: DrafterConfig, training: TrainingConfig) -> GraphSet:
    """Identify the graphs of a training step, its backward, and an evaluation step."""
    shape = drafter.model_dump(mode="json", exclude=set(ONLY_NUMBERS))
    settings: dict[str, Any] = {
        **{f"drafter.{name}": value for name, value in shape.items()},
        "drafter.taps": len(drafter.tap_layer_ids),
        "row_tokens": training.row_tokens,
        "anchors_per_row": training.anchors_per_row,
        "compute_dtype": training.compute_dtype,
        "checkpoint_layers": training.checkpoint_layers,
        "kl": training.loss.kl_weight > 0,
    }
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
