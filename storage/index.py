"""The index of a data set: where each sample lies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Index:
    """Where each sample lies; N samples in plan order, all int32."""

    sample_ids: pa.ChunkedArray
    """Strings [N]; `index.sample_ids[i].as_py()`."""
    shard_N: np.ndarray
    row_group_N: np.ndarray
    """Row group of part 0; part p lies in row group + p."""
    row_N: np.ndarray
    """Row of part 0 inside its row group; later parts are row 0 of theirs."""
    parts_N: np.ndarray
    tokens_N: np.ndarray
    supervised_N: np.ndarray
    """Tokens whose loss mask is set."""

    def __len__(self) -> int:
        return len(self.tokens_N)


def read_index(data: bytes) -> Index:
    """Parse index.parquet."""
    table = pq.read_table(pa.BufferReader(data))
    numbers = {f"{name}_N": table[name].to_numpy() for name in table.column_names if name != "sample_id"}
    return Index(sample_ids=table["sample_id"], **numbers)
