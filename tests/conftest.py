"""Fixtures that every part of the suite shares; nothing here reaches a network."""

from __future__ import annotations

import os
import signal
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from tests.storage.seaweed import s3, s3_uri
from tests.tiny import write_tiny_target

__all__ = ["s3", "s3_uri"]

# A suite that a script started in the background inherits SIGINT as ignored, and so would the processes that
# tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 target of 6 layers and width 64 with a byte-level tokenizer (float32)."""
    return write_tiny_target(tmp_path_factory.mktemp("tiny-target"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where no CUDA device is present."""
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
