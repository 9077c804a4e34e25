"""What a child process needs so that it imports our packages, whatever lies in the current folder."""

from __future__ import annotations

import os
from pathlib import Path


def own_modules() -> dict[str, str]:
    """Return variables under which a child imports the packages that this process did, not what lies in the
    current folder: `flows` is a usual name there.
    """
    root = Path(__file__).parents[1]
    checkout = (root / "pyproject.toml").is_file()  # installed packages are found without
    path = os.pathsep.join(filter(None, [str(root) if checkout else "", os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONSAFEPATH": "1", **({"PYTHONPATH": path} if path else {})}
