"""One conversation with the target: a cache, the tapped layers of every new token, and a way back after a rejection."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class CachedTarget:
    """A causal language model with its cache and taps, for one sequence of tokens at a time.

    `extend` runs new tokens and keeps their state provisional; `commit` keeps the first of them and forgets the rest.
    Full-attention layers are rewound by cropping keys and values; layers with a recurrent state (gated delta net)
    are rewound by restoring the state before `extend` and running the kept tokens again.
    """

    def __init__(self, model: nn.Module, tap_layer_ids: Sequence[int]) -> None:
        """Hook the outputs of decoder layers `tap_layer_ids` (counted from 0) of transformers' causal `model`."""
        raise NotImplementedError

    def start(self) -> None:
        """Forget the conversation: an empty cache."""
        raise NotImplementedError

    def extend(
        self, token_ids_T: torch.Tensor, *, logits_to_keep: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run `token_ids_T` (int64 [T]) after the committed tokens.

        Returns logits [T, V] (only the last `logits_to_keep` rows if that is not 0) and the concatenated taps [T, L*D].
        """
        raise NotImplementedError

    def commit(self, count: int) -> None:
        """Keep the first `count` tokens of the last `extend`; the cache is then as if the rest had never been run."""
        raise NotImplementedError

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's input embeddings, any shape [...] -> [..., D]."""
        raise NotImplementedError

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's output head, [..., D] -> [..., V]."""
        raise NotImplementedError
