"""What the README shows is what the rest of the repository has."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.S)


def test_the_reader_is_the_one_that_a_test_runs() -> None:
    (shown,) = python_blocks(README)
    assert shown in python_blocks((ROOT / "docs/shard-format.md").read_text())


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    local = [link for link in links if not link.startswith("http")]
    assert len(local) > 10
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"^make (\w+)$", README, re.M))
    assert named == {"demo", "test"} and named <= targets
