"""The pinned environments are whole: exact, and within what the package asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PINS = {"cpu.txt": ("cpu", "demo", "dev"), "gpu-torch2.11.txt": ("gpu",), "gpu-newest.txt": ("gpu",)}


def test_every_file_is_known() -> None:
    assert {path.name for path in (ROOT / "requirements").iterdir()} == set(PINS)


@pytest.mark.parametrize("name", PINS)
def test_pins_are_exact_and_fit_the_package(name: str) -> None:
    lines = [line for line in (ROOT / "requirements" / name).read_text().splitlines() if line[0] != "#"]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^ ;]+", line) for line in lines)
    pinned = {canonicalize_name(pin): version for pin, version in (line.split("==") for line in lines)}
    assert len(pinned) == len(lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in PINS[name]:
        wanted += project["optional-dependencies"][extra]
    for requirement in map(Requirement, wanted):
        version = pinned.get(canonicalize_name(requirement.name), "")
        assert version and requirement.specifier.contains(version), f"{requirement}: {version or 'no pin'}"
