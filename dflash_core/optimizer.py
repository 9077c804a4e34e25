"""Optimizers of the drafter: AdamW or Muon, schedules, global-norm clipping without a synchronisation,
EMA.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dflash_core.configuration import Config, UserError

MOMENTS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.Muon: ("momentum_buffer",),
}
"""What an optimizer keeps of each parameter once it has taken a step."""


class OptimizerConfig(Config):
    """How gradients become updates."""

    name: Literal["adamw", "muon"] = "adamw"
    """"muon": Muon for matrices, AdamW for norms."""
    learning_rate: Annotated[float, Field(gt=0)] = 6e-4
    """Peak rate. Muon's updates are scaled to AdamW's size, so one rate serves both."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled; on matrices alone."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global gradient norm; None: no clipping."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """"wsd": warm up, stay, decay linearly at the end."""
    warmup_fraction: Annotated[float, Field(ge=0, le=1)] = 0.04
    """Share of all steps."""
    decay_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of all steps that WSD decays for."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Rate at the end, as a share of the peak."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Keep an exponential moving average of the weights; it is what is validated and exported. After t steps
    the decay is at most (1 + t) / (10 + t), so that the random weights of the start are forgotten.
    """


def rate_factor(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) as a share of the peak."""
    warmup = round(config.warmup_fraction * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    floor = config.final_fraction
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "cosine":
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    decay = max(1, round(config.decay_fraction * total_steps))
    left = max(0, total_steps - step)
    return floor + (1.0 - floor) * min(1.0, left / decay)


class Optimizer:
    """Holds moments and average of a module's parameters; one `step` a gradient.

    Gradients arrive as plain sums over slots and ranks; `step` divides them by the sum of weights and clips
    them inside the fused update, so neither costs a pass over memory nor a synchronisation.
    """

    def __init__(self, module: nn.Module, config: OptimizerConfig, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self._named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        matrices = [p for p in self._named.values() if p.ndim == 2]
        vectors = [p for p in self._named.values() if p.ndim != 2]
        self._muons: list[torch.optim.Muon] = []
        """One a matrix: `step` keeps a copy of one weight at a time, not of all."""
        adam_groups = [{"params": vectors, "weight_decay": 0.0}]
        if config.name == "muon":
            self._muons = [
                torch.optim.Muon(
                    [matrix],
                    lr=config.learning_rate,
                    weight_decay=config.weight_decay,
                    momentum=config.muon_momentum,
                    adjust_lr_fn="match_rms_adamw",
                )
                for matrix in matrices
            ]
        else:
            adam_groups.insert(0, {"params": matrices, "weight_decay": config.weight_decay})
        self._adam = torch.optim.AdamW(
            adam_groups,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )
        self.average: dict[str, Tensor] = {}
        if config.ema_decay is not None:
            self.average = {name: p.detach().clone() for name, p in self._named.items()}

    def step(self, optimizer_step: int, weight_sum: Tensor, halted: Tensor) -> tuple[Tensor, Tensor]:
        """Update the parameters from their gradients and clear these; `optimizer_step` steps went before.

        `weight_sum` (float32 scalar on the device) is what the summed gradients are divided by; `halted`
        (float32 scalar) is 1 once the run has met a non-finite number: nothing is updated then. Returns the
        gradient norm after division and before clipping, and the new `halted`.
        """
        grads = [p.grad for p in self._named.values() if p.grad is not None]
        divisor = weight_sum.clamp(min=1e-30)
        norm = torch.nn.utils.get_total_norm(grads) / divisor
        halted = torch.maximum(halted, (~torch.isfinite(norm)).float())
        excess = torch.ones_like(norm)
        if self.config.clip_norm is not None:
            excess = (norm / self.config.clip_norm).clamp(min=1.0)
        scale = divisor * excess
        rate = self.rate(optimizer_step)
        for muon in self._muons:
            self._set_rate(muon, rate)
            self._step_muon(muon, scale, halted)
        self._set_rate(self._adam, rate)
        if norm.is_cuda:
            from dflash_core.optimizer_kernel import adamw_step

            adamw_step(self._adam, optimizer_step + 1, scale, halted)
        else:
            # The protocol of torch's gradient scaler: the fused kernel divides by one and skips on the other.
            setattr(self._adam, "grad_scale", scale)  # noqa: B010
            setattr(self._adam, "found_inf", halted)  # noqa: B010
            self._adam.step()
        for parameter in self._named.values():
            parameter.grad = None
        if self.config.ema_decay is not None:
            decay = min(self.config.ema_decay, (1 + optimizer_step) / (10 + optimizer_step))
            part = (1.0 - decay) * (1.0 - halted)
            for name, average in self.average.items():
                average.lerp_(self._named[name].detach(), part)
        return norm, halted

    def rate(self, optimizer_step: int) -> float:
        """Learning rate of an optimizer step."""
        return self.config.learning_rate * rate_factor(self.config, optimizer_step, self.total_steps)

    @staticmethod
    @torch.no_grad()
    def _step_muon(muon: torch.optim.Muon, scale: Tensor, halted: Tensor) -> None:
        """`muon.step()` with the gradient divided by `scale`; weight and momentum stay when `halted`."""
        (weight,) = muon.param_groups[0]["params"]
        state = muon.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        momentum, before, stay = state["momentum_buffer"], weight.clone(), halted > 0
        # The momentum moves towards the gradient: it stays where that is the momentum itself.
        torch.where(stay, momentum, weight.grad.div_(scale), out=weight.grad)
        muon.step()
        torch.where(stay, before, weight, out=weight)

    @staticmethod
    def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate

    def state(self) -> dict[str, Tensor]:
        """Every moment and average by name ("exp_avg/layers.0...."), not copied. Empty moments before the
        first step.
        """
        found: dict[str, Tensor] = {}
        for optimizer in (self._adam, *self._muons):
            for name, parameter in self._named.items():
                for key, value in optimizer.state.get(parameter, {}).items():
                    found[f"{key}/{name}"] = value
        for name, value in self.average.items():
            found[f"ema/{name}"] = value
        return found

    def load_state(self, state: Mapping[str, Tensor], optimizer_step: int) -> None:
        """Take over what `state` gave after so many steps.

        Raises UserError, with nothing changed, naming what is missing, unknown or misshapen.
        """
        optimizers = (self._adam, *self._muons)
        owners = {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}
        moments = {
            f"{moment}/{name}": (owners[id(parameter)], parameter, moment)
            for name, parameter in self._named.items()
            for moment in (MOMENTS[type(owners[id(parameter)])] if optimizer_step > 0 else ())
        }
        shapes = {key: () if moment == "step" else p.shape for key, (_, p, moment) in moments.items()}
        shapes |= {f"ema/{name}": average.shape for name, average in self.average.items()}
        if found := shape_differences(state, shapes):
            raise UserError(f"the checkpoint holds optimizer state that this run cannot use: {found}")
        for key, (optimizer, parameter, moment) in moments.items():
            optimizer.state[parameter][moment] = state[key].to(parameter.device, copy=True)
        for name, average in self.average.items():
            average.copy_(state[f"ema/{name}"])


def shape_differences(given: Mapping[str, Tensor], expected: Mapping[str, Sequence[int]]) -> str:
    """Name the first tensors that are missing, unknown or of another shape; empty when there are none."""
    found = [f"{name} is missing" for name in sorted(expected.keys() - given.keys())]
    found += [f"{name} is unknown" for name in sorted(given.keys() - expected.keys())]
    for name in sorted(expected.keys() & given.keys()):
        if (shape := tuple(given[name].shape)) != tuple(expected[name]):
            found.append(f"{name} has the shape {shape} instead of {tuple(expected[name])}")
    return "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
