"""A rank that has started, and comes to be one only after its parent has ended; imports no torch."""

from __future__ import annotations

import os
import time

from flows.ranks import say, serve_rank


def main() -> None:
    say("trained")


if __name__ == "__main__":
    parent = os.getppid()
    say("hello", rank=0, pid=os.getpid(), parent=parent)
    while os.getppid() == parent:
        time.sleep(0.01)
    serve_rank(main)
