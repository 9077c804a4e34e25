"""The folder that serving engines read: config.json + model.safetensors, written at once, read back strictly."""

from __future__ import annotations

from pathlib import Path

import torch

from dflash_core.drafter import Drafter
from dflash_core.records import TargetSpec


def export_drafter(drafter: Drafter, folder: Path, target: TargetSpec) -> Path:
    """Write `drafter` as a `DFlashDraftModel` folder (bf16) and return it.

    The folder appears whole or not at all; an existing folder is replaced only if it is an exported drafter.
    Raises UserError when the folder read back does not give the same states as the drafter in bf16.
    """
    raise NotImplementedError


def load_exported(
    folder: Path,
    *,
    target: TargetSpec | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> Drafter:
    """Read an exported folder, strictly: UserError names every missing, unknown or misshapen tensor at once."""
    raise NotImplementedError
