"""What the arithmetic of a codec makes of hidden states, before entropy coding; and what it did to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from storage.cell import CellHeader


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorSums:
    """What encoding did to the values of one or more cells; add them up before asking for a ratio."""

    squared_error: float = 0.0
    squared_value: float = 0.0
    scaled_squared_error: float = 0.0
    scaled_values: float = 0.0

    def __add__(self, other: ErrorSums) -> ErrorSums:
        return ErrorSums(
            squared_error=self.squared_error + other.squared_error,
            squared_value=self.squared_value + other.squared_value,
            scaled_squared_error=self.scaled_squared_error + other.scaled_squared_error,
            scaled_values=self.scaled_values + other.scaled_values,
        )

    @property
    def energy_error(self) -> float:
        """sqrt(sum of squared errors / sum of squared values): the loudest channels dominate it."""
        return math.sqrt(self.squared_error / self.squared_value) if self.squared_value else 0.0

    @property
    def relative_error(self) -> float:
        """RMS of the error in units of each channel's scale: what `tolerance` names.

        Falls back to `energy_error` where no scales were at hand.
        """
        if not self.scaled_values:
            return self.energy_error
        return math.sqrt(self.scaled_squared_error / self.scaled_values)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Symbols:
    """An encoded cell before entropy coding, on any device."""

    header: CellHeader
    payload: Tensor
    """uint8 [header.payload_bytes]."""
    sums: Tensor | None = None
    """float64 [4], fields of `ErrorSums`, same device as the payload; None after `Codec.from_bytes`."""
    outlier_count: Tensor | None = None
    """int32, how many outliers there are, where the device was not waited for: the header names the room
    for them, and they stand in it in any order. The cell can only be coded once it is `settled`."""

    @property
    def error(self) -> ErrorSums:
        """Read the sums (waits for the device)."""
        if self.sums is None:
            return ErrorSums()
        a, b, c, d = self.sums.tolist()
        return ErrorSums(squared_error=a, squared_value=b, scaled_squared_error=c, scaled_values=d)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Symbols:
        """Copy to another device. `non_blocking` needs pinned memory on the host side to have an effect."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def map(self, copy: Callable[[Tensor], Tensor]) -> Symbols:
        """Copy in a way of one's own."""
        return Symbols(
            header=self.header,
            payload=copy(self.payload),
            sums=None if self.sums is None else copy(self.sums),
            outlier_count=None if self.outlier_count is None else copy(self.outlier_count),
        )

    def settled(self) -> Symbols | None:
        """Sort the outliers, and cut the room for them to those that there are, in place; None when there are
        more than room. Waits for the device where the symbols lie on one.
        """
        if self.outlier_count is None:
            return self
        count = int(self.outlier_count)
        if count > self.header.outliers:
            return None
        position_N, order_N = self.array("position")[:count].sort()
        values = self.array("outlier")[:count][order_N]
        header = replace(self.header, outliers=count)
        whole = Symbols(header=header, payload=self.payload[: header.payload_bytes], sums=self.sums)
        whole.array("position").copy_(position_N)
        whole.array("outlier").copy_(values)
        return whole

    def with_outliers(self, outliers: Sequence[tuple[Tensor, Tensor]], sums: Tensor) -> Symbols:
        """Put outliers, as (positions, values) of one block of rows after another, behind the symbols."""
        count = sum(len(position_N) for position_N, _ in outliers)
        if not count:
            return replace(self, sums=sums)
        header = replace(self.header, outliers=count)
        payload = torch.empty(header.payload_bytes, dtype=torch.uint8, device=self.payload.device)
        payload[: len(self.payload)] = self.payload
        whole = Symbols(header=header, payload=payload, sums=sums)
        whole.array("position").copy_(torch.cat([position_N for position_N, _ in outliers]))
        whole.array("outlier").copy_(torch.cat([outlier_N for _, outlier_N in outliers]))
        return whole

    def array(self, name: str) -> Tensor:
        """One array of the payload as docs/codec.md describes it; a view."""
        return self._array(name, *self.header.offsets[name])

    def _array(self, name: str, start: int, size: int) -> Tensor:
        flat = self.payload[start : start + size].view(_DTYPES.get(name, torch.uint8))
        per_value = name not in ("base", "token_scale", "position", "outlier")
        return flat.view(self.header.tokens, -1) if per_value and size else flat

    def arrays(self, tokens: slice) -> dict[str, Tensor]:
        """What `Codec.decode_arrays` needs to decode these tokens; views."""
        arrays = {
            name: self._array(name, *place)
            for name, place in self.header.offsets.items()
            if name not in ("position", "outlier")
        }
        return {name: array if name == "base" else array[tokens] for name, array in arrays.items()}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SymbolsBatch(Sequence[Symbols]):
    """Cells encoded together, whose symbols lie in one piece of memory; those of one cell are views of it."""

    headers: tuple[CellHeader, ...]
    payload: Tensor
    """uint8, all payloads."""
    starts: tuple[int, ...]
    """First byte of each cell's payload."""
    sums_P4: Tensor
    """float64 [P, 4], fields of `ErrorSums` of P stretches of rows."""
    first_sums: Sequence[int]
    """First stretch of each cell, and P."""
    outlier_counts: Tensor
    """int32 [cells]."""

    def map(self, copy: Callable[[Tensor], Tensor]) -> SymbolsBatch:
        """Copy in a way of one's own, with one call for what all cells share."""
        return replace(
            self,
            payload=copy(self.payload),
            sums_P4=copy(self.sums_P4),
            outlier_counts=copy(self.outlier_counts),
        )

    def __len__(self) -> int:
        return len(self.headers)

    def __getitem__(self, cell: Any) -> Any:
        cell = range(len(self.headers))[cell]
        header, start = self.headers[cell], self.starts[cell]
        return Symbols(
            header=header,
            payload=self.payload[start : start + header.payload_bytes],
            sums=self.sums_P4[self.first_sums[cell] : self.first_sums[cell + 1]].sum(0),
            outlier_count=self.outlier_counts[cell],
        )


_DTYPES = {
    "token_scale": torch.float32,
    "value": torch.float8_e4m3fn,
    "symbol": torch.int8,
    "high": torch.int8,
    "position": torch.int32,
    "outlier": torch.bfloat16,
}
"""Arrays that are not uint8."""
