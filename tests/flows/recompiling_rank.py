"""A training rank, the second of which meets a shape that it has not compiled once the run has begun."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from flows import ranks
from tests.core.aot_eager import aot_eager

reported = False


def recompile_late() -> None:
    """After this rank has reported what it compiled, have its next call of compiled code meet a new shape."""
    say, double = ranks.say, aot_eager(lambda x: x * 2, dynamic=False)

    def noting_say(kind: str, **fields: Any) -> None:
        global reported
        say(kind, **fields)
        reported = reported or kind == "compile_report"

    def late_compile(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled = aot_eager(model, **options)

        def call(*arguments: Any, **named: Any) -> Any:
            late = reported and os.environ["RANK"] == "1"
            with torch.no_grad():  # or validation would need a graph of its own
                double(torch.ones(4 if late else 3))
            return compiled(*arguments, **named)

        return call

    ranks.say = noting_say
    torch.compile = late_compile  # type: ignore[assignment]


def main() -> None:
    recompile_late()
    from flows import train_worker

    train_worker.main()


if __name__ == "__main__":
    ranks.serve_rank(main)
