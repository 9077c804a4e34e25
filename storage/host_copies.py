"""From states on a GPU to symbols on the host without waiting for either.

The arithmetic is enqueued on the stream that makes the states, the copy goes beside it.

A stream of its own for the arithmetic would not help: its kernels would wait for the end of whatever matrix
product fills the GPU, one after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from storage.cell import CellHeader
from storage.codec import Codec
from storage.symbols import Symbols

log = logging.getLogger(__name__)


@cache
def encodes_without_waiting(codec: Codec, width: int, device: torch.device) -> bool:
    """Whether encoding such cells waits for nothing: a codec without a kernel never waits, one with a kernel
    where that can be built and launched; tried once, and warned of where it cannot.

    Triton needs a C compiler and Python's headers, and a disk to keep what it built. Without the kernel the
    device is waited for once a cell.
    """
    if not codec.has_kernel:
        return True
    states_TD = torch.zeros(1, width, dtype=torch.bfloat16, device=device)
    try:
        codec.encode_at_once([(states_TD, torch.ones(width, device=device))], [1])
    except torch.OutOfMemoryError:  # says nothing of the kernel
        raise
    except Exception as error:  # noqa: BLE001  of Triton, a compiler or the disk, of any type
        log.warning(
            "codec %s goes without its kernel, and %s is waited for once a cell: %s: %s; see whether `dflash "
            "doctor` finds a C compiler",
            *(codec.name, device, type(error).__name__, error),
        )
        return False
    return True


States = tuple[torch.Tensor, torch.Tensor | None]
"""bf16 [T, D], and the scale of each channel where there is one."""


@dataclass(slots=True, eq=False)
class HostCopy:
    """Symbols of a cell on their way to the host, and what must stay alive until they are there."""

    symbols: Sequence[Symbols]
    """On the host once `arrived` has passed."""
    cell: int
    """Which of them."""
    size: int
    """Bytes of the cell's symbols."""
    arrived: torch.cuda.Event | None
    on_device: Sequence[Symbols]
    states: States


class HostCopies:
    """Encodes on the current stream, and copies to page-locked memory on a stream of its own."""

    OUTLIERS_EXPECTED = 1 / 256
    """Room for so many outliers a value; a cell with more of them is encoded again, waiting."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._stream: torch.cuda.Stream | None = None

    def start(self, cells: Sequence[States]) -> list[HostCopy]:
        """Enqueue everything for cells of one width and device. Raises CodecError."""
        if not cells:
            return []
        states_TD, scale_D = cells[0]
        device = states_TD.device
        if not states_TD.is_cuda:
            symbols = [self._codec.encode_on_device(*states) for states in cells]
            return _host_copies(symbols, None, symbols, [s.header for s in symbols], cells)
        at_once = scale_D is not None and self._codec.has_kernel
        if at_once and encodes_without_waiting(self._codec, states_TD.shape[-1], device):
            rooms = [int(states_TD.numel() * self.OUTLIERS_EXPECTED) for states_TD, _ in cells]
            batch = self._codec.encode_at_once(cells, rooms)
            with self._beside(device):
                return _host_copies(batch.map(_page_locked_copy), self._event(), batch, batch.headers, cells)
        symbols = [self._codec.encode_on_device(*states) for states in cells]
        with self._beside(device):
            on_host = [s.map(_page_locked_copy) for s in symbols]
            return _host_copies(on_host, self._event(), symbols, [s.header for s in symbols], cells)

    @contextmanager
    def _beside(self, device: torch.device) -> Iterator[None]:
        """On the stream of the copies, behind what is on the current one."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def _event(self) -> torch.cuda.Event:
        # Blocking: the thread that waits for the copy must not keep a core busy.
        return torch.cuda.current_stream().record_event(torch.cuda.Event(blocking=True))

    def finish(self, copy: HostCopy) -> Symbols:
        """Wait for the copy; return whole symbols on the host."""
        if copy.arrived is not None:
            copy.arrived.synchronize()
        settled = copy.symbols[copy.cell].settled()
        if settled is None:
            settled = self._codec.encode_on_device(*copy.states).to("cpu")
        return settled


def _host_copies(
    symbols: Sequence[Symbols],
    arrived: torch.cuda.Event | None,
    on_device: Sequence[Symbols],
    headers: Sequence[CellHeader],
    cells: Sequence[States],
) -> list[HostCopy]:
    # Nothing may be asked of the symbols themselves: each answer would be a launch.
    return [
        HostCopy(symbols, cell, header.payload_bytes, arrived, on_device, states)
        for cell, (header, states) in enumerate(zip(headers, cells, strict=True))
    ]


def _page_locked_copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
