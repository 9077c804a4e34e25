"""Runs another module and sends it a signal the moment it has said a certain thing: who listens may be late.

`-m tests.flows.signalled SIGNAL MESSAGE MARK MODULE ARGUMENTS...`. MESSAGE is a JSON object, of which what is
said must hold all fields. MARK is a file that is made with the signal: where it is, none is sent any more.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows import ranks
from flows.channel import Channel


def main() -> None:
    name, message, mark, module = (sys.argv.pop(1) for _ in range(4))
    wanted = json.loads(message)

    def listening(say: Callable[..., None]) -> Callable[..., None]:
        def say_and_listen(*arguments: Any, **fields: Any) -> None:
            say(*arguments, **fields)
            said = {"kind": arguments[-1] if arguments else None, **fields}
            if wanted.items() <= said.items() and not Path(mark).exists():
                Path(mark).touch()
                os.kill(os.getpid(), signal.Signals[name])

        return say_and_listen

    ranks.say = listening(ranks.say)
    Channel.say = listening(Channel.say)  # type: ignore[method-assign]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
