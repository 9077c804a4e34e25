"""What training and validation report: sums kept on the device, read by the host once in a while."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_core.distributed import World
from dflash_core.drafter import DrafterConfig
from dflash_core.loss import SlotLosses, leading_matches, spread
from dflash_core.row_batch import RowBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Means over all ranks and all rows since the last summary."""

    loss: float
    """Weighted mean of the slots' losses."""
    cross_entropy: float
    """Plain mean over scored slots."""
    accuracy: float
    """Share of scored slots whose token is the drafter's first choice."""
    acceptance_length: float
    """Mean over blocks of leading matches plus one (teacher-forced; blocks cut by their document count as
    they are).
    """
    acceptance_length_whole: float
    """The same over blocks all of whose slots are scored; block_size is a perfect drafter. NaN without such
    blocks.
    """
    slot_loss: list[float]
    """Cross entropy of slots 1..K-1."""
    slot_accuracy: list[float]
    """Accuracy of slots 1..K-1."""
    slot_acceptance: list[float]
    """Share of blocks, of those in which slot k and all before it are scored, whose slots 1..k all match."""
    scored_slots: int
    blocks: int
    context_tokens: int

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Summary.__slots__}


class Tally:
    """Running sums in float64 on the device; adding never waits for it."""

    SCALARS = ("weighted_loss", "weight", "accepted", "blocks", "accepted_whole", "whole", "tokens")

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._clear()

    def _clear(self) -> None:
        self._scalars = torch.zeros(len(self.SCALARS), dtype=torch.float64, device=self._device)
        self._slots = torch.zeros(5, self._block_size, dtype=torch.float64, device=self._device)

    @torch.no_grad()
    def add(self, losses: SlotLosses, weights_N: Tensor, row: RowBatch) -> None:
        """Add one row."""
        shape = (row.scored_AK.shape[0], row.scored_AK.shape[1])
        scored_AK = row.scored_AK
        ce_AK = spread(losses.ce_N, row.rank_P, shape)
        correct_AK = spread(losses.correct_N, row.rank_P, shape) > 0
        matches_A = leading_matches(correct_AK, scored_AK)
        in_use_A = scored_AK.any(dim=1)
        whole_A = scored_AK[:, 1:].all(dim=1)
        reach_AK = scored_AK.clone()
        reach_AK[:, 1:] = scored_AK[:, 1:].cumprod(dim=1).bool()
        slot_K = torch.arange(self._block_size, device=self._device)
        accepted_AK = reach_AK & (matches_A[:, None] >= slot_K[None, :])
        tau_A = matches_A + 1
        self._scalars += torch.stack(
            [
                (losses.loss_N.detach() * weights_N).sum(dtype=torch.float64),
                weights_N.sum(dtype=torch.float64),
                (tau_A * in_use_A).sum().double(),
                in_use_A.sum().double(),
                (tau_A * whole_A).sum().double(),
                whole_A.sum().double(),
                torch.full((), float(row.num_tokens), dtype=torch.float64, device=self._device),
            ]
        )
        self._slots += torch.stack(
            [
                ce_AK.sum(dim=0, dtype=torch.float64),
                (correct_AK & scored_AK).sum(dim=0).double(),
                scored_AK.sum(dim=0).double(),
                accepted_AK.sum(dim=0).double(),
                reach_AK.sum(dim=0).double(),
            ]
        )

    def take(self, world: World) -> Summary:
        """Sum over ranks, wait for the device, return the means and start anew. Every rank must call it."""
        both = torch.cat([self._scalars, self._slots.reshape(-1)])
        values = world.sum(both).tolist()
        self._clear()
        s = dict(zip(self.SCALARS, values, strict=False))
        rest = torch.tensor(values[len(self.SCALARS) :], dtype=torch.float64).view(5, self._block_size)[:, 1:]
        ce_k, correct_k, scored_k, accepted_k, reach_k = rest
        return Summary(
            loss=_ratio(s["weighted_loss"], s["weight"]),
            cross_entropy=_ratio(float(ce_k.sum()), float(scored_k.sum())),
            accuracy=_ratio(float(correct_k.sum()), float(scored_k.sum())),
            acceptance_length=_ratio(s["accepted"], s["blocks"]),
            acceptance_length_whole=_ratio(s["accepted_whole"], s["whole"]),
            slot_loss=(ce_k / scored_k).tolist(),
            slot_accuracy=(correct_k / scored_k).tolist(),
            slot_acceptance=(accepted_k / reach_k).tolist(),
            scored_slots=int(scored_k.sum()),
            blocks=int(s["blocks"]),
            context_tokens=int(s["tokens"]),
        )


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else float("nan")


def row_flops(
    config: DrafterConfig, context_tokens: int, queries: int, scored_slots: float | None = None
) -> float:
    """Floating point operations of the products of one row, forward and backward (attention scores not
    counted).

    6 x body parameters x queries + 6 x (fc and the layers' key/value parameters) x context tokens + 4 x head
    x scored slots (the head is frozen: forward and input gradient alone; other slots never go through it).
    None: as if all were scored.
    """
    width, layers = config.hidden_size, config.num_layers
    kv = 2 * width * config.num_kv_heads * config.head_dim
    body = layers * (
        kv + 2 * width * config.num_heads * config.head_dim + 3 * width * config.intermediate_size
    )
    context = len(config.tap_layer_ids) * width * width + layers * kv
    head = config.vocab_size * width
    scored_slots = queries if scored_slots is None else scored_slots
    return 6.0 * body * queries + 6.0 * context * context_tokens + 4.0 * head * scored_slots
