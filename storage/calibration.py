"""Channel scales of a data set, from its first samples."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dflash_core import quantise


class Calibration:
    """One pass over a data set's calibration tokens: batches, order and device do not change its result."""

    def __init__(self) -> None:
        self._histograms: dict[str, quantise.ChannelHistogram] = {}

    def add(self, states: Mapping[str, Tensor]) -> None:
        """Count bf16 states [T, D] of each column."""
        for column, states_TD in states.items():
            if column not in self._histograms:
                self._histograms[column] = quantise.ChannelHistogram(states_TD.shape[1], states_TD.device)
            self._histograms[column].add(states_TD)

    def scales(self) -> dict[str, Tensor]:
        """Column -> float32 [D] on the host: robust RMS of each channel."""
        return {column: histogram.scale() for column, histogram in self._histograms.items()}
