"""Reads chat records from files, folders and Hugging Face data sets, and says where each came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class UnreadableRecord(dict):
    """Stands in the stream for a line that is no JSON object; `.error` says why."""

    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error


def read_chats(source: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (record, "file:line") from a .jsonl/.json/.parquet file (.gz/.zst too), a folder, or a data set name.

    A data set is `name`, `name:split` or `name:config:split`, streamed. Raise UserError when there is nothing to read.
    """
    raise NotImplementedError


def input_fingerprint(sources: Sequence[str]) -> str:
    """64 hex digits of the content of the files (or of the data set's commit), independent of where they lie."""
    raise NotImplementedError
