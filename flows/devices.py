"""Keeps two runs of one host off the same GPU: a lock file for each GPU, held as long as it is used."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from flows.launch import visible_gpus

log = logging.getLogger(__name__)

FOLDER = Path(tempfile.gettempdir()) / f"dflash-gpus-{os.getuid()}"


@contextlib.contextmanager
def hold_devices(slots: Sequence[str], folder: Path = FOLDER) -> Iterator[None]:
    """Have the GPUs of these slots ("0", "2,3"; "cpu" has none) to oneself in this block.

    Waits, and says so, while another run of this user and host holds one. The lock ends with the process that
    holds it, however it ends.
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
                log.warning("GPU %s is used by process %s; waiting for it", gpu, file.read().strip() or "?")
                fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        yield
