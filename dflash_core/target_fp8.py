"""The target's matrix products in 8-bit floats (e4m3), an option whose error the parity gate reports.

Weights are quantised once, with one scale an output row; activations with one scale a token as they come.
Letters: N tokens, X inputs, Y outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_core.fp8 import quantise_rows

Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]


class Fp8Product:
    """y = x W^T (+ bias) in 8-bit floats; made from a linear layer, whose own weight is left as it is."""

    def __init__(self, linear: nn.Linear, quantise: Quantise) -> None:
        """`quantise` is `quantise_rows`, compiled or not. X must be a multiple of 16."""
        if linear.in_features % 16:
            raise ValueError(f"{linear.in_features} inputs are not a multiple of 16")
        self._quantise = quantise
        self._outputs = linear.out_features
        # The device's products want a multiple of 16 outputs.
        weight_YX = F.pad(linear.weight.data, (0, 0, 0, -linear.out_features % 16))
        self._weight_YX, scale_Y1 = quantise_rows(weight_YX)
        self._scale_1Y = scale_Y1.T.contiguous()
        self._bias = None if linear.bias is None else linear.bias.data

    def __call__(self, x_NX: Tensor) -> Tensor:
        """[N, X] -> [N, Y]."""
        x8_NX, scale_N1 = self._quantise(x_NX)
        y_NY = _scaled_product(x8_NX, self._weight_YX, scale_N1, self._scale_1Y, x_NX.dtype)
        y_NY = y_NY[:, : self._outputs]
        return y_NY if self._bias is None else y_NY + self._bias


def _scaled_product(
    x8_NX: Tensor, w8_YX: Tensor, scale_N1: Tensor, scale_1Y: Tensor, dtype: torch.dtype
) -> Tensor:
    """(x8 w8^T) * scales: by the GPU's own instructions, elsewhere (in tests) in float32."""
    if x8_NX.is_cuda:
        return torch._scaled_mm(
            x8_NX, w8_YX.T, scale_a=scale_N1, scale_b=scale_1Y, out_dtype=dtype, use_fast_accum=True
        )
    return ((x8_NX.float() @ w8_YX.float().T) * scale_N1 * scale_1Y).to(dtype)
