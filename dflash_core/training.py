"""Training of a drafter: its configuration, and the trainer that turns packed rows into optimizer steps.

Nothing in a step waits for the device. Losses and counts are summed there and read every few steps
(`Trainer.summary`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from dflash_core.configuration import Config, LocalPath, Seed, UserError
from dflash_core.distributed import GradientReducer, World, backward_order
from dflash_core.drafter import Drafter
from dflash_core.loss import LossConfig, SlotLosses, Teacher, dpace_weights, head_loss, slot_weights, spread
from dflash_core.metrics import Summary, Tally
from dflash_core.optimizer import Optimizer, OptimizerConfig, shape_differences
from dflash_core.row_batch import RowBatch


class TrainingConfig(Config):
    """How a drafter is trained. What is in here decides the result, except where it says otherwise."""

    row_tokens: Annotated[int, Field(ge=1)] = 12288
    """Context tokens C of a packed row; samples must not be longer."""
    anchors_per_row: Annotated[int, Field(ge=1)] = 2048
    """Blocks A of a row, shared among its documents. They cost compute and no storage (docs/training.md)."""
    rows_per_step: Annotated[int, Field(ge=1)] = 1
    """Rows of one optimizer step over all ranks; ranks take them in turn, so it does not depend on their
    number.
    """
    epochs: Annotated[int, Field(ge=1)] = 6
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Stop after this many optimizer steps; the schedule ends there."""
    seed: Seed = 0
    """Decides initial weights, order of samples and anchors."""
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of products and activations; weights and moments are float32 in any case."""
    layer_products: Literal["bfloat16", "fp8"] = "bfloat16"
    """"fp8": products of the draft layers in e4m3, weight gradients in bfloat16; faster on Hopper and later,
    and noisier.
    """
    compile: bool | None = None
    """Compile the drafter's regions; None: on a GPU."""
    checkpoint_layers: bool = False
    """Recompute draft layers in backward: less memory, more time."""
    on_recompile: Literal["stop", "warn"] = "stop"
    """What a recompile after warm-up does. No influence on the result."""
    expected_step_ms: Annotated[float, Field(gt=0)] | None = None
    """What `benchmarks/train_step.py` measured for these shapes on this card; a slower step is named in log
    and metrics. None: what the run's own first steps take. No influence on the result.
    """
    init_from: LocalPath | None = None
    """Exported drafter folder to start from; None: random weights."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Share of the samples (by hash of their ids) that is kept out of training."""
    only_samples: Annotated[int, Field(ge=1)] | None = None
    """Train on just the so many samples that have the most supervised tokens: to see a drafter overfit."""
    validate_every: Annotated[int, Field(ge=1)] = 500
    """Optimizer steps between validations; there is one at the end in any case. No influence on what is
    learnt, only on which checkpoints can be the best.
    """
    validation_rows: Annotated[int, Field(ge=1)] | None = 64
    """Validate on this many rows at most, all ranks together, the same ones every time; None: on all that
    are kept out, which for a large data set takes longer than the steps between. No influence on what is
    learnt.
    """
    checkpoint_every: Annotated[int, Field(ge=1)] = 500
    """Optimizer steps between checkpoints; there is one at the end in any case."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 3
    """Latest checkpoints that are kept, beside the best one."""
    log_every: Annotated[int, Field(ge=1)] = 10
    """Optimizer steps between readings of the metrics."""

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        if self.layer_products == "fp8" and self.compute_dtype != "bfloat16":
            raise UserError("training.layer_products fp8 goes with compute_dtype bfloat16")
        return self

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.compute_dtype == "bfloat16" else torch.float32

    def compiles_on(self, device: str) -> bool:
        """Whether the drafter's regions are compiled on devices of this kind, "cuda" or "cpu".

        Raises UserError where that would leave attention unfused.
        """
        if self.compile is False and device == "cuda":
            raise UserError(
                "training.compile: false would run attention unfused on a GPU, all its scores in memory; "
                "leave it out, or train on the CPU"
            )
        return self.compile if self.compile is not None else device == "cuda"


WITHOUT_INFLUENCE = frozenset(
    {
        "compile",
        "on_recompile",
        "expected_step_ms",
        "keep_checkpoints",
        "checkpoint_every",
        "validate_every",
        "validation_rows",
        "log_every",
        "checkpoint_layers",
    }
)
"""Fields of `TrainingConfig` that may differ when a run is resumed."""


class NonFiniteError(RuntimeError):
    """A loss or gradient was not finite; the weights are those before that optimizer step."""

    def __init__(self, optimizer_step: int, where: str = "") -> None:
        super().__init__(
            f"loss or gradient of optimizer step {optimizer_step} is not finite"
            + (f" ({where})" if where else "")
        )
        self.optimizer_step = optimizer_step


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingRow:
    """A row on the device with its hidden states."""

    batch: RowBatch
    taps_CE: Tensor
    """[C, L*D], finite also in padding."""
    last_hidden_CD: Tensor | None = None
    """[C, D] after the target's final norm; needed by the KL term alone."""


