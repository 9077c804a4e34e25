"""Lets `prefect deployment run extract-hidden-states` mean extract-hidden-states/extract-hidden-states.

Prefect names a deployment FLOW/DEPLOYMENT and refuses a name without a slash. Ours carry one name in both
places. Prefect calls this hook (its entry point group `prefect.plugins`) when it is imported, before its
command line is read, wherever the setting `plugins.enabled` is on: `prefect.toml` does that for this folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from prefect.plugins import register_hook

PREFECT_PLUGIN_API_REQUIRES = ">=0.1,<1"

NAMES = frozenset({"extract-hidden-states", "build-compile-cache", "train-drafter"})
COMMANDS = frozenset({"run", "inspect"})
FREE_TEXT = frozenset({"-t", "--tag", "--flow-run-name"})
"""Options whose value may look like one of our names."""


def full_names(argv: list[str]) -> list[str]:
    """Return the command line with our bare deployment names doubled; anything else stays as it is."""
    if Path(argv[0]).name not in {"prefect", "prefect.exe", "__main__.py"} or "deployment" not in argv:
        return argv
    at = argv.index("deployment") + 1
    if at >= len(argv) or argv[at] not in COMMANDS:
        return argv
    for i in range(at + 1, len(argv)):
        if argv[i] in NAMES and argv[i - 1] not in FREE_TEXT:
            return [*argv[:i], f"{argv[i]}/{argv[i]}", *argv[i + 1 :]]
    return argv


@register_hook
def setup_environment(*, ctx: Any) -> None:
    """Rewrite the command line of this process; `ctx` is Prefect's and not used."""
    sys.argv[:] = full_names(sys.argv)
