"""Turns what steps report into the numbers of a log line: rates, use of the device, waiting for data."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from dflash_core.distributed import World
from dflash_core.drafter import DrafterConfig
from dflash_core.metrics import Summary, row_flops
from dflash_core.step_clock import StepReport
from dflash_core.training import TrainingConfig

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0, "GB200": 2500.0, "GB300": 2500.0}
"""Dense bf16 rates by name of the device, from the makers' data sheets; for MFU alone."""


class TrainMeter:
    """Collects step reports between two readings of the metrics."""

    def __init__(self, drafter: DrafterConfig, training: TrainingConfig, world: World) -> None:
        self._drafter, self._training = drafter, training
        self._ranks = world.size
        self._reports: list[StepReport] = []
        self._cuda = world.device.type == "cuda"

    def add(self, report: StepReport) -> None:
        """Take the report of a finished step."""
        self._reports.append(report)

    def values(self, summary: Summary, steps: int) -> dict[str, Any]:
        """The numbers of the summary, of so many steps, and of the steps that finished since the last
        call.
        """
        reports, self._reports = self._reports, []
        values = summary.as_dict()
        if reports:
            step_ms = median(report.step_ms for report in reports)
            gap_ms = sum(report.gap_ms for report in reports) / len(reports)
            whole_s = (step_ms + gap_ms) / 1000
            tflops = self._step_flops(summary.scored_slots / steps) / self._ranks / whole_s / 1e12
            values |= {
                "step_ms": step_ms,
                "data_wait_ms": gap_ms,
                "context_tokens_per_s": summary.context_tokens / steps / whole_s,
                "draft_tokens_per_s": summary.blocks * self._drafter.block_size / steps / whole_s,
                "tflops_per_device": tflops,
            }
            if (peak := self._peak()) is not None:
                values["mfu"] = tflops / peak
        if self._cuda:
            values["memory_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            values["memory_reserved_gib"] = torch.cuda.memory_reserved() / 2**30
        return values

    def _step_flops(self, scored_slots: float) -> float:
        """Of a step's rows on all ranks: those of padding, which a rank without a row computes, are no
        work.
        """
        rows, training = self._training.rows_per_step, self._training
        queries = training.anchors_per_row * self._drafter.block_size
        return rows * row_flops(self._drafter, training.row_tokens, queries, scored_slots / rows)

    def _peak(self) -> float | None:
        if not self._cuda:
            return None
        name = torch.cuda.get_device_name()
        return next(
            (PEAK_TFLOPS[word] for word in name.replace("-", " ").split() if word in PEAK_TFLOPS), None
        )
