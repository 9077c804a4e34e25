"""Where the numbers of a training run go: the parent process, a JSONL file, TensorBoard, and W&B when it is
asked for.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from dflash_core.configuration import UserError
from flows.ranks import say

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
SCORE = "validation/acceptance_length"
"""The number by which checkpoints are compared."""
WANDB_FILE = "wandb-run.txt"
"""Id of the run on W&B, which a resumed run continues."""


class TrainLog:
    """Open log of one run; rank 0 alone writes.

    W&B is used when the variable WANDB_PROJECT is set (and the package's extra `wandb` installed).
    """

    def __init__(self, folder: Path, *, first: bool, settings: Mapping[str, Any], start_step: int) -> None:
        """Steps after `start_step`, the last one finished, are written anew: a resumed run repeats them."""
        self.score: float | None = None
        """What the run before this one found at `start_step`, if it got so far and this rank writes."""
        self._first = first
        self._file: TextIO | None = None
        self._board: Any = None
        self._wandb: Any = None
        if not first:
            return
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        self.score = _drop_rows_after(folder / METRICS_FILE, start_step)
        self._file = (folder / METRICS_FILE).open("a")
        self._board = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=start_step + 1)
        self._board.add_text("configuration", f"```\n{json.dumps(dict(settings), indent=1)}\n```", start_step)
        if os.environ.get("WANDB_PROJECT"):
            self._wandb = _start_wandb(settings, folder)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Write numbers (and lists of numbers, one a slot) of an optimizer step."""
        if self._file is None:
            return
        row = {"step": step, **{name: _plain(value) for name, value in values.items()}}
        say("metrics", **row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        scalars = _scalars(row)
        for name, value in scalars.items():
            self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(scalars, step=step)

    def event(self, kind: str, **fields: Any) -> None:
        """Tell the parent of something that is not a number."""
        if self._first:
            say(kind, **fields)

    def __enter__(self) -> TrainLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if error is None else 1)


def _drop_rows_after(path: Path, step: int) -> float | None:
    """Drop later rows, which belong to the part of a run that was lost; return the score of this step."""
    score: float | None = None
    if not path.exists():
        return score
    kept = path.with_name(f"{path.name}.kept")
    with path.open() as old, kept.open("w") as new:
        for line in old:
            if not line.endswith("}\n") or (row := json.loads(line))["step"] > step:
                continue
            new.write(line)
            if row["step"] == step:
                score = row.get(SCORE, score)
    kept.replace(path)
    return score


def _start_wandb(settings: Mapping[str, Any], folder: Path) -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError(
            "WANDB_PROJECT is set but wandb is not installed: "
            "pip install -e '.[wandb]', or unset the variable"
        ) from None
    path = folder / WANDB_FILE
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return wandb.init(id=path.read_text(), config=dict(settings), dir=str(folder), resume="allow")


def _plain(value: Any) -> Any:
    """JSON has no NaN: a mean over nothing becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _scalars(row: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, bool) or value is None or name == "step":
            continue
        if isinstance(value, int | float):
            found[name] = value
        elif isinstance(value, list):
            numbers = [(i, v) for i, v in enumerate(value, start=1) if isinstance(v, int | float)]
            found |= {f"{name}/{i:02d}": v for i, v in numbers}
    return found
