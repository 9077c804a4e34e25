"""YAML in and out, taken at its word: what PyYAML would guess or pass over is refused, by its line."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import yaml

from dflash_core.configuration import UserError

_NAMES = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"}
_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


def read_as_json(path: Path) -> str:
    """Return what a YAML file or pipe holds as JSON. Raises UserError."""
    try:
        return json.dumps(yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader))
    except OSError as error:
        raise UserError(f"no configuration at {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}): save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no YAML: {error}") from error
    except UserError as error:
        raise UserError(f"{path}, {error}") from error
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise UserError(f"{path} holds a value that no field takes: {error}") from error


def dump_yaml(values: dict[str, Any]) -> str:
    """Return values as YAML, in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


class _Loader(yaml.SafeLoader):
    """YAML that has a JSON form. Names that are doubled are refused, where the last would win in silence."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag not in _NAMES:
                raise UserError(f"line {line}: a name must be text; put it in quotes")
            if key.value in lines:
                before = lines[key.value]
                raise UserError(
                    f"line {line}: {key.value} stands in line {before} already; keep one of the two"
                )
            lines[key.value] = line
        return node

    def construct_plain_int(self, node: yaml.ScalarNode) -> int:
        if re.match(r"[-+]?0[0-9_]|[^x]*:", node.value):
            line = node.start_mark.line + 1
            raise UserError(f"line {line}: YAML reads {node.value} to another base; write it plainly")
        return self.construct_yaml_int(node)

    def construct_finite(self, node: yaml.ScalarNode) -> float:
        value = self.construct_yaml_float(node)
        if not math.isfinite(value):
            raise UserError(f"line {node.start_mark.line + 1}: {node.value} is no finite number")
        return value


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back as it was."""


_Loader.add_constructor(_INT, _Loader.construct_plain_int)
_Loader.add_constructor(_FLOAT, _Loader.construct_finite)
# Dates stay the text that they are.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != _TIMESTAMP]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _side in (_Loader, _Dumper):
    # PyYAML takes 1e-3 for text, as YAML did before 1.2.
    _side.add_implicit_resolver(
        _FLOAT, re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+.0123456789")
    )
