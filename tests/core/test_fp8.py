"""Products in fp8 against plain ones."""

from __future__ import annotations

import pytest
import torch

from dflash_core.fp8 import Fp8Linear, quantise_rows


def test_rows_keep_their_scale() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 64) * torch.logspace(-6, 6, 8)[:, None]
    x[3] = 0.0
    values, scale = quantise_rows(x.bfloat16())
    error = (values.float() * scale - x).norm(dim=1) / x.norm(dim=1).clamp(min=1e-12)
    assert (error < 0.04).all() and torch.isfinite(values.float()).all()


@pytest.mark.parametrize("rows", [16, 48])
def test_forward_and_gradients_are_near(rows: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 64).bfloat16().requires_grad_()
    weight = torch.randn(32, 64).bfloat16().requires_grad_()
    pull = torch.randn(rows, 32).bfloat16()
    out = Fp8Linear.apply(x, weight)
    out.backward(pull)
    expected = x.detach().float() @ weight.detach().float().t()
    assert (out.float() - expected).norm() / expected.norm() < 0.06
    assert x.grad is not None and weight.grad is not None
    grad_x = pull.float() @ weight.detach().float()
    assert (x.grad.float() - grad_x).norm() / grad_x.norm() < 0.06
    torch.testing.assert_close(weight.grad, pull.t() @ x.detach())
