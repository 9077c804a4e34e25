"""From a sealed data set to the packed rows of each optimizer step: split, plan, read, prepare.

What is read when depends on the data set, the configuration and the step alone; ranks only share it out. So a
run that is resumed, also with another number of ranks, sees each sample once an epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from dflash_core.configuration import UserError
from dflash_core.distributed import World
from dflash_core.drafter import DrafterConfig
from dflash_core.packing import PackedTokens, is_validation, pack_tokens, plan_epoch, rows_of_step
from dflash_core.records import LAST_HIDDEN, tap_column
from dflash_core.row_batch import prepare_row
from dflash_core.training import TrainingConfig, TrainingRow
from storage.codec import parse_codec
from storage.dataset import Dataset
from storage.reader import ReaderConfig, RowReader

log = logging.getLogger(__name__)

TEACHER_TOLERANCE = 0.03
"""A teacher of the KL term that is stored more coarsely is warned of."""
VALIDATION_EPOCH = 2**31 - 1
"""Stands for the epoch when validation rows and anchors are drawn: the same ones every time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlace:
    """Where an optimizer step lies."""

    epoch: int
    step_in_epoch: int


class TrainingData:
    """The rows of a run on one rank."""

    def __init__(
        self,
        dataset: Dataset,
        drafter: DrafterConfig,
        training: TrainingConfig,
        world: World,
        reader: ReaderConfig | None = None,
    ) -> None:
        """Raises UserError when the data set lacks what the drafter reads, or a sample does not fit in a
        row.
        """
        self.dataset, self.drafter, self.training, self.world = dataset, drafter, training, world
        self._reader_config = reader
        self._columns = _columns(dataset, drafter, training)
        index = dataset.index
        self._ids: list[str] = index.sample_ids.to_pylist()
        self._lengths_S = index.tokens_N.astype(np.int64)
        self._group_S = index.shard_N.astype(np.int64) * 2**32 + index.row_group_N
        self._check_lengths()
        held_out_S = np.array([is_validation(name, training.validation_fraction) for name in self._ids], bool)
        self.training_samples = np.flatnonzero(~held_out_S & (index.supervised_N > 1))
        if training.only_samples is not None:
            by_size = np.argsort(-index.supervised_N[self.training_samples], kind="stable")
            self.training_samples = np.sort(self.training_samples[by_size[: training.only_samples]])
        self.validation_samples = np.flatnonzero(held_out_S & (index.supervised_N > 1))
        if not len(self.training_samples):
            raise UserError(f"{dataset.uri} holds no sample to train on: none has two supervised tokens")
        self._empty_states: torch.Tensor | None = None

    @cache  # noqa: B019  one instance a process
    def epoch_rows(self, epoch: int) -> list[np.ndarray]:
        """Rows of an epoch, each the sample numbers of one packed row.

        Kept: with a million samples a plan takes two seconds, and 18 MB.
        """
        return self._plan(self.training_samples, epoch)

    def steps_in_epoch(self, epoch: int) -> int:
        """Optimizer steps of an epoch; the last one may have fewer rows."""
        return -(-len(self.epoch_rows(epoch)) // self.training.rows_per_step)

    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        most = self.training.max_steps
        steps = 0
        for epoch in range(self.training.epochs):
            steps += self.steps_in_epoch(epoch)
            if most is not None and steps >= most:
                return most
        return steps

    def steps(self, start: StepPlace, count: int) -> Iterator[tuple[StepPlace, Iterator[TrainingRow]]]:
        """Yield `count` steps from `start` on: where each lies, and this rank's rows of it (see
        `rows_per_rank`).

        One reader serves them all, so that it reads ahead over the end of an epoch too.
        """
        places = [start][:count]
        while len(places) < count:
            places.append(self.after(places[-1]))
        wanted = [(p.epoch, row) for p in places for row in self._mine(p.epoch, p.step_in_epoch)]
        with RowStream(self, wanted) as stream:
            for place in places:
                yield place, _take(stream, self.rows_per_rank)

    @property
    def rows_per_rank(self) -> int:
        """Rows that each rank takes in one optimizer step, empty ones included."""
        return -(-self.training.rows_per_step // self.world.size)

    def after(self, place: StepPlace) -> StepPlace:
        """The step after one."""
        if place.step_in_epoch + 1 < self.steps_in_epoch(place.epoch):
            return StepPlace(epoch=place.epoch, step_in_epoch=place.step_in_epoch + 1)
        return StepPlace(epoch=place.epoch + 1, step_in_epoch=0)

    def validation_rows(self) -> Iterator[TrainingRow]:
        """This rank's share of the rows that are not learnt from: as many as the other ranks have, empty ones
        included.
        """
        planned = self._plan(self.validation_samples, VALIDATION_EPOCH)[: self.training.validation_rows]
        rows = [*planned, *[None] * (-len(planned) % self.world.size)]
        share = rows[self.world.rank :: self.world.size]
        with RowStream(self, [(VALIDATION_EPOCH, row) for row in share]) as stream:
            yield from stream

    def describe(self, place: StepPlace) -> str:
        """Name shards and samples of one optimizer step, those of all ranks."""
        per_step = self.training.rows_per_step
        rows = self.epoch_rows(place.epoch)[place.step_in_epoch * per_step :][:per_step]
        samples = np.concatenate(rows)
        shards = sorted({int(s) for s in self.dataset.index.shard_N[samples]})
        names = [self._ids[i] for i in samples]
        return f"shards {', '.join(map(str, shards))}; samples {', '.join(names)}"

    def _mine(self, epoch: int, step: int) -> list[np.ndarray | None]:
        rows = self.epoch_rows(epoch)
        numbers = rows_of_step(len(rows), step, self.training.rows_per_step, self.world.rank, self.world.size)
        return [None if number is None else rows[number] for number in numbers]

    def _plan(self, samples: np.ndarray, epoch: int) -> list[np.ndarray]:
        rows = plan_epoch(
            self._lengths_S[samples],
            seed=self.training.seed,
            epoch=epoch,
            row_tokens=self.training.row_tokens,
            group_S=self._group_S[samples],
        )
        return [samples[row] for row in rows]

    def reader(self, rows: Sequence[np.ndarray]) -> RowReader:
        """Open the store's reader on these rows."""
        return RowReader(
            self.dataset,
            self._columns,
            rows,
            row_tokens=self.training.row_tokens,
            device=self.world.device,
            config=self._reader_config,
        )

    def prepare(self, packed: PackedTokens, states: torch.Tensor | None, epoch: int) -> TrainingRow:
        """Choose the row's anchors, build its tensors and bring them to the device."""
        cuda = self.world.device.type == "cuda"
        batch = prepare_row(
            packed,
            self.drafter,
            anchors=self.training.anchors_per_row,
            seed=self.training.seed,
            epoch=epoch,
            dense=not cuda,
        )
        batch = batch.pin().to(self.world.device) if cuda else batch
        width = len(self.drafter.tap_layer_ids) * self.drafter.hidden_size
        if states is None:
            states = self._nothing()
        if states.shape[1] == width:
            return TrainingRow(batch=batch, taps_CE=states)
        return TrainingRow(
            batch=batch, taps_CE=states[:, :width].contiguous(), last_hidden_CD=states[:, width:].contiguous()
        )

    def empty_row(self, epoch: int) -> TrainingRow:
        """A row of padding, for a rank that has none in a step that others have."""
        return self.prepare(pack_tokens([], self.training.row_tokens), None, epoch)

    def _nothing(self) -> torch.Tensor:
        if self._empty_states is None:
            shape = (self.training.row_tokens, len(self._columns) * self.drafter.hidden_size)
            self._empty_states = torch.zeros(shape, dtype=torch.bfloat16, device=self.world.device)
        return self._empty_states

    def _check_lengths(self) -> None:
        longest = int(self._lengths_S.argmax())
        if self._lengths_S[longest] > self.training.row_tokens:
            raise UserError(
                f"sample {self._ids[longest]} has {self._lengths_S[longest]} tokens, more than "
                f"training.row_tokens = {self.training.row_tokens}; raise that, or extract shorter samples"
            )


class RowStream:
    """Rows as they come from the store, prepared; an open reader, so use it as a context."""

    def __init__(self, data: TrainingData, rows: Sequence[tuple[int, np.ndarray | None]]) -> None:
        """`rows` are epochs and sample numbers; None for a row of padding."""
        self._data, self._rows = data, rows
        self._reader = data.reader([row for _, row in rows if row is not None])

    def __enter__(self) -> Iterator[TrainingRow]:
        return self._iterate()

    def __exit__(self, *error: object) -> None:
        self._reader.close()

    def _iterate(self) -> Iterator[TrainingRow]:
        stored = iter(self._reader)
        for epoch, row in self._rows:
            if row is None:
                yield self._data.empty_row(epoch)
            else:
                packed, states = next(stored)
                yield self._data.prepare(packed, states, epoch)


def _take(stream: Iterator[TrainingRow], count: int) -> Iterator[TrainingRow]:
    for _ in range(count):
        yield next(stream)


def _columns(dataset: Dataset, drafter: DrafterConfig, training: TrainingConfig) -> list[str]:
    """Stored columns that the drafter reads, in its order. Raises UserError naming what is missing."""
    stored = dataset.columns
    wanted = [tap_column(layer) for layer in drafter.tap_layer_ids]
    if missing := [column for column in wanted if column not in stored]:
        raise UserError(
            f"{dataset.uri} holds {', '.join(stored)}, but the drafter reads {', '.join(missing)}; "
            "choose tap_layer_ids among the stored ones, or extract anew"
        )
    if training.loss.kl_weight > 0.0:
        kept = dataset.spec.capture.last_hidden
        if kept != "after_final_norm":
            raise UserError(
                "training.loss.kl_weight needs the target's last hidden state after its final norm, and "
                f"{dataset.uri} holds: {kept}. Extract with last_hidden: after_final_norm, or set it to 0"
            )
        if parse_codec(dataset.spec.codec).tolerance > TEACHER_TOLERANCE:
            log.warning(
                "training.loss.kl_weight: the teacher's hidden states are stored with %s, which moves its "
                "choices (docs/training.md says how far); lossless or tolerance=%g teach better",
                dataset.spec.codec,
                TEACHER_TOLERANCE,
            )
        wanted.append(LAST_HIDDEN)
    return wanted
