"""Writes docs/configuration.md from the configurations: python -m flows.configuration_reference."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dflash_core.configuration import Config
from flows.config import ExtractConfig, TrainConfig
from flows.evaluate import EvaluateConfig
from flows.respond import RespondConfig

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
COMMANDS: tuple[tuple[str, type[Config]], ...] = (
    ("dflash extract", ExtractConfig),
    ("dflash train", TrainConfig),
    ("dflash respond", RespondConfig),
    ("dflash evaluate", EvaluateConfig),
)
INTRODUCTION = """# Configuration

Each command reads one YAML file. Names that are not listed here are refused, and so are values of a wrong
type. `configs/` holds whole examples. This page is made from the source by
`python -m flows.configuration_reference`.
"""


def page() -> str:
    """Return the whole page in Markdown: one table for each command, then one for each part."""
    lines = [INTRODUCTION]
    parts: dict[str, type[Config]] = {}
    for command, kind in COMMANDS:
        lines += [f"## `{command} --config FILE`", "", (kind.__doc__ or "").strip(), "", *table(kind)]
        parts.update(parts_of(kind))
    for name, kind in sorted(parts.items()):
        lines += [f"## {name}", "", (kind.__doc__ or "").strip().splitlines()[0], "", *table(kind)]
    return "\n".join(lines)


def table(kind: type[Config]) -> Iterator[str]:
    """Yield the rows of a configuration's fields."""
    yield "| name | default | meaning |"
    yield "|---|---|---|"
    for name, field in kind.model_fields.items():
        part = next(iter(configs_in(field.annotation)), None)
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        more = f" ([{part.__name__}](#{part.__name__.lower()}))" if part else ""
        yield f"| `{name}` | {default(field)} | {meaning}{more} |"
    yield ""


def default(field: FieldInfo) -> str:
    """Return a field's default for people."""
    if field.is_required():
        return "**needed**"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Config):
        changed = value.model_dump(exclude_defaults=True)
        return "its defaults" if not changed else f"`{changed}`"
    if value is None or value is PydanticUndefined:
        return "none"
    if isinstance(value, tuple | dict) and not value:
        return "empty"
    return f"`{value}`"


def parts_of(kind: type[Config]) -> dict[str, type[Config]]:
    """Return the configurations that a configuration is composed of, at any depth, by name."""
    found: dict[str, type[Config]] = {}
    for field in kind.model_fields.values():
        for part in configs_in(field.annotation):
            found |= {part.__name__: part, **parts_of(part)}
    return found


def configs_in(annotation: Any) -> list[type[Config]]:
    """Return the configurations named in a type, such as Part or Part | None."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        return [kind for argument in typing.get_args(annotation) for kind in configs_in(argument)]
    return []


if __name__ == "__main__":
    PAGE.write_text(page())
