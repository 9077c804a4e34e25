"""Progress for a person: bars at a terminal, lines in a log; silent unless `bars` is open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_open: Progress | None = None
_bars: dict[str, TaskID] = {}
_said: dict[str, int] = {}
LINES = 10
"""Of each name, where there is no terminal."""


def tell(name: str, fraction: float) -> None:
    """Move the bar of this name to a share of 1; does nothing unless `bars` is open."""
    if _open is None:
        return
    if not _open.console.is_terminal:
        lines = int(fraction * LINES)
        if lines > _said.get(name, 0):
            _said[name] = lines
            _open.console.print(f"{name}: {min(1.0, fraction):.0%}")
        return
    if name not in _bars:
        _bars[name] = _open.add_task(name, total=1.0)
    _open.update(_bars[name], completed=min(1.0, fraction))


@contextmanager
def bars() -> Iterator[Console]:
    """Show a bar for whatever is told of in this block; print other lines through the console it gives."""
    global _open
    columns = (TextColumn("{task.description:<24}"), BarColumn(40), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeElapsedColumn()) as progress:
        _open = progress
        try:
            yield progress.console
        finally:
            _open = None
            _bars.clear()
            _said.clear()
