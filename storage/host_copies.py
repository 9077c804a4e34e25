"""From states on a GPU to symbols on the host without waiting for either.

The arithmetic is enqueued on the stream that makes the states, the copy goes beside it.

A stream of its own for the arithmetic would not help: its kernels would wait for the end of whatever matrix
product fills the GPU, one after the other.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from storage.codec import Codec, Symbols

TRITON = importlib.util.find_spec("triton") is not None
"""Without it, which CUDA builds of torch bring along, a GPU is waited for once a cell."""


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
        room = int(states_TD.numel() * self.OUTLIERS_EXPECTED) if TRITON else None
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
