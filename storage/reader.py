"""Feeds a trainer: packed rows of tokens and hidden states, fetched and decoded ahead of the step.

Fetching and entropy decoding run on threads; one more thread copies symbols to the device and turns them into
bf16 on a stream of its own, beside the step. Nothing compiled is called here.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from dflash_core.configuration import Config, UserError
from dflash_core.packing import PackedTokens, pack_tokens
from dflash_core.records import Sample
from storage.cell import read_header
from storage.codec import Codec, CodecError, Symbols, parse_codec
from storage.dataset import Dataset
from storage.fetch import GroupFetcher, GroupKey, RowGroup
from storage.shard_format import ShardCorrupt, mend


class ReaderConfig(Config):
    """Resources of one reader (one a rank)."""

    threads: int = Field(default=4, ge=1)
    """Threads that decode cells."""
    fetch_threads: int = Field(default=8, ge=1)
    """Row groups that are fetched at a time."""
    prefetch_bytes: int = Field(default=1 << 30, ge=1)
    """Encoded bytes that are held at most. Beside them, host memory holds the decoded symbols of `threads`
    + 2 row groups (page-locked for a GPU), the device two rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """The part of a sample that one row group holds."""

    row: int
    sample: int
    """Number in the index."""
    key: GroupKey
    row_in_group: int
    first_token: int
    tokens: int
    start: int
    """Its first position in the packed row."""
    last: bool
    """Of its sample."""


@dataclass(frozen=True, slots=True)
class _RowEnd:
    row: int


