"""The parity gate of a worker on a device that is too small for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dflash_core.configuration import UserError
from flows.config import ExtractConfig
from tests.flows.test_extract import capturer_of


def test_no_room_for_the_gate_is_one_sentence(extract_config: Callable[..., ExtractConfig]) -> None:
    capturer, dataset = capturer_of(extract_config())

    def small_device(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    capturer.target.model.layers[0].register_forward_pre_hook(small_device)
    longest = max(sample.num_tokens for sample in dataset.samples(0)[:3])
    with pytest.raises(UserError, match=rf"up to {longest} tokens.*lower parity_samples \(now 3\)"):
        capturer._check_target(3)
