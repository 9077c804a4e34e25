"""Against a store that is far away, as many requests are under way as the configuration says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from storage.dataset import open_dataset
from storage.objects import StoreConfig, open_store
from storage.reader import ReaderConfig, RowReader
from tests.storage.faulty_proxy import FaultyProxy, Rule, faulty_proxy
from tests.storage.made import made_dataset, made_samples, made_spec, write_missing
from tests.storage.seaweed import SeaweedServer

PART = 5 << 20


@pytest.fixture
def far(s3: SeaweedServer, s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A server each of whose answers takes a while."""
    with faulty_proxy(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.mark.parametrize("parts", [2, 6])
def test_parts_of_an_upload_and_of_a_long_read(
    parts: int, far: FaultyProxy, s3_uri: str, tmp_path: Path
) -> None:
    store = open_store(s3_uri, StoreConfig(part_bytes=PART, parallel_parts=parts))
    data = bytes(8 * PART)
    (tmp_path / "large").write_bytes(data)
    far.rules = [Rule("delay", "PUT", "partNumber", times=99)]
    store.put_file("large", tmp_path / "large")
    assert far.most_delayed == parts
    far.most_delayed, far.rules = 0, [Rule("delay", "GET", "large", times=99)]
    assert store.get_range("large", 0, len(data)) == data
    assert far.most_delayed == parts


@pytest.mark.parametrize("fetches", [2, 12])
def test_row_groups_of_a_reader(fetches: int, far: FaultyProxy, s3_uri: str) -> None:
    write_missing(made_dataset(open_store(s3_uri), made_spec(), made_samples(60)))
    dataset = open_dataset(s3_uri, connection=StoreConfig(parallel_parts=9))
    rows = [np.array([sample]) for sample in range(60)]
    far.rules = [Rule("delay", "GET", "shards/", times=999)]
    config = ReaderConfig(fetch_threads=fetches)
    with RowReader(dataset, dataset.columns, rows, row_tokens=64, device="cpu", config=config) as reader:
        assert sum(1 for _ in reader) == 60
    assert fetches - 1 <= far.most_delayed <= fetches
