"""What the Prefect UI shows beside states and logs: progress, tables, plots and the final report."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from flows import console
from flows.acceptance_report import difference_lines, text_verdict
from flows.config import TrainConfig
from flows.extract_steps import Outcome
from flows.train_steps import TrainingLog
from storage.dataset import Dataset

ROWS_SHOWN = 1000
"""Rows of a table artifact; a larger one makes the UI slow."""
METRICS_SHOWN = (
    "loss",
    "accuracy",
    "acceptance_length",
    "draft_tokens_per_s",
    "step_ms",
    "data_wait_ms",
    "memory_peak_gib",
    "learning_rate",
    "gradient_norm",
)

_descriptions: dict[UUID, str] = {}
"""What the progress artifacts of this process are called."""


def start_progress(key: str, description: str) -> UUID:
    """Create a progress artifact at 0 % and return its id."""
    artifact = create_progress_artifact(progress=0.0, key=key, description=description)
    assert isinstance(artifact, UUID)
    _descriptions[artifact] = description
    console.tell(description, 0.0)
    return artifact


def update_progress(artifact: UUID, fraction: float) -> None:
    """Move a progress artifact."""
    update_progress_artifact(artifact_id=artifact, progress=round(100 * fraction, 1))
    console.tell(_descriptions[artifact], fraction)


def publish_failures(outcome: Outcome, command: str) -> None:
    """Show what failed and how to redo just that."""
    lines = ["## Shards that failed", "", "| shard | error |", "| --- | --- |"]
    for shard, error in sorted(outcome.failed.items())[:ROWS_SHOWN]:
        first_line = error.strip().splitlines()[0].replace("|", "\\|")
        lines.append(f"| {shard} | {first_line} |")
    lines += ["", "Redo just these:", "", "```", command, "```", "", "Errors in full:", "", "```"]
    lines += list(dict.fromkeys(outcome.failed.values()))[:10]
    create_markdown_artifact(markdown="\n".join([*lines, "```"]), key="failed-shards")


def publish_dataset(dataset: Dataset) -> None:
    """Show what the data set is and how large."""
    create_markdown_artifact(markdown=dataset_summary(dataset), key="data-set")


def dataset_summary(dataset: Dataset) -> str:
    """Return a page on a data set, sealed or not, in Markdown."""
    spec, plan = dataset.spec, dataset.plan
    lines = [
        f"## Data set {dataset.name}",
        "",
        f"* where: `{dataset.uri}`",
        f"* target: {spec.target.name} ({spec.target.model_type}, {spec.target.num_layers} layers)",
        f"* columns: {', '.join(dataset.columns)} ({spec.capture.tap_convention})",
        f"* {plan.samples} samples, {plan.tokens} tokens, {plan.supervised} of them supervised",
        f"* {len(plan.shards)} shards, codec {spec.codec}",
    ]
    if not dataset.sealed:
        return "\n".join([*lines, f"* **not sealed**: {len(dataset.missing())} shards are missing", ""])
    manifest = dataset.manifest()
    per_token = manifest.bytes / max(plan.tokens, 1)
    lines += [f"* sealed: {manifest.bytes} bytes, {per_token:.0f} a token", ""]
    lines += ["| column | bytes | relative error |", "| --- | --- | --- |"]
    for column, size in manifest.column_bytes.items():
        lines.append(f"| {column} | {size} | {manifest.relative_error.get(column, 0.0):.4g} |")
    return "\n".join([*lines, ""])


def image(path: Path, title: str) -> str:
    """Return a PNG file as a Markdown image that needs no server."""
    return f"![{title}](data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()})"


def clean(row: dict[str, Any]) -> dict[str, Any]:
    """Replace numbers that JSON cannot hold."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def metrics_line(row: dict[str, Any]) -> str:
    """Return the numbers of one metrics message that people follow, as a line of the log."""
    shown = [name for name in row if name.removeprefix("validation/") in METRICS_SHOWN]
    values = ", ".join(f"{name} {row[name]:.4g}" for name in shown if row[name] is not None)
    steps = f"{row['step']} of {row['total_steps']}" if "total_steps" in row else f"{row['step']}"
    return f"step {steps}: {values}"


def publish_curves(plots: list[Path]) -> None:
    """Show the curves of a training run as they are now."""
    if plots:
        pictures = "\n\n".join(image(path, path.stem) for path in plots)
        create_markdown_artifact(markdown=pictures, key="training-curves", description="Curves so far")


def publish_cache(summary: dict[str, Any] | None) -> None:
    """Show what the compile cache did for the run."""
    _publish_cache(summary, "compile-cache", "Compile cache of this run")


def publish_gate_cache(summary: dict[str, Any] | None) -> None:
    """Show what it did for the overfit gate: where there was nothing yet, the gate is what started cold."""
    _publish_cache(summary, "compile-cache-of-gate", "Compile cache of the overfit gate")


def _publish_cache(summary: dict[str, Any] | None, key: str, description: str) -> None:
    if summary is not None:
        rows = [{"what": name, "value": str(value)} for name, value in summary.items()]
        create_table_artifact(table=rows, key=key, description=description)


def publish_training(config: TrainConfig, summary: dict[str, Any], result: TrainingLog, folder: Path) -> None:
    """Show the report that a colleague can read alone, and write it to report.md."""
    page = training_page(config, summary, result, folder)
    (folder / "report.md").write_text(page)
    create_markdown_artifact(markdown=page, key="training-report", description="Report of the training run")


def training_page(config: TrainConfig, summary: dict[str, Any], result: TrainingLog, folder: Path) -> str:
    """Return the report in Markdown, its plots inside."""
    drafter = config.drafter
    lines = [
        f"# Drafter for {summary['target']}",
        "",
        f"* data set: `{summary['dataset']}` ({summary['tokens']} tokens)",
        f"* drafter: {drafter.num_layers} layers, blocks of {drafter.block_size}",
        f"* exported to: `{summary['drafter']}`",
        f"* checkpoints: `{config.output}/checkpoints`",
    ]
    if last := summary["last_metrics"]:
        lines.append(f"* last optimizer step: {metrics_line(last)}")
    if result.missed_gate is not None:
        lines.append(f"* **gate missed**: {result.missed_gate}")
    if result.acceptance is not None:
        lines += ["", "## Tokens a target call", "", "| prompts | tokens a call | speed-up | text |"]
        lines.append("| --- | --- | --- | --- |")
        for name, family in result.acceptance["families"].items():
            speed = f"{family['speed_up']:.2f}" if family["speed_up"] else "-"
            lines.append(f"| {name} | {family['acceptance_length']:.3f} | {speed} | {text_verdict(family)} |")
        if differences := difference_lines(result.acceptance):
            lines += ["", "Where texts leave the plain target's:", "", "```", *differences, "```"]
    for file, title in (
        ("training.png", "Loss and acceptance length"),
        ("speed.png", "Slots, speed and memory"),
        ("acceptance.png", "Acceptance"),
    ):
        if (folder / file).exists():
            lines += ["", f"## {title}", "", image(folder / file, title)]
    for title, cache in (
        ("Compile cache", result.cache),
        ("Compile cache of the overfit gate", result.gate_cache),
    ):
        if cache is not None:
            lines += ["", f"## {title}", "", "| | |", "| --- | --- |"]
            lines += [f"| {name} | {value} |" for name, value in cache.items()]
    lines += ["", "## Versions", ""]
    lines += [f"* {name} {version}" for name, version in summary["versions"].items()]
    return "\n".join([*lines, ""])
