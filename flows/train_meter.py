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
        queries = training.anchors_per_row * drafter.block_size
        rows = training.rows_per_step
        self._rows_per_rank = -(-rows // world.size)
        self._draft_tokens = rows * queries
        self._row_flops = row_flops(drafter, training.row_tokens, queries)
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
            tflops = self._row_flops * self._rows_per_rank / whole_s / 1e12
            values |= {
                "step_ms": step_ms,
                "data_wait_ms": gap_ms,
                "context_tokens_per_s": summary.context_tokens / steps / whole_s,
                "draft_tokens_per_s": self._draft_tokens / whole_s,
                "tflops_per_device": tflops,
            }
            if (peak := self._peak()) is not None:
                values["mfu"] = tflops / peak
        if self._cuda:
            values["memory_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            values["memory_reserved_gib"] = torch.cuda.memory_reserved() / 2**30
        return values

    def _peak(self) -> float | None:
        if not self._cuda:
            return None
        name = torch.cuda.get_device_name()
        return next(
            (PEAK_TFLOPS[word] for word in name.replace("-", " ").split() if word in PEAK_TFLOPS), None
        )
