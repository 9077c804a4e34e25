"""From states on a GPU to symbols on the host without waiting for either.

The arithmetic is enqueued on the stream that makes the states, the copy goes beside it.

A stream of its own for the arithmetic would not help: its kernels would wait for the end of whatever matrix
product fills the GPU, one after the other.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch

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
        codec.encode_on_device(states_TD, torch.ones(width, device=device), outlier_room=1)
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


@dataclass(slots=True, eq=False)
class HostCopy:
    """Symbols on their way to the host, and what must stay alive until they are there."""

    symbols: Symbols
    """On the host once `arrived` has passed."""
    arrived: torch.cuda.Event | None
    on_device: Symbols
    states_TD: torch.Tensor
    scale_D: torch.Tensor | None


class HostCopies:
    """Encodes on the current stream, and copies to page-locked memory on a stream of its own."""

    OUTLIERS_EXPECTED = 1 / 256
    """Room for so many outliers a value; a cell with more of them is encoded again, waiting."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._stream: torch.cuda.Stream | None = None

    def start(self, states_TD: torch.Tensor, scale_D: torch.Tensor | None) -> HostCopy:
        """Enqueue everything. Raises CodecError."""
        if not states_TD.is_cuda:
            symbols = self._codec.encode_on_device(states_TD, scale_D)
            return HostCopy(symbols, None, symbols, states_TD, scale_D)
        room = None
        if encodes_without_waiting(self._codec, states_TD.shape[-1], states_TD.device):
            room = int(states_TD.numel() * self.OUTLIERS_EXPECTED)
        symbols = self._codec.encode_on_device(states_TD, scale_D, outlier_room=room)
        if self._stream is None:
            self._stream = torch.cuda.Stream(states_TD.device)
        self._stream.wait_stream(torch.cuda.current_stream(states_TD.device))
        with torch.cuda.stream(self._stream):
            host = symbols.map(_page_locked_copy)
        # Blocking: the thread that waits for the copy must not keep a core busy.
        arrived = self._stream.record_event(torch.cuda.Event(blocking=True))
        return HostCopy(host, arrived, symbols, states_TD, scale_D)

    def finish(self, copy: HostCopy) -> Symbols:
        """Wait for the copy; return whole symbols on the host."""
        if copy.arrived is not None:
            copy.arrived.synchronize()
        settled = copy.symbols.settled()
        if settled is None:
            settled = self._codec.encode_on_device(copy.states_TD, copy.scale_D).to("cpu")
        return settled


def _page_locked_copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
