"""A Prefect server of the tests' own, and a small extraction to run on it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from flows.config import ExtractConfig, TrainConfig
from storage.dataset import Dataset
from tests.flows.plain_extraction import run_extraction
from tests.tiny import MASK_TOKEN_ID

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


def newest_artifacts() -> dict[str, Any]:
    """What the newest artifact of each key holds; a server shows two hundred at a time, the oldest first."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import ArtifactSort

    with get_client(sync_client=True) as client:
        newest_first = client.read_artifacts(sort=ArtifactSort.CREATED_DESC, limit=200)
    return {str(artifact.key): artifact.data for artifact in reversed(newest_first)}


def errors_logged(state: Any, level: int = logging.ERROR) -> list[str]:
    """What the log of a finished flow run says at this level or above, its tasks included."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import LogFilter
    from prefect.logging.handlers import APILogWorker

    sent: Any = APILogWorker.drain_all(timeout=180)
    assert not sent.not_done, "the server has not taken the log"
    query = {"flow_run_id": {"any_": [str(state.state_details.flow_run_id)]}, "level": {"ge_": level}}
    with get_client(sync_client=True) as client:
        return [record.message for record in client.read_logs(LogFilter.model_validate(query))]


def extraction(store: Path, chats: Path, target: Path, changes: Mapping[str, Any]) -> ExtractConfig:
    """Return the configuration of a small extraction."""
    values: dict[str, Any] = {
        "name": "tiny",
        "store": str(store),
        "chats": [str(chats)],
        "target": {
            "path": str(target),
            "dtype": "float32",
            "num_taps": 3,
            "batch_tokens": 512,
            "mask_token": MASK_TOKEN_ID,
        },
        "shard_tokens": 600,
        "workers": {"slots": ["cpu"], "silence_timeout_s": 60},
    }
    return ExtractConfig.model_validate(values | dict(changes))


@pytest.fixture
def extract_config(tmp_path: Path, chats: Path, tiny_target_dir: Path) -> Callable[..., ExtractConfig]:
    """Make the configuration of a small extraction into a store of the test's own."""
    return lambda **changes: extraction(tmp_path / "store", chats, tiny_target_dir, changes)


@pytest.fixture(scope="session")
def sealed(tmp_path_factory: pytest.TempPathFactory, chats: Path, tiny_target_dir: Path) -> Dataset:
    """A sealed data set of the small extraction; not to be changed."""
    store = tmp_path_factory.mktemp("sealed") / "store"
    dataset, outcome = run_extraction(extraction(store, chats, tiny_target_dir, {}))
    assert not outcome.failed
    return dataset


@pytest.fixture
def train_config(tmp_path: Path, sealed: Dataset, tiny_target_dir: Path) -> Callable[..., TrainConfig]:
    """Make the configuration of a small training run with an output of the test's own."""

    def make(**changes: Any) -> TrainConfig:
        values: dict[str, Any] = {
            "dataset": sealed.uri,
            "target": str(tiny_target_dir),
            "output": str(tmp_path / "output"),
            "drafter": {
                "block_size": 8,
                "num_layers": 2,
                "intermediate_size": 128,
                "num_heads": 4,
                "num_kv_heads": 2,
                "head_dim": 16,
            },
            "training": {
                "row_tokens": 512,
                "anchors_per_row": 32,
                "epochs": 3,
                "compute_dtype": "float32",
                "log_every": 1,
                "checkpoint_every": 4,
            },
        }
        return TrainConfig.model_validate(values | changes)

    return make
