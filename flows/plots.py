"""PNG plots of a run: loss and acceptance over training, acceptance by family of prompts and by slot."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
Point = tuple[float, float]
MOST_POINTS = 2000
"""Points of a curve that are drawn; a picture has fewer columns than that."""


def plot_training(rows: Rows, path: Path, title: str = "") -> Path:
    """Draw loss (above) and acceptance length (below) against the optimizer step.

    `rows` are metric rows with a "step"; every other key whose name ends in "loss" or has "acceptance_length"
    in it becomes a curve, over the rows that hold it. Keys of a validation set ("validation/loss") get their
    own curve.
    """
    figure, (above, below) = _figure(2, (8, 7), sharex=True)
    _curves(above, rows, lambda key: key.endswith("loss"))
    above.set_ylabel("loss")
    _curves(below, rows, lambda key: "acceptance_length" in key)
    below.set_ylabel("tokens a target call")
    below.set_xlabel("optimizer step")
    return _save(figure, path, title)


def plot_speed(rows: Rows, path: Path, title: str = "") -> Path:
    """Draw the last acceptance by slot, drafted tokens a second, and memory (where a GPU was used).

    `rows` are metric rows as for `plot_training`, with "slot_acceptance" (slots 1..K-1),
    "draft_tokens_per_s", "data_wait_ms" and "memory_peak_gib".
    """
    figure, (left, middle, right) = _figure(1, (11, 3.4), columns=3)
    for key in ("slot_acceptance", "validation/slot_acceptance"):
        last = next((row[key] for row in reversed(rows) if row.get(key)), None)
        if last is not None:
            shares = [value if _finite(value) else math.nan for value in last]
            left.plot(range(1, len(shares) + 1), shares, marker=".", label=key)
            left.legend(fontsize=8)
    left.set_ylim(0, 1.02)
    left.set_xlabel("slot")
    left.set_ylabel("share of blocks that match up to it")
    _curves(middle, rows, lambda key: key == "draft_tokens_per_s")
    _curves(right, rows, lambda key: key in ("memory_peak_gib", "data_wait_ms"))
    for axes in (middle, right):
        axes.set_xlabel("optimizer step")
    return _save(figure, path, title)


def plot_acceptance(families: Mapping[str, Mapping[str, Any]], path: Path, title: str = "") -> Path:
    """Draw acceptance length per family (bars) and the share of blocks accepted up to each slot (curves).

    Each family needs "acceptance_length" and "per_slot", as `AcceptanceStats.report` gives them.
    """
    figure, (left, right) = _figure(1, (11, 4.2), columns=2)
    names = list(families)
    heights = [float(families[name]["acceptance_length"] or 0.0) for name in names]
    bars = left.barh(names, heights, color=[f"C{i % 10}" for i in range(len(names))])
    left.bar_label(bars, fmt="%.2f", padding=3)
    left.axvline(1.0, color="grey", linewidth=0.8, linestyle=":")
    left.set_xlim(0, 1.18 * max([1.0, *heights]))
    left.set_xlabel("tokens a target call (1: no draft accepted)")
    left.invert_yaxis()
    for name in names:
        shares = families[name]["per_slot"]
        right.plot(range(1, len(shares) + 1), shares, marker=".", label=name)
    right.set_xlabel("slot")
    right.set_ylabel("share of blocks accepted up to it")
    right.set_ylim(0, 1.02)
    right.grid(alpha=0.3)
    if names:
        right.legend(fontsize=8)
    return _save(figure, path, title)


def _curves(axes: Any, rows: Rows, wanted: Callable[[str], bool]) -> None:
    keys = dict.fromkeys(key for row in rows for key in row if wanted(key))
    for key in keys:
        points = thinned([(row["step"], row[key]) for row in rows if _finite(row.get(key))])
        if not points:
            continue  # a list, such as the losses of all slots
        marker = "." if len(points) < 30 else None
        axes.plot([x for x, _ in points], [y for _, y in points], label=key, linewidth=1.2, marker=marker)
    axes.grid(alpha=0.3)
    if keys:
        axes.legend(fontsize=8)


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Return every nth point, the last one among them, so that no more than MOST_POINTS are left."""
    every = max(1, -(-len(points) // MOST_POINTS))
    return points[::-every][::-1]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _figure(rows: int, size: tuple[float, float], *, columns: int = 1, sharex: bool = False) -> Any:
    # The object interface with its own canvas: no display, no global state, safe in any thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, sharex=sharex)


def _save(figure: Any, path: Path, title: str) -> Path:
    if title:
        figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
