"""`dflash evaluate`: a drafter, its target and prompts in; a table, a JSON file and a plot of acceptance lengths out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_core.configuration import Config


class EvaluateConfig(Config):
    """What to measure, on what, and what is good enough."""

    target: str
    """Folder or hub name of the target."""
    drafter: Path
    """Exported drafter folder."""
    prompts: dict[str, Path]
    """Family name -> JSONL file of chats; the turns before the last assistant turn are the prompt."""
    output: Path
    """Folder for acceptance.json and acceptance.png."""
    prompts_per_family: int = 16
    max_new_tokens: int = 256
    temperature: float = 0.0
    minimum_acceptance_length: float | None = None
    """The run fails when any family stays below this."""
    tie_epsilon: float = 0.0
    """Two logits no further apart than this count as a floating-point tie when texts differ; 0 demands equality."""
    device: str = "auto"
    dtype: str = "bfloat16"


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Measure, write JSON and PNG, print the table and return the report. Raises UserError below the gate."""
    raise NotImplementedError
