"""The main loop of one rank: data set -> packed rows -> optimizer steps -> checkpoints -> exported drafter.
Start reading here.

`torchrun -m flows.train_worker run.json` with the file that `flows.train_steps` writes. Every rank runs all
of this; rank 0 alone writes checkpoints, metrics and the drafter. The order of things is in `train`, the
arithmetic of a step in `dflash_core.training.Trainer.step`, what a step reads in `flows.train_data`.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
from collections.abc import Iterator, Set
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from dflash_core.compile_watch import Watch, cache_in_use
from dflash_core.configuration import Config
from dflash_core.distributed import World, join_world, leave_world, start_device
from dflash_core.drafter import Drafter, DrafterConfig
from dflash_core.export import check_shape, export_drafter, load_exported
from dflash_core.export_check import check_export
from dflash_core.fast_path import (
    SIGNS,
    WARM_STEPS,
    FastPath,
    Sign,
    fused_attention_calls,
    require_fused_attention,
)
from dflash_core.step_clock import StepClock, StepReport
from dflash_core.target_weights import BorrowedWeights, find_embedding_and_head
from dflash_core.training import (
    WITHOUT_INFLUENCE,
    NonFiniteError,
    Trainer,
    TrainingConfig,
    TrainingRow,
    make_trainer,
)
from flows.config import TrainConfig
from flows.ranks import say, serve_rank
from flows.train_data import StepPlace, TrainingData
from flows.train_log import SCORE, TrainLog
from flows.train_meter import TrainMeter
from storage.checkpoints import Best, CheckpointDamaged, Checkpoints, Position
from storage.dataset import Dataset, open_dataset
from storage.dataset_spec import software_versions
from storage.objects import open_store

log = logging.getLogger(__name__)


class TrainJob(Config):
    """What the launcher writes for its ranks."""

    config: TrainConfig
    drafter: DrafterConfig
    dataset: str
    """Address of the sealed data set."""
    export: str
    """Local folder for the drafter."""
    borrowed: BorrowedWeights | None = None
    """Where the target's embedding and head lie; None: each rank looks for them."""


def train(job: TrainJob, folder: Path, world: World, watch: Watch) -> None:
    """Train to the end, or to a request to stop. `folder` is local and takes the metrics.

    Raises UserError for what the user can mend; NonFiniteError naming step, shards and samples.
    """
    training = job.config.training
    torch.manual_seed(training.seed)
    stop = StopRequest()
    dataset = open_dataset(job.dataset, connection=job.config.connection)
    dataset.manifest()
    checkpoints = Checkpoints(
        open_store(job.config.output, job.config.connection),
        identity_of(job, dataset),
        keep=training.keep_checkpoints,
    )
    tensors = load_weights(job, world, begun=has_begun(checkpoints, world))
    watch.mark("weights")
    data = TrainingData(dataset, job.drafter, training, world, job.config.reader)
    warn_of_idle_parts(data)
    watch.mark("data set")
    if training.compiles_on(world.device.type):
        watch.start()
        watch.mark("waiting for the compiler's modules")
    trainer = make_trainer(*tensors, training, total_steps=data.total_steps(), world=world)
    place = resume(trainer, checkpoints)
    watch.mark("trainer and checkpoint")
    settings = job.model_dump(mode="json")
    with TrainLog(folder, first=world.is_first, settings=settings, start_step=trainer.optimizer_step) as out:
        out.event(
            "started",
            pid=os.getpid(),
            optimizer_step=trainer.optimizer_step,
            total_steps=data.total_steps(),
            samples=len(data.training_samples),
            validation_samples=len(data.validation_samples),
            rows_per_epoch=len(data.epoch_rows(0)),
        )
        loop = TrainLoop(job, data, trainer, checkpoints, out, watch, stop)
        with checkpoints:
            finished = loop.run(place)
        step = trainer.optimizer_step  # exporting may go back to a better one
        if finished and world.is_first:
            export(job, dataset, trainer, checkpoints, out)
        out.event("finished", optimizer_step=step, stopped=not finished)


