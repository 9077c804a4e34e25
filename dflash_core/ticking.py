"""Something that happens now and then while a block runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def every(seconds: float, call: Callable[[], None], name: str) -> Iterator[None]:
    """Call on another thread of this name, `seconds` after each other, until the block ends."""
    over = threading.Event()

    def tick() -> None:
        while not over.wait(seconds):
            call()

    ticking = threading.Thread(target=tick, name=name, daemon=True)
    ticking.start()
    try:
        yield
    finally:
        over.set()
        ticking.join()
