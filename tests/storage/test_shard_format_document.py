"""The reader that docs/shard-format.md prints, run as it is printed, and the names that the page promises."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_core.configuration import Config
from storage.dataset import Dataset
from storage.dataset_spec import Manifest, Plan, PlannedShard, SealedShard
from storage.shard_format import RowGroupRecord, ShardRecord
from tests.storage.made import made_dataset, made_samples, made_spec, made_states, write_missing

PAGE = (Path(__file__).parents[2] / "docs" / "shard-format.md").read_text()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    made = made_dataset(tmp_path_factory.mktemp("store"), made_spec("lossless"), made_samples(6, longest=60))
    write_missing(made)
    return made


def test_the_printed_reader_reads(dataset: Dataset) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 10
    printed = io.StringIO()
    for record in dataset.records().values():
        names: dict[str, Any] = {"SHARD": dataset.store.open(record.object)}
        with contextlib.redirect_stdout(printed):
            exec(snippet, names)
    assert "chat-000000 (" in printed.getvalue()
    import pyarrow.parquet as pq

    for record in dataset.records().values():
        table = pq.read_table(dataset.store.open(record.object))
        for sample in dataset.samples(record.shard):
            states_TD = made_states(sample, dataset.columns)["layer_001"]
            for row in table.filter(np.array(table["sample_id"]) == sample.sample_id).to_pylist():
                bits = names["read_cell"](row["layer_001"])
                found_TD = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
                start = row["first_token"]
                assert torch.equal(found_TD, states_TD[start : start + len(found_TD)])
                tokens = np.frombuffer(row["token_ids"], "<i4")
                assert (tokens == sample.token_ids_T[start : start + len(tokens)]).all()


def test_every_object_is_on_the_page(dataset: Dataset) -> None:
    for info in dataset.store.list():
        name = re.sub(r"00\d{3}(-[0-9a-f]{16})?", "00000", info.key)
        assert name.split(".")[0].split("-")[0] in PAGE, info.key


@pytest.mark.parametrize("kind", [Plan, PlannedShard, ShardRecord, RowGroupRecord, Manifest, SealedShard])
def test_every_field_is_on_the_page(kind: type[Config]) -> None:
    assert [name for name in kind.model_fields if f"`{name}`" not in PAGE] == []


def test_every_column_is_on_the_page(dataset: Dataset) -> None:
    import pyarrow.parquet as pq

    columns = pq.read_schema(dataset.store.open(dataset.record(0).object)).names
    assert all(f"`{name}`" in PAGE for name in columns if not name.startswith("layer_"))
