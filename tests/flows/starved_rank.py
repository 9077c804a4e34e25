"""A training rank whose data come late: `-m tests.flows.starved_rank SECONDS RUN`, so long for each row."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from flows import train_worker
from flows.ranks import serve_rank
from flows.train_data import TrainingData
from tests.core.aot_eager import aot_eager


def main() -> None:
    seconds, prepare = float(sys.argv.pop(1)), TrainingData.prepare

    def late(*arguments: Any) -> Any:
        time.sleep(seconds)
        return prepare(*arguments)

    torch.compile = aot_eager  # type: ignore[assignment]
    TrainingData.prepare = late  # type: ignore[method-assign]
    train_worker.main()


if __name__ == "__main__":
    serve_rank(main)
