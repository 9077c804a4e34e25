"""A run's folder whose checkpoints cannot be written until failures of it were named in the log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage.objects import open_store

LOG = logging.getLogger("storage.checkpoints")


class Blocked(logging.Handler):
    """Where the folder of the checkpoints belongs there is a file, until so many failures were named."""

    def __init__(self, folder: Path, failures: int) -> None:
        super().__init__(logging.WARNING)
        self.folder, self.store = folder, open_store(folder)
        self.named = threading.Semaphore(0)
        self._file, self._left = folder / "checkpoints", failures
        folder.mkdir()
        self._file.write_text("not a folder")

    def emit(self, record: logging.LogRecord) -> None:
        assert "could not be written" in record.getMessage()
        self._left -= 1
        if self._left == 0:
            self._file.unlink()
        self.named.release()


Block = Callable[[int], Blocked]


@pytest.fixture
def blocked(tmp_path: Path) -> Iterator[Block]:
    """Takes the number of failures."""
    made: list[Blocked] = []

    def block(failures: int) -> Blocked:
        made.append(Blocked(tmp_path / "run", failures))
        LOG.addHandler(made[-1])
        return made[-1]

    yield block
    for handler in made:
        LOG.removeHandler(handler)
