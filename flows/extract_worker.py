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
from pathlib import Path

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
from storage.codec import Calibration, parse_codec
from storage.dataset import Dataset, ShardAlreadyCommitted, open_dataset
from storage.shard_format import ShardRecord
from storage.writer import ShardWriter, WriterConfig

log = logging.getLogger(__name__)


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
        self.dataset: Dataset = open_dataset(setup["dataset"])
        config = TargetConfig.model_validate(setup["target"])
        if "," in os.environ.get("CUDA_VISIBLE_DEVICES", "") and config.device_map is None:
            config = config.model_copy(update={"device_map": "auto"})
        self.target: Target = load_target(config, own_device())
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
        spec = self.dataset.spec
        if (self.target.spec, self.target.capture_spec) != (spec.target, spec.capture):
            raise UserError(
                f"the target that was loaded is not the one that {self.dataset.uri} was planned for; "
                "its files were changed in between"
            )
        try:
            errors = check_parity(self.target, self.dataset.samples(0)[:count])
        except ParityError as error:
            raise UserError(f"parity gate: {error}") from error
        worst = ", ".join(f"{column} {error:.2g}" for column, error in errors.items())
        log.info("captured states equal those of a plain forward (largest relative error: %s)", worst)

    def run(self, job: Job) -> Result | Callable[[], Result]:
        """Do one job."""
        with _device_errors():
            if job["task"] == "scales":
                return self._publish_scales()
            return self._capture_shard(job["shard"], replace=job["replace"])

    def _publish_scales(self) -> Result:
        """Compute the codec's channel scales from the fixed subset, unless they are published already."""
        if not self.codec.needs_scales or self.dataset.scales() is not None:
            return {"published": False}
        with self.channel.waiting("calibration samples"):
            samples = self.dataset.calibration_samples()
        calibration = Calibration()
        for _, states in self._captures(samples, "calibration"):
            for captured in states:
                calibration.add(captured.states)
        with self.channel.waiting("scales"):
            self.dataset.publish_scales(calibration.scales())
        log.info("channel scales of codec %s are published", self.codec.name)
        return {"published": True}

    def _capture_shard(self, shard: int, *, replace: bool) -> Callable[[], Result]:
        """Have all samples of a shard captured and encoded; return what waits for that, uploads and commits.

        A GPU may still be at work on the last samples then: the next shard's follow without a gap.
        """
        began = time.monotonic()
        try:
            with self.channel.waiting(f"samples of shard {shard}"):
                samples = self.dataset.samples(shard)
                writer = ShardWriter(self.dataset, shard, self.scratch, self.writer_config, replace=replace)
        except ShardAlreadyCommitted:
            return lambda: self._result(self.dataset.record(shard), 0.0, found=True)
        try:
            budget = self._capture_into(writer, samples, shard)
        except BaseException:
            writer.abort()
            raise
        seconds = time.monotonic() - began
        self._tell_compiled()

        def finish() -> Result:
            try:
                with _device_errors(), writer:
                    record, found = writer.close(), False
            except ShardAlreadyCommitted:
                record, found = self.dataset.record(shard), True
            return {**self._result(record, seconds, found=found), "token_budget": budget}

        return finish

    def _tell_compiled(self) -> None:
        """Report after the first shard, and after each other that has met something not compiled before."""
        if self.watch is None:
            return
        report = self.watch.report(rank=self.worker)
        if self.compiled is None or report.new_files > self.compiled.new_files:
            self.compiled = report
            self.channel.say(**report.model_dump(mode="json"))

    def _capture_into(self, writer: ShardWriter, samples: Sequence[Sample], shard: int) -> int:
        """Capture in batches, write in the order of the plan; return the token budget."""
        captured: dict[str, CapturedSample] = {}
        position = budget = 0
        for used, states in self._captures(samples, f"shard {shard}"):
            budget = used
            captured.update((item.sample.sample_id, item) for item in states)
            del states
            while position < len(samples) and samples[position].sample_id in captured:
                writer.add(captured.pop(samples[position].sample_id))
                position += 1
        return budget

    def _captures(self, samples: Sequence[Sample], what: str) -> Iterator[tuple[int, list[CapturedSample]]]:
        """Yield (token budget, captured batch); where memory runs out the budget is halved for the rest."""
        budget = self.target.config.batch_tokens
        total, tokens = sum(sample.num_tokens for sample in samples), 0

        def smaller(fewer: int) -> None:
            nonlocal budget
            log.warning("%s: out of memory with %d tokens a batch; going on with %d", what, budget, fewer)
            budget = fewer

        try:
            for states in captures(self.target, samples, on_smaller=smaller):
                tokens += sum(item.sample.num_tokens for item in states)
                yield budget, states
                del states  # let go of the batch's outputs before the next forward
                self.channel.say("progress", what=what, done=tokens, of=total)
        except TargetOutOfMemory as error:
            raise UserError(
                f"out of memory on one sample: {error}; lower chat.max_length, or give each worker more GPUs "
                "(workers.slots)"
            ) from error

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


@contextmanager
def _device_errors() -> Iterator[None]:
    """Raise Unusable for errors after which nothing works on the GPU in this process."""
    try:
        yield
    except RuntimeError as error:
        if "CUDA error" in str(error) or "cuDNN error" in str(error):
            raise Unusable(str(error)) from error
        raise


def start(channel: Channel, setup: Job) -> RunJob:
    """Load the target, and return the function that does jobs."""
    return ShardCapturer(channel, setup).run


if __name__ == "__main__":
    serve(start)
