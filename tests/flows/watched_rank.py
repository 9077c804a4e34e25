"""Runs another rank's main and tells in which threads it called compiled code, compiled, and traced.

`-m tests.flows.watched_rank MODULE ARGUMENTS...`
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch.fx import Tracer

from flows.ranks import say, serve_rank
from tests.core.aot_eager import aot_eager

calls: Counter[str] = Counter()
compiles: Counter[str] = Counter()
traces: Counter[str] = Counter()


def here() -> str:
    return threading.current_thread().name


def watch_compile() -> None:
    """Make `torch.compile` note each call of what it returns, and each compile and trace note its thread."""
    trace = Tracer.trace

    def noting_compile(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled = aot_eager(model, **options)

        def call(*arguments: Any, **named: Any) -> Any:
            calls[here()] += 1
            return compiled(*arguments, **named)

        return call

    def noting_trace(self: Tracer, *arguments: Any, **named: Any) -> Any:
        traces[here()] += 1
        return trace(self, *arguments, **named)

    def note_compile(_: CallbackArgs) -> None:
        compiles[here()] += 1

    torch.compile = noting_compile  # type: ignore[assignment]
    Tracer.trace = noting_trace  # type: ignore[method-assign]
    callback_handler.register_start_callback(note_compile)


def main() -> None:
    module = sys.argv.pop(1)
    watch_compile()
    importlib.import_module(module).main()
    others = sorted(thread.name for thread in threading.enumerate())
    say("threads", calls=dict(calls), compiles=dict(compiles), traces=dict(traces), alive=others)


if __name__ == "__main__":
    serve_rank(main)
