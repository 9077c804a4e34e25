"""Which graphs the project compiles: what of a configuration enters them, and which sources."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.compile_fingerprint import GraphSet, graph_set
from dflash_core.drafter import DrafterConfig
from dflash_core.training import TrainingConfig

if TYPE_CHECKING:
    from dflash_core.target import TargetConfig

HERE = Path(__file__).parent
COMPILED_IN_TRAINING = ("drafter.py", "mask.py", "loss.py", "loss_kernel.py", "optimizer_kernel.py")
COMPILED_IN_EXTRACTION = ("fused.py", "packed_body.py", "quantise_kernel.py")
"""Files whose functions are compiled; what they import of ours counts too."""

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
    "expected_step_ms",
    "init_from",
    "only_samples",
    "validation_fraction",
    "validate_every",
    "validation_rows",
    "checkpoint_every",
    "keep_checkpoints",
    "log_every",
}
"""Fields of a training configuration that enter no graph."""
VALUES_OF_LOSS = {"gamma", "dpace_alpha", "kl_weight"}

VALUES_OF_TARGET = {"path", "revision", "mask_token", "tap_layer_ids", "num_taps", "compile_layers"}
"""Fields of a target that enter no graph: which weights, which layers are looked at."""
NAMES_IN_TEXT_CONFIG = {"_name_or_path", "transformers_version", "architectures"}
"""Of transformers' configuration, what says nothing of the layers; its version is in the environment."""


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
    return graph_set(name, settings, sources_of(COMPILED_IN_TRAINING))


def extraction_graphs(target: TargetConfig, text: dict[str, Any]) -> GraphSet:
    """Identify what a target compiles while its hidden states are captured.

    `text` is the target's own configuration of its text model, as JSON values.
    """
    settings = target.model_dump(mode="json", exclude=VALUES_OF_TARGET)
    settings |= {f"text.{name}": value for name, value in text.items() if name not in NAMES_IN_TEXT_CONFIG}
    name = f"capture-{text['model_type']}-{text['hidden_size']}w"
    return graph_set(name, settings, sources_of(COMPILED_IN_EXTRACTION))


def sources_of(names: Sequence[str]) -> list[Path]:
    """Return these files of `dflash_core` and all others of it that they import, at any depth, sorted."""
    found: set[Path] = set()
    todo = [HERE / name for name in names]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dflash_core."):
                todo.append(HERE / f"{str(node.module).split('.')[1]}.py")
    return sorted(found)