class TrainLoop:
    """The steps of a run and what happens between them."""

    def __init__(
        self,
        job: TrainJob,
        data: TrainingData,
        trainer: Trainer,
        checkpoints: Checkpoints,
        out: TrainLog,
        watch: Watch,
        stop: StopRequest,
    ) -> None:
        self._config: TrainingConfig = job.config.training
        self._data, self._trainer, self._checkpoints, self._out = data, trainer, checkpoints, out
        self._watch, self._stop = watch, stop
        self._world = data.world
        self._total = data.total_steps()
        self._clock = StepClock(self._world)
        self._meter = TrainMeter(job.drafter, self._config, self._world)
        self._fast_path = FastPath(self._config.expected_step_ms)
        self._signs: set[Sign] = set()
        """Signs of a slow path since the last reading of the metrics."""
        self._said_fast = self._validated = False
        self._stopping = False
        """Whether the ranks have agreed to stop: one was asked to."""
        self._began_at = self._read_at = self._saved_at = trainer.optimizer_step
        self._places: dict[int, StepPlace] = {}
        self._compiled = self._config.compiles_on(self._world.device.type)

    def run(self, place: StepPlace) -> bool:
        """Take all steps that are left; False when a rank was asked to stop before the end."""
        if self._out.score is not None:  # of the checkpoint that this run continues from
            self._mark_best(self._out.score)
        finished = self._take_steps(place)
        self._settle()
        return finished

    def _take_steps(self, place: StepPlace) -> bool:
        trainer, local_step = self._trainer, 0
        for here, rows in self._data.steps(place, self._total - trainer.optimizer_step):
            self._places[trainer.optimizer_step] = here
            self._step(rows, local_step)
            local_step += 1
            place = self._data.after(here)
            if not self._stopping:
                self._between_steps(place)
            if self._stopping:
                self._stop_here(place)
                return False
        if local_step == 0:
            return self._validate_at_the_end()
        return True

    def _step(self, rows: Iterator[TrainingRow], local_step: int) -> None:
        """One optimizer step; the first one of a run also compiles, and is followed by a look at what it
        did.
        """
        trainer, count = self._trainer, self._data.rows_per_rank
        first = next(rows)
        self._clock.begin()
        rows = itertools.chain([first], self._clock.rows(rows))
        on_gpu = self._world.device.type == "cuda"  # where attention can be fused at all
        if self._compiled and on_gpu and local_step == WARM_STEPS - 1:
            calls = fused_attention_calls(lambda: trainer.step(rows, count))
            require_fused_attention(*calls, layers=trainer.drafter.config.num_layers, rows=count)
        else:
            trainer.step(rows, count)
        reports = self._clock.end(trainer.optimizer_step - 1, trainer.halted_at, lambda: self._stop.asked)
        if self._compiled and local_step == 0:
            self._seal_graphs(first)
        for report in reports:
            self._take(report)
        self._look_at_path()

    def _seal_graphs(self, row: TrainingRow) -> None:
        """After the first whole step: compile the evaluation step too, tell what was compiled, allow no
        more.
        """
        self._settle()  # also so that the evaluation lies in no gap between steps
        self._watch.mark("first step")
        self._trainer.validate([row])
        self._clock.forget()
        say(**self._watch.report(rank=self._world.rank).model_dump(mode="json"))
        self._watch.forbid("error" if self._config.on_recompile == "stop" else "warn")

    def _between_steps(self, place: StepPlace) -> None:
        """Read metrics, validate, save: whatever is due after a step."""
        step, config = self._trainer.optimizer_step, self._config
        last = step == self._total
        if last or step % config.log_every == 0:
            self._read_metrics()
        validate = (last or step % config.validate_every == 0) and len(self._data.validation_samples) > 0
        if last or validate or step % config.checkpoint_every == 0:
            self._save(place)
        if validate and not self._stopping:
            self._validate()

    def _stop_here(self, place: StepPlace) -> None:
        """Lose nothing of what the steps so far have to say and have learnt."""
        if self._read_at < self._trainer.optimizer_step:
            self._read_metrics()
        if self._saved_at < self._trainer.optimizer_step:
            self._save(place)

    def _validate_at_the_end(self) -> bool:
        """Make up for the validation of a last step whose run did not come to it; False when it is cut short
        too.
        """
        unknown = self._on_any_rank(self._world.is_first and self._out.score is None)
        if unknown and len(self._data.validation_samples) > 0:
            self._validate()
        return not self._stopping

    def _look_at_path(self) -> None:
        """Name at once, in log and metrics, what takes a compiled run off the fast path; say once that it is
        on it.
        """
        if not self._compiled:
            return
        wrong = self._fast_path.check()
        if recompiles := self._watch.warnings():
            wrong["recompile"] = "; ".join(recompiles)
        step, rank = self._trainer.optimizer_step, self._world.rank
        new = {sign: text for sign, text in wrong.items() if sign not in self._signs}
        if new:
            self._signs |= new.keys()
            reasons = list(new.values())
            log.warning("rank %d is off the fast path at step %d: %s", rank, step, "; ".join(reasons))
            say("off_fast_path", rank=rank, step=step, reasons=reasons)
            self._out.metrics(step, _sign_values(self._signs))
        elif self._fast_path.is_warm and not wrong and not self._said_fast:
            self._said_fast = True
            if self._world.is_first:
                step_ms = self._fast_path.step_ms
                log.info(
                    "on the fast path at step %d: %.1f ms a step, no recompile%s%s",
                    step,
                    step_ms,
                    ", attention fused in every layer" if self._world.device.type == "cuda" else "",
                    ""
                    if self._config.expected_step_ms
                    else "; no benchmark of these shapes is known (training.expected_step_ms)",
                )
                self._out.event("fast_path", step=step, step_ms=step_ms)

    def _signs_anywhere(self) -> set[Sign]:
        """Signs that any rank has seen since the last reading. Waits for the device; all ranks must call."""
        here = torch.tensor([int(sign in self._signs) for sign in SIGNS], device=self._world.device)
        ranks = self._world.sum(here).tolist()
        return {sign for sign, count in zip(SIGNS, ranks, strict=True) if count}

    def _take(self, report: StepReport) -> None:
        if not self._compiled or report.optimizer_step > self._began_at:  # the first one compiles
            self._meter.add(report)
        self._fast_path.observe(report.step_ms, report.gap_ms)
        self._stopping = self._stopping or report.stop
        if report.halted_at >= 0:
            place = self._places[report.halted_at]
            raise NonFiniteError(report.halted_at, self._data.describe(place))
        for step in [s for s in self._places if s < report.optimizer_step]:
            del self._places[step]

    def _settle(self) -> None:
        """Wait for the steps that are under way."""
        for report in self._clock.drain():
            self._take(report)

    def _read_metrics(self) -> None:
        self._settle()  # what is not finite is told with its place, by the report of its step
        summary, norm = self._trainer.summary()
        values = self._meter.values(summary, self._trainer.optimizer_step - self._read_at)
        self._read_at = self._trainer.optimizer_step
        if self._compiled:
            values |= _sign_values(self._signs_anywhere())
            self._signs.clear()
        step = self._trainer.optimizer_step
        values |= {
            "total_steps": self._total,
            "epoch": self._places[step - 1].epoch,
            "gradient_norm": norm,
            "learning_rate": self._trainer.optimizer.rate(step - 1),
        }
        self._out.metrics(self._trainer.optimizer_step, values)
        self._clock.forget()

    def _validate(self) -> None:
        """Score the last checkpoint, which holds the weights as they are; a request to stop cuts it short."""
        summary = self._trainer.validate(self._validation_rows())
        self._clock.forget()
        if not self._validated:  # its reader has buffers of its own, which the device keeps
            self._validated = True
            self._fast_path.expect_other_memory()
        if self._stopping:
            return
        values = {f"validation/{name}": value for name, value in summary.as_dict().items()}
        self._out.metrics(self._trainer.optimizer_step, values)
        if self._world.is_first and summary.blocks > 0:
            self._mark_best(values[SCORE])

    def _validation_rows(self) -> Iterator[TrainingRow]:
        """This rank's rows, as long as no rank is asked to stop: all ranks end with the same one."""
        for done, row in enumerate(self._data.validation_rows(), start=1):
            yield row
            self._out.event("progress", what="validation", done=done)
            self._stopping = self._on_any_rank(self._stop.asked)
            if self._stopping:
                return

    def _on_any_rank(self, here: bool) -> bool:
        """Whether it is so on any rank. Waits for the device; every rank must call it."""
        return bool(self._world.sum(torch.tensor(int(here), device=self._world.device)))

    def _mark_best(self, score: float) -> None:
        """Tell the store when the last checkpoint is the best one so far, as soon as that is written."""
        self._checkpoints.mark_best(Best(optimizer_step=self._trainer.optimizer_step, score=score))

    def _save(self, place: StepPlace) -> None:
        """Write a checkpoint in the background, unless the run has met a number that is not finite."""
        self._settle()
        self._saved_at = step = self._trainer.optimizer_step
        if self._world.is_first:
            self._write_checkpoint(step, place)
        self._clock.forget()

    def _write_checkpoint(self, step: int, place: StepPlace) -> None:
        position = Position(optimizer_step=step, epoch=place.epoch, step_in_epoch=place.step_in_epoch)
        tensors = self._trainer.state() | {"rng/cpu": torch.get_rng_state()}
        notes: dict[str, Any] = {
            "ranks": self._world.size,
            "versions": software_versions(),
            "compile_cache": cache_in_use(),
        }
        self._trainer.hold(self._checkpoints.save(position, tensors, notes))
        self._out.event("checkpoint", step=step)


