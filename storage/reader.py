"""Feeds a trainer: packed rows of tokens and hidden states, fetched and decoded ahead of the step.

Fetching and entropy decoding run on threads; one more thread copies symbols to the device and turns them into
bf16 on a stream of its own, beside the step. Nothing compiled is called here.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from dflash_core.configuration import Config
from dflash_core.packing import PackedTokens, pack_tokens
from dflash_core.records import Sample
from storage.dataset import Dataset
from storage.fetch import GroupFetcher
from storage.pieces import DecodedPiece, Piece, PieceDecoder, RowEnd, Staging, pieces_of, use_device


class ReaderConfig(Config):
    """Resources of one reader (one a rank)."""

    threads: int = Field(default=4, ge=1)
    """Threads that decode cells."""
    fetch_threads: int = Field(default=8, ge=1)
    """Row groups that are fetched at a time."""
    prefetch_bytes: int = Field(default=1 << 30, ge=1)
    """Encoded bytes that are held at most. Beside them, host memory holds the decoded symbols of `threads`
    + 2 row groups (page-locked for a GPU), the device two rows."""


@dataclass(slots=True, eq=False)
class _RowMemory:
    """States of one row on the device."""

    states_CE: Tensor
    free: torch.cuda.Event | None = None
    """Passes when the consumer's work with the last row is done."""


@dataclass(frozen=True, slots=True, eq=False)
class _ReadyRow:
    packed: PackedTokens
    memory: _RowMemory
    written: torch.cuda.Event | None


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
        self._shape = (row_tokens, len(columns) * dataset.spec.target.hidden_size)
        on_gpu = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None
        self._stagings = [Staging(pinned=on_gpu) for _ in range(config.threads + 2)]
        self._decoder = PieceDecoder(dataset, columns, self._device, config.threads)
        self._fetcher = GroupFetcher(
            dataset,
            columns,
            (item.key for item in pieces_of(dataset, rows, row_tokens) if isinstance(item, Piece)),
            threads=config.fetch_threads,
            limit_bytes=config.prefetch_bytes,
        )
        self._free: queue.SimpleQueue[_RowMemory | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[_ReadyRow | None] = queue.SimpleQueue()
        self._lent: _RowMemory | None = None
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
        self._take_back()
        ready = self._ready.get()
        if ready is None:
            self.close()
            self._outcome.result()
            raise StopIteration
        if ready.written is not None:
            torch.cuda.current_stream(self._device).wait_event(ready.written)
        self._lent = ready.memory
        self.rows_read += 1
        return ready.packed, ready.memory.states_CE

    def close(self) -> None:
        """Stop the threads; idempotent. The row handed out last stays as it is."""
        self._forgotten()
        self._decoder.close()
        self._fetcher.close()
        if self._stream is not None:
            self._stream.synchronize()

    def __enter__(self) -> RowReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        """Make the memory of two rows: the one that is lent, and the one that is being filled."""
        for _ in range(2):
            states_CE = torch.zeros(self._shape, dtype=torch.bfloat16, device=self._device)
            self._free.put(_RowMemory(states_CE, self._event()))
        self._pump.start()

    def _take_back(self) -> None:
        if self._lent is not None:
            self._lent.free = self._event()
            self._free.put(self._lent)
            self._lent = None

    def _event(self) -> torch.cuda.Event | None:
        """Mark what has been enqueued on the current stream so far."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    # On the pump's thread.

    def _run(self) -> None:
        self._outcome.set_running_or_notify_cancel()
        try:
            use_device(self._device)
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
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
        pending: deque[Future[DecodedPiece] | RowEnd] = deque()
        places, running, started = len(self._stagings), 0, 0
        row: _RowInProgress | None = None
        items = pieces_of(self._dataset, self._rows, self._row_tokens)
        item = next(items, None)
        while (item is not None or pending) and not self._closed.is_set():
            if isinstance(item, RowEnd) and len(pending) < 2 * places:
                pending.append(item)
                item = next(items, None)
            elif (
                isinstance(item, Piece)
                and running < places
                and (fetched := self._fetcher.take(must=not running)) is not None
            ):
                pending.append(self._decoder.start(item, fetched, self._stagings[started % places]))
                running, started = running + 1, started + 1
                item = next(items, None)
            else:
                first = pending.popleft()
                row = row or _RowInProgress(self._row_memory())
                if isinstance(first, RowEnd):
                    self._hand_over(row)
                    row = None
                    continue
                decoded = first.result()
                self._decoder.write(decoded, row.memory.states_CE)
                row.add(decoded, self._dataset)
                self._fetcher.release(decoded.piece.key)
                running -= 1

    def _row_memory(self) -> _RowMemory:
        """Wait for memory that the consumer gave back."""
        memory = self._free.get()
        if memory is None:
            raise _Closed
        if memory.free is not None:
            torch.cuda.current_stream(self._device).wait_event(memory.free)
        return memory

    def _hand_over(self, row: _RowInProgress) -> None:
        packed = pack_tokens(row.samples, self._row_tokens)
        row.memory.states_CE[packed.num_tokens :].zero_()
        self._ready.put(_ReadyRow(packed, row.memory, self._event()))


def _stop(
    pump: threading.Thread, free: queue.SimpleQueue[_RowMemory | None], closed: threading.Event
) -> None:
    """End the pump's thread; by `RowReader.close`, or when the process ends."""
    closed.set()
    free.put(None)
    if pump.ident is not None:
        pump.join()


class _Closed(Exception):
    """The consumer left."""


class _RowInProgress:
    """The row that is being filled."""

    def __init__(self, memory: _RowMemory) -> None:
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
