"""Writes docs/configuration.md from the configuration classes: `python -m flows.reference`."""

from __future__ import annotations

from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from dflash_core.configuration import Config
from flows.config import ExtractConfig, TrainConfig
from flows.evaluate import EvaluateConfig
from flows.respond import RespondConfig

PAGE = Path("docs/configuration.md")
COMMANDS: dict[str, type[Config]] = {
    "dflash extract": ExtractConfig,
    "dflash train": TrainConfig,
    "dflash respond": RespondConfig,
    "dflash evaluate": EvaluateConfig,
}


def page() -> str:
    """Return the reference in Markdown: a section for each command's class and each class within it, once."""
    lines = [
        "# Configuration reference",
        "",
        "Made from the classes by `python -m flows.reference`; a test compares the two. Files are YAML.",
        "Names that are not listed are refused, and so are values of another type. Presets: `configs/`.",
    ]
    told: set[type[Config]] = set()
    for command, kind in COMMANDS.items():
        lines += ["", f"`{command} --config FILE` reads `{kind.__name__}`."]
        lines += _sections(kind, told)
    return "\n".join(lines) + "\n"


def _sections(kind: type[Config], told: set[type[Config]]) -> list[str]:
    if kind in told:
        return []
    told.add(kind)
    lines = ["", f"## {kind.__name__}", "", (kind.__doc__ or "").strip().splitlines()[0], ""]
    lines += ["| name | type | default | meaning |", "| --- | --- | --- | --- |"]
    inner: list[type[Config]] = []
    for name, field in kind.model_fields.items():
        inner += [found for found in _classes(field.annotation) if found not in inner]
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        lines.append(f"| `{name}` | {_type_name(field.annotation)} | {_default(field)} | {meaning} |")
    for part in inner:
        lines += _sections(part, told)
    return lines


def _classes(annotation: Any) -> list[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _classes(argument)]


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        names = [_type_name(a) for a in arguments if a is not NoneType]
        return " or ".join(names + (["null"] if NoneType in arguments else []))
    if origin is Literal:
        return ", ".join(f'"{value}"' for value in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"{_type_name(arguments[0])} to {_type_name(arguments[1])}"
    if origin is not None:
        return _type_name(arguments[0])
    name = getattr(annotation, "__name__", str(annotation))
    if _classes(annotation):
        return f"[{name}](#{name.lower()})"
    return {"str": "text", "Path": "path", "Any": "anything", "bool": "true or false"}.get(name, name)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Config):
        return "its defaults"
    if value is None:
        return "null"
    if isinstance(value, tuple | dict) and not value:
        return "empty"
    return f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page())
