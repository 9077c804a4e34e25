"""Byte code for the processes of a run, where their environment keeps none.

Images and installers often leave Python's byte code out, and their folders cannot be written to: then every
process compiles torch's sources anew, which takes seconds of each start.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

from storage.compile_folder import BYTE_CODE, private_folder

OURS = ("dflash_core", "storage", "flows")
"""Packages whose version stays the same while their sources change."""


def kept_beside_sources(package: str = "torch") -> bool:
    """Whether `package` lies there compiled or will once it is imported, or the user has chosen a folder."""
    source = getattr(importlib.util.find_spec(package), "origin", None)
    if source is None or "PYTHONPYCACHEPREFIX" in os.environ:
        return True
    file = Path(importlib.util.cache_from_source(source))
    return file.exists() or (not sys.dont_write_bytecode and os.access(Path(source).parent, os.W_OK))


def byte_code_variables(root: str, package: str = "torch") -> dict[str, str]:
    """Return variables under which Python keeps byte code below `root`; none where it does so already.

    Python takes a file of byte code for that of a source of the same path, size and time, so each set of
    installed packages, and each state of our own sources, has its own folder.

    Raises:
        UserError: others may write below `root`.
    """
    if kept_beside_sources(package):
        return {}
    folder = Path(root) / BYTE_CODE
    private_folder(folder.parent)
    private_folder(folder)
    folder.chmod(0o700)  # what Python makes in it may be open to the group
    return {
        "PYTHONPYCACHEPREFIX": str(folder / _sources()),
        "PYTHONDONTWRITEBYTECODE": "",
    }


def _sources() -> str:
    """16 hex digits of which packages are installed, and of every byte of our own: some 10 ms."""
    found = (f"{part.metadata['Name']} {part.version}" for part in importlib.metadata.distributions())
    digest = hashlib.sha256("\n".join([sys.prefix, *sorted(found)]).encode())
    above = Path(__file__).parents[1]
    for path in sorted(path for package in OURS for path in (above / package).rglob("*.py")):
        digest.update(f"\n{path.relative_to(above)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
