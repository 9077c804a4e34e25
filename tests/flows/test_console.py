"""Progress where nobody looks at a terminal."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from flows.console import bars, tell
tell("before", 0.5)
with bars() as console:
    console.print("begin")
    for step in range(101):
        tell("training", step / 100)
    tell("training", 0.2)
    tell("reading", 1.5)
"""


def test_a_log_gets_a_line_now_and_then() -> None:
    said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    lines = [line for line in said.splitlines() if line.strip()]
    assert lines == ["begin", *(f"training: {10 * i}%" for i in range(1, 11)), "reading: 100%"]
