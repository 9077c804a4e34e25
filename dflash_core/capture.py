"""Runs batches through a text model and keeps what its tapped layers put out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dflash_core.packed_body import PackedBody, pack, send
from dflash_core.records import LAST_HIDDEN, CaptureSpec, Sample, tap_column


class TargetOutOfMemory(RuntimeError):
    """The device had no room for a batch; the caller halves its token budget."""


def batches(samples: Sequence[Sample], token_budget: int) -> Iterator[list[Sample]]:
    """Yield batches of samples of similar length with rows x longest <= token_budget, longest first.

    A sample longer than the budget comes alone. Order and grouping depend on the lengths alone.
    """
    order = sorted(range(len(samples)), key=lambda i: (-samples[i].num_tokens, i))
    batch: list[Sample] = []
    for i in order:
        longest = batch[0].num_tokens if batch else samples[i].num_tokens
        if batch and (len(batch) + 1) * longest > token_budget:
            yield batch
            batch = []
        batch.append(samples[i])
    if batch:
        yield batch


def right_pad(batch: Sequence[Sample], device: torch.device) -> torch.Tensor:
    """Token ids int64 [B, T] on `device`, padded on the right with 0."""
    longest = max(sample.num_tokens for sample in batch)
    ids_BT = np.zeros((len(batch), longest), dtype=np.int64)
    for row, sample in enumerate(batch):
        ids_BT[row, : sample.num_tokens] = sample.token_ids_T
    return send(torch.from_numpy(ids_BT), device)


class TapRecorder:
    """Forward hooks that keep the outputs [B, T, D] of the tapped layers of one forward."""

    def __init__(self, model: Any, spec: CaptureSpec) -> None:
        self.outputs: dict[str, torch.Tensor] = {}
        self._hooks: list[Any] = []
        for layer_id in spec.tap_layer_ids:
            self._watch(model.layers[layer_id], tap_column(layer_id))
        if spec.last_hidden == "before_final_norm":
            self._watch(model.layers[-1], LAST_HIDDEN)
        elif spec.last_hidden == "after_final_norm":
            self._watch(model.norm, LAST_HIDDEN)

    def _watch(self, module: Any, column: str) -> None:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            self.outputs[column] = output[0] if isinstance(output, tuple) else output

        self._hooks.append(module.register_forward_hook(keep))

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def take(self) -> dict[str, torch.Tensor]:
        """Return the outputs of the last forward and let go of them."""
        outputs, self.outputs = self.outputs, {}
        return outputs


def forward_padded(
    model: Any, recorder: TapRecorder, batch: Sequence[Sample], device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """States [T, D] of each sample and column.

    No attention mask is given: attention is causal, the state of linear-attention layers runs from left
    to right, and all padding stands on the right, so no real token sees any of it; without a mask the
    fused causal kernels are used. Raise TargetOutOfMemory.
    """
    tokens = len(batch) * max(sample.num_tokens for sample in batch)
    try:
        with _room_for(tokens, device):
            model(input_ids=right_pad(batch, device), use_cache=False)
    finally:
        outputs = recorder.take()
    return [
        {column: states_BTD[row, : sample.num_tokens] for column, states_BTD in outputs.items()}
        for row, sample in enumerate(batch)
    ]


def forward_packed(
    body: PackedBody, batch: Sequence[Sample], device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """States [T, D] of each sample and column, the samples packed into one row. Raise TargetOutOfMemory."""
    packed = pack(batch, device)
    with _room_for(packed.bounds[-1], device):
        states = body.forward(packed)
    return [
        {column: states_ND[start : start + sample.num_tokens] for column, states_ND in states.items()}
        for sample, start in zip(batch, packed.bounds, strict=False)
    ]


@contextmanager
def _room_for(tokens: int, device: torch.device) -> Iterator[None]:
    """Without gradients; turns the allocator's error into ours."""
    try:
        with torch.no_grad():
            yield
    except torch.OutOfMemoryError as error:
        raise TargetOutOfMemory(f"no room on {device} for a batch of {tokens} tokens: {error}") from None
