"""PNG plots of a run: loss, acceptance by family and by slot. Drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot_training(steps: Sequence[Mapping[str, float]], path: Path, title: str = "") -> Path:
    """Loss and acceptance against optimizer step; `steps` are metric rows with a "step" key."""
    raise NotImplementedError


def plot_acceptance(families: Mapping[str, Mapping[str, Any]], path: Path, title: str = "") -> Path:
    """Acceptance length per family (bars) and acceptance per slot (lines)."""
    raise NotImplementedError
