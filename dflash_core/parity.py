"""The gate before any shard is written: captured states against a plain forward of one sample at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dflash_core.records import Sample

if TYPE_CHECKING:
    from dflash_core.target import Target

TOLERANCE = {"float32": 1e-3, "bfloat16": 4e-2, "fp8": 5e-1}
"""Largest mean token error by arithmetic. bf16 forwards of other shapes differ by 1-2 % in deep layers; a
neighbouring layer, a shifted token or a leaked state by far more. With fp8 the figure is for the user to
judge; the limit only catches nonsense."""


class ParityError(RuntimeError):
    """Captured states differ from a plain forward; the message names layer and sample."""


def check_parity(target: Target, samples: Sequence[Sample]) -> dict[str, float]:
    """Compare captured states with a plain forward (batch of one, output_hidden_states, not compiled).

    `samples` are captured in batches as any others. Return the worst `token_error` of each column. Raise
    ParityError naming layer and sample when a state is not finite, a row is all zeros, or the error is
    above the tolerance of the target's arithmetic; torch.OutOfMemoryError or TargetOutOfMemory.
    """
    worst = dict.fromkeys(target.capture_spec.columns, 0.0)
    limit = TOLERANCE[target.capture_spec.weights_dtype]
    references = {sample.sample_id: target.reference(sample) for sample in samples}
    scales = {column: channel_scale([states[column] for states in references.values()]) for column in worst}
    for batch in target.batches(samples):
        for sample, states in zip(batch, target.capture_exact(batch), strict=True):
            reference = references[sample.sample_id]
            for column in worst:
                where = f"{column} of sample {sample.sample_id!r} ({sample.num_tokens} tokens)"
                _check_values(states[column], reference[column], where)
                error = token_error(states[column], reference[column], scales[column])
                if not error <= limit:
                    raise ParityError(
                        f"{where} differs from a plain forward by {error:.3g}, more than {limit:g}: "
                        "the target is not captured correctly, so nothing was written"
                    )
                worst[column] = max(worst[column], error)
    return worst


def channel_scale(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean magnitude [D] of each channel over all tokens of some [T, D]."""
    total = sum(states_TD.abs().sum(0, dtype=torch.float32) for states_TD in states)
    assert isinstance(total, torch.Tensor)
    return (total / sum(len(states_TD) for states_TD in states)).clamp_min(1e-12)


def token_error(states_TD: torch.Tensor, reference_TD: torch.Tensor, scale_D: torch.Tensor) -> float:
    """Mean over tokens of |a_t - b_t| / |b_t|, channels first divided by their `channel_scale`.

    Hidden states have a few channels and tokens hundreds of times louder than the rest; without the
    division and the mean over tokens, they alone would decide.
    """
    a_TD, b_TD = states_TD.float() / scale_D, reference_TD.to(states_TD.device).float() / scale_D
    return float(((a_TD - b_TD).norm(dim=1) / b_TD.norm(dim=1).clamp_min(1e-12)).mean())


def _check_values(states_TD: torch.Tensor, reference_TD: torch.Tensor, where: str) -> None:
    if states_TD.shape != reference_TD.shape:
        raise ParityError(f"{where} has shape {list(states_TD.shape)}, not {list(reference_TD.shape)}")
    if not bool(torch.isfinite(states_TD).all()):
        raise ParityError(f"{where} holds values that are not finite")
    zero_T = (states_TD == 0).all(dim=1)
    if bool(zero_T.any()):
        raise ParityError(f"{where} is all zeros at token {int(zero_T.nonzero()[0])}")
