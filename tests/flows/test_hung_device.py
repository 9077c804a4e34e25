"""A device that hangs is silence, whatever the worker would do next."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flows.config import ExtractConfig
from storage.host_copies import HostCopies
from tests.flows.test_extract import Ear, capturer_of


class UploadHeard(Ear):
    """Remembers that an upload has begun."""

    def __init__(self) -> None:
        self.uploads = threading.Event()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        if what == "upload":
            self.uploads.set()
        yield


def test_waiting_for_the_device_is_no_upload(
    extract_config: Callable[..., ExtractConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    capturer, dataset = capturer_of(extract_config(codec="lossless"))
    capturer.channel = ear = UploadHeard()  # type: ignore[assignment]
    device, real, asked = threading.Event(), HostCopies.finish, threading.Event()

    def hung(self: HostCopies, copy: Any) -> Any:
        asked.set()
        assert device.wait(60)
        return real(self, copy)

    monkeypatch.setattr(HostCopies, "finish", hung)
    finish = capturer._capture_shard(0, replace=False)
    thread = threading.Thread(target=finish)
    thread.start()
    assert asked.wait(60) and not ear.uploads.wait(0.5)
    device.set()
    thread.join(60)
    assert ear.uploads.is_set() and dataset.committed(0)
