"""Writes one shard: takes captured samples in plan order, encodes them, and commits the shard whole or not at all."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from dflash_core.configuration import Config
from dflash_core.records import CapturedSample
from storage.dataset import Dataset
from storage.shard_format import ShardRecord


class WriterConfig(Config):
    """Resources of one shard writer."""

    threads: int = 2
    """Threads of the entropy coder."""
    pending_bytes: int = 256 << 20
    """`ShardWriter.add` waits while more bytes of symbols than this wait to be coded or written."""


class ShardWriter:
    """An open shard. `add` every planned sample in order, then `close`; leaving the block otherwise leaves nothing.

    with ShardWriter(dataset, shard, scratch_dir) as writer:
        for captured in ...: writer.add(captured)
        record = writer.close()
    """

    def __init__(
        self,
        dataset: Dataset,
        shard: int,
        scratch_dir: Path,
        config: WriterConfig | None = None,
        *,
        replace: bool = False,
    ) -> None:
        """`replace` redoes a committed shard: the old one counts until the new one is committed.

        Raises ShardAlreadyCommitted at once when the shard has a record and not `replace`;
        DatasetError when the codec needs scales that are not published.
        """

    def add(self, captured: CapturedSample) -> None:
        """Encode one sample: states bf16 [T, D] on any device, one per data column.

        Raises UserError naming the sample when it is not the next of the plan or a shape or dtype is wrong.
        """

    def close(self) -> ShardRecord:
        """Finish the file, upload it, commit the record. Raises ShardAlreadyCommitted, StoreError."""
        raise NotImplementedError

    def abort(self) -> None:
        """Drop everything; idempotent."""

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
