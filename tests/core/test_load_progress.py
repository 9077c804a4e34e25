"""Loading tells that files are read, and that it hangs by saying nothing."""

from __future__ import annotations

import mmap
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_core.chat import ChatConfig
from dflash_core.load_progress import LEAST_BYTES, tell_while_reading
from dflash_core.respond import Responder
from dflash_core.target import TargetConfig, load_target
from tests.tiny import MASK_TOKEN_ID

MIB = 1 << 20


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_core.load_progress.LOOK_EVERY_S", 0.05)


def signs(block: Callable[[], object]) -> int:
    """Run it and count how often it was said to be alive."""
    heard: list[float] = []
    with tell_while_reading(lambda: heard.append(time.monotonic())):
        block()
    return len(heard)


def write_file(folder: Path) -> Path:
    """A file of 64 MiB that is on the disk and in no cache, where the file system allows that."""
    path = folder / "weights"
    with path.open("wb") as file:
        file.write(os.urandom(MIB) * 64)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def test_reading_is_told(tmp_path: Path) -> None:
    with write_file(tmp_path).open("rb") as file:

        def read() -> None:
            while file.read(4 * MIB):
                time.sleep(0.03)

        assert signs(read) > 3


def test_reading_a_mapped_file_is_told(tmp_path: Path) -> None:
    """As safetensors does, whose bytes no read call counts."""
    with write_file(tmp_path).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock

        def read() -> None:
            for start in range(0, len(mapped), 4 * MIB):
                sum(mapped[start : start + 4 * MIB : 4096])
                time.sleep(0.03)

        heard = signs(read)
        if resource.getrusage(resource.RUSAGE_SELF).ru_inblock == before:
            pytest.skip("the file stayed in memory")
        assert heard > 0


def test_what_hangs_is_silent() -> None:
    assert LEAST_BYTES > 10_000, "the looks themselves read"
    assert signs(lambda: time.sleep(1.0)) == 0


def test_targets_and_responders_tell_it(tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_core.load_progress.LOOK_EVERY_S", 0.001)
    monkeypatch.setattr("dflash_core.load_progress.LEAST_BYTES", 1)
    heard: list[str] = []
    config = TargetConfig(path=str(tiny_target_dir), num_taps=2, dtype="float32", mask_token=MASK_TOKEN_ID)
    load_target(config, "cpu", lambda: heard.append("target"))
    Responder(str(tiny_target_dir), None, ChatConfig(), "cpu", alive=lambda: heard.append("responder"))
    assert {"target", "responder"} == set(heard)
