"""A training rank whose data come late: `-m tests.flows.starved_rank SECONDS RUN`, so long for each step."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from flows import train_worker
from flows.ranks import serve_rank
from flows.train_data import TrainingData
from tests.core.aot_eager import aot_eager


def main() -> None:
    seconds, steps = float(sys.argv.pop(1)), TrainingData.steps

    def late(*arguments: Any) -> Iterator[Any]:
        for step in steps(*arguments):
            time.sleep(seconds)
            yield step

    torch.compile = aot_eager  # type: ignore[assignment]
    TrainingData.steps = late  # type: ignore[assignment, method-assign]
    train_worker.main()


if __name__ == "__main__":
    serve_rank(main)
