"""A training rank, the second of which compiles something anew once the run has begun.

Compiled functions get the backend "aot_eager", as in `tests.flows.watched_rank`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from flows import ranks

reported = False


def compile_late() -> None:
    """After this rank has reported what it compiled, have its next call of compiled code compile more."""
    compile_, say = torch.compile, ranks.say

    def noting_say(kind: str, **fields: Any) -> None:
        global reported
        say(kind, **fields)
        reported = reported or kind == "compile_report"

    def late_compile(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        kept = {name: value for name, value in options.items() if name not in ("mode", "options", "backend")}
        compiled = compile_(model, backend="aot_eager", **kept)

        def call(*arguments: Any, **named: Any) -> Any:
            global reported
            if reported and os.environ["RANK"] == "1":
                reported = False
                compile_(lambda x: x + 1, backend="aot_eager")(torch.ones(3))
            return compiled(*arguments, **named)

        return call

    ranks.say = noting_say
    torch.compile = late_compile  # type: ignore[assignment]


def main() -> None:
    compile_late()
    from flows import train_worker

    train_worker.main()


if __name__ == "__main__":
    ranks.serve_rank(main)