class Trainer:
    """A drafter that learns: weights, optimizer and running sums on one rank."""

    def __init__(
        self,
        drafter: Drafter,
        embedding_VD: Tensor,
        head_VD: Tensor,
        config: TrainingConfig,
        *,
        total_steps: int,
        world: World,
    ) -> None:
        """`embedding_VD` and `head_VD` are the target's, frozen, in `config.dtype` on the drafter's
        device.
        """
        if drafter.compute_dtype != config.dtype or head_VD.dtype != config.dtype:
            raise UserError(f"drafter, embedding and head must be in {config.compute_dtype}")
        drafter.fp8 = config.layer_products == "fp8"
        self.drafter = drafter
        self.config = config
        self.world = world
        self.optimizer_step = 0
        """Finished optimizer steps."""
        self.optimizer = Optimizer(drafter, config.optimizer, total_steps)
        self._embedding_VD = embedding_VD
        self._head_VD = head_VD
        self._reducer = GradientReducer(drafter, world, backward_order(drafter))
        block_size = drafter.config.block_size
        self._slot_weight_K = slot_weights(config.loss, block_size).to(world.device)
        self._tally = Tally(block_size, world.device)
        self._validation_tally = Tally(block_size, world.device)
        self._halted = torch.zeros((), device=world.device)
        self._halted_at = torch.full((), -1, dtype=torch.int64, device=world.device)
        self._norm = torch.zeros((), device=world.device)
        self._held: torch.cuda.Event | None = None

    def forward(self, row: TrainingRow) -> tuple[SlotLosses, Tensor]:
        """Losses of the row's scored slots and their weights, float32 [N] each; weights carry no gradient."""
        batch = row.batch
        rows_RD = F.embedding(batch.input_ids_R, self._embedding_VD)
        hidden_PD = self.drafter.forward_blocks(
            row.taps_CE, batch.position_C, rows_RD, batch.position_Q, *batch.attention_masks()
        )
        losses = head_loss(
            hidden_PD, self._head_VD, batch.head_inputs, self.config.loss.chunk_slots, self._teacher(row)
        )
        return losses, self._weights(losses, batch)

    def step(self, rows: Iterable[TrainingRow], count: int) -> None:
        """One optimizer step over this rank's `count` rows (the same number on every rank).

        The gradient is that of sum(w * loss) / sum(w) with both sums over all rows of all ranks.
        """
        weight_sum = torch.zeros((), device=self.world.device)
        for i, row in enumerate(rows, start=1):
            losses, weights_N = self.forward(row)
            self._tally.add(losses, weights_N, row.batch)
            weight_sum = weight_sum + weights_N.sum()
            if i == count:
                self.world.sum(weight_sum)
                self._reducer.arm()
            (losses.loss_N * weights_N).sum().backward()
        self._reducer.wait()
        if self._held is not None:
            torch.cuda.current_stream().wait_event(self._held)
            self._held = None
        self._norm, halted = self.optimizer.step(self.optimizer_step, weight_sum, self._halted)
        self._halted_at = torch.where(halted > self._halted, self.optimizer_step, self._halted_at)
        self._halted = halted
        self.optimizer_step += 1

    def hold(self, event: torch.cuda.Event | None) -> None:
        """Let the device change weights and moments only after this event: they are being copied."""
        self._held = event

    def summary(self) -> tuple[Summary, float]:
        """Means since the last call and the last gradient norm. Waits for the device; every rank must call
        it.

        Raises NonFiniteError, on every rank, when a step since then was not finite.
        """
        self.check_finite()
        return self._tally.take(self.world), float(self._norm)

    def check_finite(self) -> None:
        """Raise NonFiniteError if any step so far was not finite. Waits for the device."""
        step = int(self._halted_at)
        if step >= 0:
            raise NonFiniteError(step)

    @torch.no_grad()
    def validate(self, rows: Iterable[TrainingRow]) -> Summary:
        """Losses and teacher-forced acceptance over rows that are not learnt from. Every rank must call it.

        With an average of the weights, it is the average that is validated.
        """
        with self.averaged_weights():
            for row in rows:
                losses, weights_N = self.forward(row)
                self._validation_tally.add(losses, weights_N, row.batch)
        return self._validation_tally.take(self.world)

    @contextmanager
    def averaged_weights(self) -> Iterator[Drafter]:
        """The drafter with the averaged weights in place, if there is an average; no update may happen
        inside.
        """
        average = self.optimizer.average
        own = {name: p.data for name, p in self.drafter.named_parameters() if name in average}
        try:
            for name, parameter in self.drafter.named_parameters():
                parameter.data = average.get(name, parameter.data)
            yield self.drafter
        finally:
            for name, parameter in self.drafter.named_parameters():
                parameter.data = own.get(name, parameter.data)

    @property
    def halted_at(self) -> Tensor:
        """Int64 scalar on the device: optimizer step that was not finite, -1 while all were."""
        return self._halted_at

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, by name, on its device and not copied."""
        tensors = {f"model/{name}": p.detach() for name, p in self.drafter.named_parameters()}
        tensors |= {f"optimizer/{name}": value for name, value in self.optimizer.state().items()}
        return tensors

    def load_state(self, tensors: dict[str, Tensor], optimizer_step: int) -> None:
        """Continue from what `state` gave. Raises UserError, with nothing changed, naming weights, moments
        and averages that are missing, unknown or misshapen.
        """
        weights = {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}
        own = dict(self.drafter.named_parameters())
        if found := shape_differences(weights, {name: p.shape for name, p in own.items()}):
            raise UserError(
                "the checkpoint's weights are not those of this drafter; check the drafter's shape: " + found
            )
        moments = {k.removeprefix("optimizer/"): v for k, v in tensors.items() if k.startswith("optimizer/")}
        self.optimizer.load_state(moments, optimizer_step)
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])
        self.optimizer_step = optimizer_step

    def _teacher(self, row: TrainingRow) -> Teacher | None:
        weight = self.config.loss.kl_weight
        if weight == 0.0:
            return None
        if row.last_hidden_CD is None:
            raise UserError(
                "training.loss.kl_weight needs the target's last hidden state; "
                "extract with capture.last_hidden set"
            )
        return Teacher(row.last_hidden_CD, row.batch.teacher_N, weight)

    def _weights(self, losses: SlotLosses, batch: RowBatch) -> Tensor:
        weight_N = self._slot_weight_K[1 + batch.slot_N % (self.drafter.config.block_size - 1)]
        if self.config.loss.weighting == "dpace":
            shape = (batch.scored_AK.shape[0], batch.scored_AK.shape[1])
            ce_AK = spread(losses.ce_N, batch.rank_P, shape)
            weight_AK = dpace_weights(ce_AK, batch.scored_AK, self.config.loss.dpace_alpha)
            weight_N = weight_AK[:, 1:].reshape(-1)[batch.slot_N]
        return weight_N.where(torch.arange(len(weight_N), device=weight_N.device) < batch.count, 0.0)


def make_trainer(
    drafter: Drafter,
    embedding_VD: Tensor,
    head_VD: Tensor,
    training: TrainingConfig,
    *,
    total_steps: int,
    world: World,
) -> Trainer:
    """Return a `Trainer` of these weights, the drafter's regions compiled where they are to be."""
    if training.compiles_on(world.device.type):
        drafter.compile_regions(checkpoint_layers=training.checkpoint_layers)
    elif training.checkpoint_layers:
        drafter.checkpoint_layers()
    return Trainer(drafter, embedding_VD, head_VD, training, total_steps=total_steps, world=world)
