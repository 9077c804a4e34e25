"""Feeds a trainer: packed rows of tokens and hidden states, fetched and decoded ahead of the step.

Fetching and decoding run on threads. With a GPU, these copy symbols there, beside the step; the arithmetic
that makes bf16 of them is enqueued on the consumer's stream when it asks for the row. Nothing compiled is
called here.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from dflash_core.configuration import Config, UserError
from dflash_core.packing import PackedTokens, pack_tokens
from dflash_core.records import Sample
from storage.codec import parse_codec
from storage.dataset import Dataset
from storage.fetch import GroupFetcher
from storage.pieces import DecodedPiece, Piece, PieceDecoder, RowEnd, Staging, pieces_of, use_device
from storage.rows import DeviceRow, DeviceStates, HostRow, RowShape


class ReaderConfig(Config):
    """Resources of one reader (one a rank)."""

    threads: int = Field(default=4, ge=1)
    """Threads that decode cells; no more than there are cores."""
    fetch_threads: int = Field(default=8, ge=1)
    """Row groups that are fetched at a time. Raise it for a store that is far away."""
    prefetch_bytes: int = Field(default=1 << 30, ge=1)
    """Encoded bytes that are held at most. Beside them: with a GPU, the decoded symbols of `threads` + 2 row
    groups in page-locked memory, and on the GPU the symbols of two rows and the states of one; without, those
    of one column of `threads` row groups, and the states of two rows."""


RowMemory = HostRow | DeviceRow


class RowReader:
    """Iterates over (PackedTokens, states): one packed row a step, in the order of `rows`.

    states: bf16 [C, len(columns) * D] on `device`, zeros in padding. They stay untouched until the next row
    is asked for: whatever uses them must be enqueued on the current stream by then.

    with RowReader(dataset, columns, rows, row_tokens=C, device=device) as reader:
        for packed, states_CE in reader: ...

    Errors of the threads (ShardCorrupt naming shard, row and remedy; StoreError) are raised where the row is
    asked for; the rows before it are still handed out.
    """

    def __init__(
        self,
        dataset: Dataset,
        columns: Sequence[str],
        rows: Sequence[np.ndarray | None],
        *,
        row_tokens: int,
        device: torch.device | str,
        config: ReaderConfig | None = None,
    ) -> None:
        """`rows[i]` holds sample numbers in the order of `dataset.index` (`dflash_core.packing.plan_epoch`);
        None or no sample gives a row of padding. `columns` is any choice of `dataset.columns`, in any order.

        Raises UserError when a column is not stored, or scales are missing.
        """
        config = config or ReaderConfig()
        if dataset.sealed:
            dataset.manifest()  # from now on, only the records that were sealed are accepted
        self._dataset, self._rows, self._row_tokens = dataset, rows, row_tokens
        self._device = _with_index(torch.device(device))
        self._shape = _row_shape(dataset, columns, row_tokens, self._device)
        self._copies = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._decoder = PieceDecoder(dataset, columns, self._device, config.threads, self._stagings(config))
        self._places = config.threads + 2
        self._fetcher = GroupFetcher(
            dataset,
            columns,
            (item.key for item in pieces_of(dataset, rows, row_tokens) if isinstance(item, Piece)),
            threads=config.fetch_threads,
            limit_bytes=config.prefetch_bytes,
        )
        self._free: queue.SimpleQueue[RowMemory | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[tuple[PackedTokens, RowMemory] | None] = queue.SimpleQueue()
        self._lent: RowMemory | None = None
        self._closed = threading.Event()
        self._outcome: Future[None] = Future()
        # A consumer that fails without closing its reader must not hang when the process ends.
        self._pump = threading.Thread(target=self._run, name="row-pump", daemon=True)
        self._forgotten = weakref.finalize(self, _stop, self._pump, self._free, self._closed)
        self.rows_read = 0
        """Rows handed out: the reader's position in `rows`."""

    def __iter__(self) -> Iterator[tuple[PackedTokens, Tensor]]:
        return self

    def __next__(self) -> tuple[PackedTokens, Tensor]:
        if self._closed.is_set():
            raise StopIteration
        if self._pump.ident is None:
            self._start()
        if self._lent is not None:
            self._free.put(self._lent)
            self._lent = None
        ready = self._ready.get()
        if ready is None:
            self.close()
            self._outcome.result()
            raise StopIteration
        packed, memory = ready
        states_CE = memory.states()
        if memory.reusable:
            self._free.put(memory)
        else:
            self._lent = memory
        self.rows_read += 1
        return packed, states_CE

    def close(self) -> None:
        """Stop the threads; idempotent. The row handed out last stays as it is."""
        self._forgotten()
        self._decoder.close()
        self._fetcher.close()
        if self._copies is not None:
            self._copies.synchronize()

    def __enter__(self) -> RowReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        for memory in self._new_memory():
            self._free.put(memory)
        self._pump.start()

    def _new_memory(self) -> Sequence[RowMemory]:
        """Make the memory of two rows: one is in use, or waits for its use, while the other one is filled."""
        if self._copies is None:
            return [HostRow(self._shape) for _ in range(2)]
        target = DeviceStates(self._shape)
        return [DeviceRow(self._shape, target, self._copies) for _ in range(2)]

    def _stagings(self, config: ReaderConfig) -> list[Staging]:
        """One for each thread, and for a GPU two more whose copies are on their way."""
        if self._copies is None:
            return [Staging(pinned=False) for _ in range(config.threads)]
        size = self._shape.piece_bytes(min(self._dataset.spec.row_group_tokens, self._row_tokens))
        return [Staging(size + size // 64, pinned=True) for _ in range(config.threads + 2)]

    # On the pump's thread.

    def _run(self) -> None:
        self._outcome.set_running_or_notify_cancel()
        try:
            use_device(self._device)
            self._fill_rows()
            self._outcome.set_result(None)
        except _Closed:
            self._outcome.set_result(None)
        except BaseException as error:  # noqa: BLE001 - it is raised again where the row is asked for
            self._outcome.set_exception(error)
        finally:
            self._ready.put(None)

    def _fill_rows(self) -> None:
        """Keep the decoders busy and finish pieces in order, which is also the order that frees memory."""
        pending: deque[tuple[_RowInProgress, Future[DecodedPiece] | None]] = deque()
        running = 0
        row: _RowInProgress | None = None
        items = pieces_of(self._dataset, self._rows, self._row_tokens)
        item = next(items, None)
        while (item is not None or pending) and not self._closed.is_set():
            if row is None and item is not None:
                row = self._new_row(must=not pending)
            if row is not None and isinstance(item, RowEnd) and len(pending) < 2 * self._places:
                pending.append((row, None))
                row, item = None, next(items, None)
            elif (
                row is not None
                and isinstance(item, Piece)
                and running < self._places
                and (fetched := self._fetcher.take(must=not running)) is not None
            ):
                pending.append((row, self._decoder.start(item, fetched, row.memory)))
                running, item = running + 1, next(items, None)
            else:
                first, decoding = pending.popleft()
                if decoding is None:
                    self._hand_over(first)
                    continue
                decoded = decoding.result()
                first.add(decoded, self._dataset)
                self._fetcher.release(decoded.piece.key)
                running -= 1

    def _new_row(self, *, must: bool) -> _RowInProgress | None:
        """Begin a row in memory that the consumer has no need of; waits for some if it `must`."""
        if not must and self._free.empty():
            return None
        memory = self._free.get()
        if memory is None:
            raise _Closed
        memory.begin()
        return _RowInProgress(memory)

    def _hand_over(self, row: _RowInProgress) -> None:
        packed = pack_tokens(row.samples, self._row_tokens)
        row.memory.end(packed.num_tokens)
        self._ready.put((packed, row.memory))


def _stop(pump: threading.Thread, free: queue.SimpleQueue[RowMemory | None], closed: threading.Event) -> None:
    """End the pump's thread; by `RowReader.close`, or when the process ends."""
    closed.set()
    free.put(None)
    if pump.ident is not None:
        pump.join()


class _Closed(Exception):
    """The consumer left."""


class _RowInProgress:
    """The row that is being filled."""

    def __init__(self, memory: RowMemory) -> None:
        self.memory = memory
        self.samples: list[Sample] = []
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, decoded: DecodedPiece, dataset: Dataset) -> None:
        """Note the tokens of a piece."""
        self._parts.append((decoded.token_ids_T, decoded.loss_mask_T))
        if decoded.piece.last:
            tokens, masks = zip(*self._parts, strict=True)
            self.samples.append(
                Sample(
                    sample_id=dataset.index.sample_ids[decoded.piece.sample].as_py(),
                    token_ids_T=np.concatenate(tokens),
                    loss_mask_T=np.concatenate(masks),
                )
            )
            self._parts = []


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _row_shape(dataset: Dataset, columns: Sequence[str], row_tokens: int, device: torch.device) -> RowShape:
    """Raises UserError when a column is not stored, or the scales that the codec needs are missing."""
    absent = [column for column in columns if column not in dataset.columns]
    if absent or not columns:
        raise UserError(
            f"{dataset.uri} does not hold {', '.join(absent) or 'no columns at all'}; it has "
            f"{', '.join(dataset.columns)}: extract again with these taps, or train on those"
        )
    codec = parse_codec(dataset.spec.codec)
    scales = dataset.scales() if codec.needs_scales else {}
    if scales is None:
        raise UserError(f"{dataset.uri} has no scales: its extraction has not begun")
    width = dataset.spec.target.hidden_size
    return RowShape(codec, row_tokens, width, [scales.get(column) for column in columns], device)
