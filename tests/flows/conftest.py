"""A Prefect server of the tests' own, and a small extraction to run on it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.config import ExtractConfig

os.environ["PREFECT_LOGGING_LEVEL"] = "WARNING"
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"


@pytest.fixture(scope="session")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A temporary server with a database of its own; nothing reaches the developer's."""
    os.environ["PREFECT_HOME"] = str(tmp_path_factory.mktemp("prefect-home"))
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighteen chats of different lengths."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with path.open("w") as file:
        for i in range(18):
            answer = f"answer {i} " + "word " * (3 + 7 * i % 25)
            turns = [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": f"chat-{i}", "messages": turns}) + "\n")
    return path


@pytest.fixture
def extract_config(tmp_path: Path, chats: Path, tiny_target_dir: Path) -> Callable[..., ExtractConfig]:
    """Make the configuration of a small extraction into a store of the test's own."""

    def make(**changes: Any) -> ExtractConfig:
        values: dict[str, Any] = {
            "name": "tiny",
            "store": str(tmp_path / "store"),
            "chats": [str(chats)],
            "target": {"path": str(tiny_target_dir), "dtype": "float32", "num_taps": 3, "batch_tokens": 512},
            "shard_tokens": 600,
            "workers": {"slots": ["cpu"], "silence_timeout_s": 60},
        }
        return ExtractConfig.model_validate(values | changes)

    return make
