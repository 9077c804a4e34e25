"""Random hidden states with the statistics of real ones, for shapes whose target is too large to run."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_core.records import TargetSpec

MASSIVE_CHANNELS = 4
MASSIVE_FACTOR = 300.0
LOUD_TOKEN_FACTOR = 25.0


def synthetic_states(tokens: int, width: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Return bf16 [T, D]: normal values; channel loudness over two orders of magnitude, four massive channels
    and a massive first token, token loudness that varies by a fifth. Channels are the same for every `seed`.
    """
    channels = torch.Generator(device).manual_seed(0)
    generator = torch.Generator(device).manual_seed(seed + 1)
    loudness_D = torch.exp(torch.randn(width, generator=channels, device=device))
    loudness_D[torch.randperm(width, generator=channels, device=device)[:MASSIVE_CHANNELS]] *= MASSIVE_FACTOR
    loudness_T = torch.exp(0.2 * torch.randn(tokens, 1, generator=generator, device=device))
    loudness_T[:1] *= LOUD_TOKEN_FACTOR
    values_TD = torch.randn(tokens, width, generator=generator, device=device)
    return (values_TD.mul_(loudness_D).mul_(loudness_T)).bfloat16()


def synthetic_target(width: int) -> TargetSpec:
    """A target of this width that nobody has; its vocabulary is 32,000."""
    return TargetSpec(
        name="random",
        weights_sha256="0" * 64,
        tokenizer_sha256="0" * 64,
        model_type="qwen3",
        num_layers=64,
        hidden_size=width,
        vocab_size=32_000,
        rope_theta=1e6,
    )
