"""Keeps two runs of one host off the same GPU: a lock file for each GPU, held as long as it is used."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

FOLDER = Path(tempfile.gettempdir()) / f"dflash-gpus-{os.getuid()}"
_held: set[int] = set()
"""Descriptors of the locks that this process holds."""


@contextlib.contextmanager
def hold_devices(slots: Sequence[str], folder: Path = FOLDER) -> Iterator[None]:
    """Have the GPUs of these slots ("0", "2,3"; "cpu" has none) to oneself in this block.

    Waits, and says so, while another run of this user and host holds one. The lock ends with the last of the
    processes that hold it, however they end: this one, and those that it gave `held_locks` to.
    """
    with contextlib.ExitStack() as stack:
        # In a fixed order, so that two runs never wait for each other.
        for gpu in sorted({gpu for slot in slots for gpu in visible_gpus(slot)}):
            folder.mkdir(mode=0o700, exist_ok=True)
            file = stack.enter_context((folder / f"gpu-{gpu}.lock").open("a+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                log.warning(
                    "GPU %s is used by process %s, or by what is left of its run; waiting for it",
                    gpu,
                    file.read().strip() or "?",
                )
                fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            _held.add(file.fileno())
            stack.callback(_held.remove, file.fileno())
        yield


def held_locks() -> tuple[int, ...]:
    """Return the descriptors that a process which uses the GPUs must inherit (`pass_fds`), or the next run
    would begin while those of a killed one are still ending.
    """
    return tuple(_held)


def visible_gpus(slot: str) -> list[str]:
    """Return the GPUs of a slot ("0", "2,3"; "cpu" has none) by the names that a child must be given.

    Numbers count within CUDA_VISIBLE_DEVICES where that is set, as they do for everything else here.
    """
    gpus = [] if slot == "cpu" else [gpu.strip() for gpu in slot.split(",")]
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if names == [""]:
        return gpus
    return [names[int(gpu)] if gpu.isdigit() and int(gpu) < len(names) else gpu for gpu in gpus]
