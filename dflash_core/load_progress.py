"""Tells that a checkpoint is being read: loading one is a single call that says nothing for minutes."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_core.ticking import every

LOOK_EVERY_S = 5.0
LEAST_BYTES = 1 << 20
"""What must have moved between two looks; the looks themselves read and say a few hundred bytes."""


@contextmanager
def tell_while_reading(alive: Callable[[], None]) -> Iterator[None]:
    """Call `alive`, on another thread, every five seconds in which this block moved bytes of files.

    A block that hangs, in a lost mount for instance, is silent.
    """
    seen = bytes_moved()

    def look() -> None:
        nonlocal seen
        moved = bytes_moved()
        if moved - seen >= LEAST_BYTES:
            alive()
        seen = moved

    with every(LOOK_EVERY_S, look, "load progress"):
        yield


def bytes_moved() -> int:
    """Bytes that this process has read and written so far, by calls or through mapped files; a measure, not a
    sum: what comes from a disk by a call counts twice, and of a page that is waited for only itself counts.
    """
    moved = resource.getrusage(resource.RUSAGE_SELF).ru_majflt * resource.getpagesize()
    with suppress(OSError):  # Linux alone has it
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        moved += sum(int(counts[name]) for name in ("rchar", "wchar", "read_bytes"))
    return moved