@dataclass(slots=True, eq=False)
class _Staging:
    """Host memory for the symbols of one piece; `copied` says when the device has them."""

    pinned: bool
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    copied: torch.cuda.Event | None = None

    def reserve(self, size: int) -> Tensor:
        """Wait until the last copy is done and return at least `size` bytes."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.memory.numel() < size:
            self.memory = torch.empty(size + size // 4, dtype=torch.uint8, pin_memory=self.pinned)
        return self.memory


@dataclass(frozen=True, slots=True, eq=False)
class _Decoded:
    """A piece after entropy decoding."""

    token_ids_T: np.ndarray
    loss_mask_T: np.ndarray
    symbols: list[Symbols]
    """One a column, one behind the other in the staging memory."""
    states_TE: Tensor | None
    """The states themselves, when the device is the CPU."""


@dataclass(slots=True, eq=False)
class _RowMemory:
    """States of one row on the device; `free` says when the consumer's work with the last row is done."""

    states_CE: Tensor
    free: torch.cuda.Event | None = None


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

    Errors of the threads (ShardCorrupt naming shard, row and remedy; StoreError) are raised where the row
    is asked for.
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
        self._dataset, self._columns, self._rows = dataset, tuple(columns), rows
        self._row_tokens, self._device = row_tokens, _with_index(torch.device(device))
        self._config = config or ReaderConfig()
        self._codec: Codec = parse_codec(dataset.spec.codec)
        self._index = dataset.index
        self._width = dataset.spec.target.hidden_size
        self._scales = self._load_scales()
        cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if cuda else None
        self._stagings = [_Staging(pinned=cuda) for _ in range(self._config.threads + 2)]
        self._fetcher = GroupFetcher(
            dataset,
            columns,
            (item.key for item in self._items() if isinstance(item, _Piece)),
            threads=self._config.fetch_threads,
            limit_bytes=self._config.prefetch_bytes,
        )
        self._decoders = ThreadPoolExecutor(
            self._config.threads, "cell-decoder", initializer=_use_device, initargs=(self._device,)
        )
        self._pump_thread = ThreadPoolExecutor(1, "row-pump")
        self._free: queue.SimpleQueue[_RowMemory | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[_ReadyRow | None] = queue.SimpleQueue()
        self._lent: _RowMemory | None = None
        self._pump: Future[None] | None = None
        self._closed = False
        self.rows_read = 0
        """Rows handed out: the reader's position in `rows`."""

    def __iter__(self) -> Iterator[tuple[PackedTokens, Tensor]]:
        return self

    def __next__(self) -> tuple[PackedTokens, Tensor]:
        if self._closed:
            raise StopIteration
        if self._pump is None:
            self._start()
        if self._lent is not None:
            if self._stream is not None:
                self._lent.free = torch.cuda.current_stream(self._device).record_event()
            self._free.put(self._lent)
            self._lent = None
        ready = self._ready.get()
        if ready is None:
            assert self._pump is not None
            pump = self._pump
            self.close()
            pump.result()
            raise StopIteration
        if ready.written is not None:
            torch.cuda.current_stream(self._device).wait_event(ready.written)
        self._lent = ready.memory
        self.rows_read += 1
        return ready.packed, ready.memory.states_CE

    def close(self) -> None:
        """Stop the threads; idempotent. Rows handed out stay valid."""
        self._closed = True
        self._free.put(None)
        self._pump_thread.shutdown()
        self._decoders.shutdown(cancel_futures=True)
        self._fetcher.close()
        if self._stream is not None:
            self._stream.synchronize()

    def __enter__(self) -> RowReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The plan.

    def _items(self) -> Iterator[_Piece | _RowEnd]:
        """Everything that has to be done, in order."""
        longest = self._dataset.spec.row_group_tokens
        index = self._index
        for row, samples in enumerate(self._rows):
            start = 0
            for sample in [] if samples is None else samples.tolist():
                tokens, first = int(index.tokens_N[sample]), 0
                if start + tokens > self._row_tokens:
                    raise UserError(
                        f"the samples of row {row} do not fit in its {self._row_tokens} tokens: plan the "
                        "rows of an epoch with the row_tokens of the reader"
                    )
                for part in range(int(index.parts_N[sample])):
                    key = GroupKey(int(index.shard_N[sample]), int(index.row_group_N[sample]) + part)
                    size = min(longest, tokens - first)
                    yield _Piece(
                        row=row,
                        sample=sample,
                        key=key,
                        row_in_group=0 if part else int(index.row_N[sample]),
                        first_token=first,
                        tokens=size,
                        start=start + first,
                        last=part + 1 == int(index.parts_N[sample]),
                    )
                    first += size
                start += tokens
            yield _RowEnd(row)

    def _load_scales(self) -> dict[str, Tensor | None]:
        absent = [column for column in self._columns if column not in self._dataset.columns]
        if absent or not self._columns:
            raise UserError(
                f"{self._dataset.uri} does not hold {', '.join(absent) or 'no columns at all'}; "
                f"it has {', '.join(self._dataset.columns)}: extract again with these taps, or train on those"
            )
        scales = self._dataset.scales() if self._codec.needs_scales else {}
        if scales is None:
            raise UserError(f"{self._dataset.uri} has no scales: its extraction has not begun")
        return {c: scales[c].to(self._device) if c in scales else None for c in self._columns}

    # On the pump's thread.

    def _start(self) -> None:
        width = len(self._columns) * self._width
        for _ in range(2):
            states_CE = torch.zeros(self._row_tokens, width, dtype=torch.bfloat16, device=self._device)
            filled = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()
            self._free.put(_RowMemory(states_CE, filled))
        self._pump = self._pump_thread.submit(self._run)

    def _run(self) -> None:
        try:
            _use_device(self._device)
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                self._fill_rows()
        except _Closed:
            pass
        finally:
            self._ready.put(None)

    def _fill_rows(self) -> None:
        """Keep the decoders busy and finish pieces in order, which is also the order that frees memory."""
        pending: deque[tuple[_Piece, Future[_Decoded], _Staging] | _RowEnd] = deque()
        places = len(self._stagings)
        running = started = 0
        row = _RowInProgress(self)
        items = self._items()
        item = next(items, None)
        while (item is not None or pending) and not self._closed:
            if isinstance(item, _RowEnd) and len(pending) < 2 * places:
                pending.append(item)
                item = next(items, None)
            elif (
                isinstance(item, _Piece)
                and running < places
                and (fetched := self._fetcher.take(must=not running))
            ):
                staging = self._stagings[started % places]
                pending.append((item, self._decoders.submit(self._decode, item, fetched, staging), staging))
                running, started = running + 1, started + 1
                item = next(items, None)
            else:
                first = pending.popleft()
                if isinstance(first, _RowEnd):
                    row.finish()
                    continue
                piece, decoded, staging = first
                row.write(piece, decoded.result(), staging)
                self._fetcher.release(piece.key)
                running -= 1

    def _row_memory(self) -> _RowMemory:
        memory = self._free.get()
        if memory is None:
            raise _Closed
        if memory.free is not None:
            torch.cuda.current_stream(self._device).wait_event(memory.free)
        return memory

    # On the decoders' threads.

    def _decode(self, piece: _Piece, fetched: Future[RowGroup], staging: _Staging) -> _Decoded:
        group = fetched.result()
        record = group.record
        where = (
            f"shard {record.shard} ({record.object}) of {self._dataset.uri}, row "
            f"{group.first_row + piece.row_in_group}"
        )
        head = group.heads[piece.row_in_group]
        expected = self._index.sample_ids[piece.sample].as_py()
        found = (head.sample_id, head.first_token, len(head.token_ids_T), len(head.loss_mask_T))
        if found != (expected, piece.first_token, piece.tokens, piece.tokens):
            raise ShardCorrupt(f"{where} is not sample {expected!r}, as planned; {mend(self._dataset.uri)}")
        try:
            cells = [group.cells[column][piece.row_in_group] for column in self._columns]
            headers = [read_header(cell) for cell in cells]
            if any((h.tokens, h.width) != (piece.tokens, self._width) for h in headers):
                raise CodecError("a cell has another shape than its row")
            size = sum(header.payload_bytes for header in headers)
            memory, at, symbols = staging.reserve(size), 0, []
            for cell, header in zip(cells, headers, strict=True):
                symbols.append(self._codec.from_bytes(cell, out=memory[at:]))
                at += header.payload_bytes
        except CodecError as error:
            raise ShardCorrupt(f"{where}: {error}; {mend(self._dataset.uri)}") from error
        states_TE = None
        if self._stream is None:
            states_TE = torch.empty(piece.tokens, len(symbols) * self._width, dtype=torch.bfloat16)
            self._dequantise(symbols, states_TE)
        # Copies: the row group's bytes must not live as long as the row.
        return _Decoded(head.token_ids_T.copy(), head.loss_mask_T.copy(), symbols, states_TE)

    def _dequantise(self, symbols: list[Symbols], out_TE: Tensor) -> None:
        out_TLD = out_TE.view(len(out_TE), len(self._columns), self._width)
        for i, (column, of_column) in enumerate(zip(self._columns, symbols, strict=True)):
            self._codec.decode_on_device(of_column, self._scales[column], out_TLD[:, i])


class _Closed(Exception):
    """The consumer left."""


class _RowInProgress:
    """The row that is being filled; lives on the pump's thread."""

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader
        self._memory: _RowMemory | None = None
        self._samples: list[Sample] = []
        self._parts: list[_Decoded] = []

    def write(self, piece: _Piece, decoded: _Decoded, staging: _Staging) -> None:
        """Put a piece into its place; copies and arithmetic are enqueued, not waited for."""
        if self._memory is None:
            self._memory = self._reader._row_memory()
        out_TE = self._memory.states_CE[piece.start : piece.start + piece.tokens]
        if decoded.states_TE is not None:
            out_TE.copy_(decoded.states_TE)
        else:
            self._reader._dequantise(_upload(decoded.symbols, staging, out_TE.device), out_TE)
        self._parts.append(decoded)
        if piece.last:
            self._samples.append(
                Sample(
                    sample_id=self._reader._index.sample_ids[piece.sample].as_py(),
                    token_ids_T=np.concatenate([part.token_ids_T for part in self._parts]),
                    loss_mask_T=np.concatenate([part.loss_mask_T for part in self._parts]),
                )
            )
            self._parts = []

    def finish(self) -> None:
        """Hand the row to the consumer."""
        memory = self._memory or self._reader._row_memory()
        packed = pack_tokens(self._samples, self._reader._row_tokens)
        memory.states_CE[packed.num_tokens :].zero_()
        stream = self._reader._stream
        written = None if stream is None else stream.record_event()
        self._reader._ready.put(_ReadyRow(packed, memory, written))
        self._memory, self._samples = None, []


def _upload(symbols: list[Symbols], staging: _Staging, device: torch.device) -> list[Symbols]:
    """Copy all symbols of a piece at once; `staging` may be used again when its event has passed."""
    size = sum(of_column.header.payload_bytes for of_column in symbols)
    payload = staging.memory[:size].to(device, non_blocking=True)
    staging.copied = torch.cuda.current_stream(device).record_event()
    parts = payload.split([of_column.header.payload_bytes for of_column in symbols])
    return [Symbols(header=s.header, payload=part) for s, part in zip(symbols, parts, strict=True)]


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _use_device(device: torch.device) -> None:
    """Make a thread's CUDA calls (page-locking included) go to the reader's GPU, not to the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
