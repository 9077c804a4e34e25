"""A rank that compiles one tiny training step and its evaluation, and reports; for tests."""

from __future__ import annotations

import sys

import torch

from dflash_core.compile_watch import Watch


def main() -> None:
    """Run one step; `width` in argv decides the shape."""
    width = int(sys.argv[1])
    watch = Watch.from_environment().start()

    @torch.compile(dynamic=False)
    def loss_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ weight) * x).sum()

    x, weight = torch.ones(8, width), torch.full((width, width), 0.01, requires_grad=True)
    loss = loss_of(x, weight)
    loss.backward()
    assert weight.grad is not None
    with torch.no_grad():
        loss_of(x, weight)
    print(f'{{"kind": "result", "loss": {loss.item()}, "gradient": {weight.grad.sum().item()}}}')
    print(watch.report().line(), flush=True)


if __name__ == "__main__":
    main()