def _sign_values(signs: Set[Sign]) -> dict[str, int]:
    values = {f"off_fast_path/{sign}": int(sign in signs) for sign in SIGNS}
    return {"signs_off_fast_path": len(signs), **values}


class StopRequest:
    """SIGTERM as a flag: preempted runs finish their step, write a checkpoint and end well."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def load_weights(
    job: TrainJob, world: World, *, begun: bool = False
) -> tuple[Drafter, torch.Tensor, torch.Tensor]:
    """Make the drafter (random, or from an exported one) and borrow the target's embedding and head, all on
    this rank's device. A run that has `begun` continues from its checkpoint and needs no other drafter.

    Raises UserError when the drafter to start from has another shape.
    """
    training = job.config.training
    if training.init_from is not None and not begun:
        check_shape(Path(training.init_from), job.drafter)
        drafter = load_exported(Path(training.init_from), dtype=torch.float32)
        drafter.compute_dtype = training.dtype
        drafter.requires_grad_(True)
        drafter.to(world.device)
    else:
        with torch.device("meta"):
            drafter = Drafter(job.drafter, training.dtype)
        drafter.to_empty(device=world.device)
        drafter.init_weights(training.seed)
    world.broadcast([parameter.data for parameter in drafter.parameters()])
    borrowed = job.borrowed or find_embedding_and_head(job.config.target, job.config.revision)
    embedding_VD, head_VD = borrowed.read()
    tied = head_VD.data_ptr() == embedding_VD.data_ptr()
    embedding_VD = embedding_VD.to(world.device, training.dtype)
    return drafter, embedding_VD, embedding_VD if tied else head_VD.to(world.device, training.dtype)


def identity_of(job: TrainJob, dataset: Dataset) -> dict[str, Any]:
    """Everything that must be equal for a run to continue from a checkpoint."""
    return {
        "dataset": dataset.fingerprint,
        "drafter": job.drafter.model_dump(mode="json"),
        "training": job.config.training.model_dump(mode="json", exclude=set(WITHOUT_INFLUENCE)),
    }


def warn_of_idle_parts(data: TrainingData) -> None:
    """Say what of the run has nothing to do."""
    training, world = data.training, data.world
    if not world.is_first:
        return
    if idle := -training.rows_per_step % world.size:
        log.warning(
            "training.rows_per_step is %d, and %d ranks take %d rows each: %d of these are padding in every "
            "step; make it a multiple of the ranks",
            *(training.rows_per_step, world.size, data.rows_per_rank, idle),
        )
    if training.validation_fraction > 0 and not len(data.validation_samples):
        log.warning(
            "training.validation_fraction is %g, but none of the samples was kept out: nothing is validated, "
            "and the last weights are exported",
            training.validation_fraction,
        )


def has_begun(checkpoints: Checkpoints, world: World) -> bool:
    """Whether there is a checkpoint to continue from; every rank must call it."""
    found = world.from_first(lambda: (checkpoints.steps(), {}))
    return found is not None and bool(found[0])


def resume(trainer: Trainer, checkpoints: Checkpoints) -> StepPlace:
    """Continue from the latest checkpoint, if there is one; returns where the next step lies.

    The first rank reads it and hands it to the others: a store is asked for it once, however many there are.
    Raises UserError naming the keys when it is of another configuration.
    """
    found = trainer.world.from_first(checkpoints.latest)
    if found is None:
        return StepPlace(epoch=0, step_in_epoch=0)
    record, tensors = found
    torch.set_rng_state(tensors.pop("rng/cpu").cpu())
    position = record.position
    trainer.load_state(tensors, position.optimizer_step)
    if trainer.world.is_first:
        before, now = record.notes["ranks"], trainer.world.size
        change = f", with {now} ranks instead of {before}: the same rows in another division"
        log.info(
            "continuing after optimizer step %d, epoch %d%s",
            position.optimizer_step,
            position.epoch,
            change if before != now else "",
        )
    return StepPlace(epoch=position.epoch, step_in_epoch=position.step_in_epoch)


def export(
    job: TrainJob, dataset: Dataset, trainer: Trainer, checkpoints: Checkpoints, out: TrainLog
) -> None:
    """Write the drafter for serving engines: the best one by validation, the last one without a
    validation.

    Raises UserError, with the folder written, when an engine would run it otherwise than it was trained.
    """
    best, step = checkpoints.best(), trainer.optimizer_step
    if best is not None and best.optimizer_step != step:
        try:
            trainer.load_state(checkpoints.load(checkpoints.record(best.optimizer_step)), best.optimizer_step)
            step = best.optimizer_step
        except CheckpointDamaged as damage:
            log.warning("%s; the last weights are exported instead of the best ones", damage)
            best = None
    with trainer.averaged_weights() as drafter:
        export_drafter(drafter, Path(job.export), dataset.spec.target)
    check_export(Path(job.export))
    out.event("exported", step=step, folder=job.export, acceptance_length=best.score if best else None)


def main() -> None:
    """Be one rank of a run."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    path = Path(sys.argv[1])
    job = TrainJob.model_validate_json(path.read_text())
    watch = Watch.from_environment()
    watch.mark("python, torch and our modules")
    world = join_world()  # looks at torch._dynamo if it is there, and must not see half of it
    if job.config.training.compiles_on(world.device.type):
        watch.load_compiler()
    start_device(world.device)
    watch.mark("device")
    try:
        train(job, path.parent, world, watch)
    finally:
        leave_world(world)


if __name__ == "__main__":
    serve_rank(main)
