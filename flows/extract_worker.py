"""The process on one GPU (or group of GPUs) that captures shard after shard; knows nothing of Prefect.

It loads the target once, proves on a few samples that capturing it gives what a plain forward gives, and then
answers jobs: {"task": "scales"} and {"task": "shard", "shard": 12, "replace": false}.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from dflash_core.compile_watch import CompileReport, Watch, cache_in_use
from dflash_core.configuration import UserError
from dflash_core.distributed import own_device
from dflash_core.records import CapturedSample, Sample
from dflash_core.target import (
    ParityError,
    Target,
    TargetConfig,
    TargetOutOfMemory,
    captures,
    check_parity,
    load_target,
)
from flows.channel import Channel, Job, Result, RunJob, Unusable, serve
from storage.calibration import Calibration
from storage.codec import parse_codec
from storage.dataset import Dataset, ShardAlreadyCommitted, open_dataset
from storage.object_store import StoreConfig
from storage.shard_format import ShardRecord
from storage.writer import ShardWriter, WriterConfig

log = logging.getLogger(__name__)
Made = TypeVar("Made")

BROKEN_DEVICE = ("CUDA error", "CUDA driver error", "cuDNN error", "Triton Error")
"""What the errors say after which nothing works on the GPU in this process."""


class ShardCapturer:
    """A loaded target, the data set it writes to, and the channel to the parent."""

    def __init__(self, channel: Channel, setup: Job) -> None:
        """Load the target and check it. Raises UserError."""
        self.channel, self.worker = channel, setup.get("worker", 0)
        self.watch = Watch.from_environment() if cache_in_use() else None
        """Tells what is compiled, where the parent has opened a compile cache."""
        self.compiled: CompileReport | None = None
        """What was told of it last."""
        if self.watch:
            self.watch.mark("python, torch and our modules")
            self.watch.load_compiler()
        connection = StoreConfig.model_validate(setup.get("connection", {}))
        self.dataset: Dataset = open_dataset(setup["dataset"], connection=connection)
        config = TargetConfig.model_validate(setup["target"])
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if "," in gpus and config.device_map is None:
            if config.batching == "packed":
                raise UserError(
                    f"a slot of several GPUs ({gpus}) spreads the target over them, and target.batching "
                    '"packed" runs on one; name one GPU a slot in workers.slots, or leave batching out'
                )
            config = config.model_copy(update={"device_map": "auto"})
        self.target: Target = load_target(
            config, own_device(), lambda: channel.say("progress", what="target")
        )
        self.token_budget = self.shard_budget = config.batch_tokens
        """Tokens of a batch, halved where memory runs out; and with how many each shard begins."""
        self.ran_out = False
        """Whether memory ran out in the shard before."""
        for sentence in self.target.report:
            log.warning("%s", sentence)
        self.codec = parse_codec(self.dataset.spec.codec)
        self.writer_config = WriterConfig.model_validate(setup["writer"])
        self.scratch = Path(setup["scratch"]) if setup["scratch"] else None
        if self.watch:
            self.watch.mark("target")
            self.watch.start()
        self._check_target(setup["parity_samples"])

    def _check_target(self, count: int) -> None:
        spec, samples = self.dataset.spec, self.dataset.samples(0)[:count]
        if (self.target.spec, self.target.capture_spec) != (spec.target, spec.capture):
            raise UserError(
                f"the target that was loaded is not the one that {self.dataset.uri} was planned for; "
                "its files were changed in between"
            )
        try:
            errors = check_parity(self.target, samples)
        except ParityError as error:
            raise UserError(f"parity gate: {error}") from error
        except (torch.OutOfMemoryError, TargetOutOfMemory) as error:
            longest = max(sample.num_tokens for sample in samples)
            raise UserError(
                f"parity gate: no room for plain forwards (one sample at a time, up to {longest} tokens, all "
                f"layers kept) and what is compared with them: {error}; lower parity_samples (now {count}), "
                "target.batch_tokens or chat.max_length, or give each worker more GPUs (workers.slots)"
            ) from error
        worst = ", ".join(f"{column} {error:.2g}" for column, error in errors.items())
        log.info("captured states equal those of a plain forward (largest relative error: %s)", worst)

    def run(self, job: Job) -> Result | Callable[[], Result]:
        """Do one job."""
        with device_errors():
            if job["task"] == "scales":
                return self._publish_scales()
            return self._capture_shard(job["shard"], replace=job["replace"])

    def _publish_scales(self) -> Result:
        """Compute the codec's channel scales from the fixed subset, unless they are published already."""
        if not self.codec.needs_scales or self.dataset.scales() is not None:
            return {"published": False}
        with self.channel.waiting("calibration samples"):
            samples = self.dataset.calibration_samples()
        calibration = self._with_room(samples, "calibration", lambda: self._calibrate(samples))
        with self.channel.waiting("scales"):
            self.dataset.publish_scales(calibration.scales())
        log.info("channel scales of codec %s are published", self.codec.name)
        return {"published": True}

    def _calibrate(self, samples: Sequence[Sample]) -> Calibration:
        calibration = Calibration()
        for states in self._captures(samples, "calibration"):
            for captured in states:
                calibration.add(captured.states)
        return calibration

    def _capture_shard(self, shard: int, *, replace: bool) -> Callable[[], Result]:
        """Have all samples of a shard captured and encoded; return what waits for that, uploads and commits.

        A GPU may still be at work on the last samples then: the next shard's follow without a gap.
        """
        began = time.monotonic()
        what = f"shard {shard}"
        self.token_budget = self.shard_budget
        with self.channel.waiting(what):
            samples = self.dataset.samples(shard)
        try:
            writer = self._with_room(samples, what, lambda: self._fill(shard, samples, what, replace=replace))
        except ShardAlreadyCommitted:
            return partial(self._found, shard)
        seconds, budget = time.monotonic() - began, self.token_budget
        self._remember_budget(what)
        self._tell_compiled()

        def finish() -> Result:
            try:
                with device_errors(), writer:
                    writer.wait_for_device()  # not part of the upload: a device that hangs must be silent
                    with self.channel.waiting("upload"):
                        record = writer.close()
            except ShardAlreadyCommitted:
                return {**self._found(shard), "seconds": seconds, "token_budget": budget}
            return {**self._result(record, seconds, found=False), "token_budget": budget}

        return finish

    def _remember_budget(self, what: str) -> None:
        """The next shard begins with all tokens again, unless memory has run out in two shards one after the
        other.
        """
        ran_out = self.token_budget < self.shard_budget
        if ran_out and self.ran_out:
            log.warning("%s: out of memory again; all shards begin with %d tokens", what, self.token_budget)
            self.shard_budget = self.token_budget
        self.ran_out = ran_out

    def _tell_compiled(self) -> None:
        """Report after the first shard, and after each other that has met something not compiled before."""
        if self.watch is None:
            return
        report = self.watch.report(rank=self.worker)
        if self.compiled is None or report.new_files > self.compiled.new_files:
            self.compiled = report
            self.channel.say(**report.model_dump(mode="json"))

    def _fill(self, shard: int, samples: Sequence[Sample], what: str, *, replace: bool) -> ShardWriter:
        """Open a shard, capture its samples in batches and add them in the order of the plan."""
        with self.channel.waiting(what):
            writer = ShardWriter(self.dataset, shard, self.scratch, self.writer_config, replace=replace)
        captured: dict[str, CapturedSample] = {}
        position = 0
        try:
            for states in self._captures(samples, what):
                captured.update((item.sample.sample_id, item) for item in states)
                del states
                ready = []
                while position < len(samples) and samples[position].sample_id in captured:
                    ready.append(captured.pop(samples[position].sample_id))
                    position += 1
                writer.add(*ready)
                del ready
        except BaseException:
            writer.abort()
            raise
        return writer

    def _captures(self, samples: Sequence[Sample], what: str) -> Iterator[list[CapturedSample]]:
        """Yield captured batches; where a forward has no room the token budget is halved."""
        total, tokens = sum(sample.num_tokens for sample in samples), 0
        try:
            for states in captures(
                self.target, samples, self.token_budget, lambda fewer: self._lower_budget(fewer, what)
            ):
                tokens += sum(item.sample.num_tokens for item in states)
                yield states
                del states  # let go of the batch's outputs before the next forward
                self.channel.say("progress", what=what, done=tokens, of=total)
        except TargetOutOfMemory as error:
            raise _one_sample_too_large(error) from error

    def _with_room(self, samples: Sequence[Sample], what: str, make: Callable[[], Made]) -> Made:
        """Return what `make` makes of captured samples; where it has no room beside the forwards (to encode,
        say), it begins anew with half the token budget.
        """
        while True:
            try:
                return make()
            except torch.OutOfMemoryError as error:
                if self.token_budget <= max(sample.num_tokens for sample in samples):
                    raise _one_sample_too_large(error) from error
            # Here, where the error and the tensors that its traceback holds are gone.
            if self.target.device.type == "cuda":
                torch.cuda.synchronize(self.target.device)
                torch.cuda.empty_cache()
            self._lower_budget(self.token_budget // 2, what)

    def _lower_budget(self, fewer: int, what: str) -> None:
        log.warning(
            "%s: out of memory with %d tokens a batch; it goes on with %d",
            *(what, self.token_budget, fewer),
        )
        self.token_budget = fewer

    def _found(self, shard: int) -> Result:
        """Return what there is to tell of a shard that another worker has committed."""
        with self.channel.waiting("record"):
            return self._result(self.dataset.record(shard), 0.0, found=True)

    def _result(self, record: ShardRecord, seconds: float, *, found: bool) -> Result:
        width = self.dataset.spec.target.hidden_size
        return {
            "shard": record.shard,
            "tokens": record.tokens,
            "bytes": record.size,
            "raw_bytes": record.tokens * width * len(record.columns) * 2,
            "relative_error": max(record.relative_error.values(), default=0.0),
            "seconds": seconds,
            "found": found,
            "samples": record.samples,
            "object": record.object,
        }


def _one_sample_too_large(error: Exception) -> UserError:
    return UserError(
        f"out of memory on one sample: {error}; lower chat.max_length, or give each worker more GPUs "
        "(workers.slots)"
    )


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise Unusable for the errors of a broken device."""
    try:
        yield
    except RuntimeError as error:
        if any(words in str(error) for words in BROKEN_DEVICE):
            raise Unusable(str(error)) from error
        raise


def start(channel: Channel, setup: Job) -> RunJob:
    """Load the target, and return the function that does jobs."""
    return ShardCapturer(channel, setup).run


if __name__ == "__main__":
    serve(start)
