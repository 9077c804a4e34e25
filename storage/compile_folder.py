"""The folder of a compile cache on this machine: who may use it, and whether it is what was put there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import TextIO

from dflash_core.compile_fingerprint import Fingerprint
from dflash_core.configuration import UserError
from storage.compile_archive import Manifest, RejectedArtifact, mismatches, seal, unseal
from storage.compile_cache import remove_folder

BYTE_CODE = "byte-code"
"""Folder of Python's byte code beside the cache folders (`storage/byte_code.py`)."""

LOCK_WAIT_S = 900.0
"""How long to wait for another run on this machine that is filling the same folder."""
LEFTOVER_AFTER_S = 24 * 3600.0
"""Unfinished folders that are older than this belong to nobody."""
UNUSED_AFTER_S = 30 * 24 * 3600.0
"""A folder of kernels or byte code that no run has used for so long is removed: it can be made again."""
FOLDER_NAME = re.compile("[0-9a-f]{16}")
UNFINISHED = (".package-", ".download-", ".unpack-", ".old-")
"""How the names of folders begin that packing, restoring and removing make beside a cache folder."""


class CacheFolder:
    """One fingerprint's folder. Runs share it; only a run that is alone may replace what is in it."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.path = fingerprint.cache_dir
        self.version_file = self._beside(f".version-{secrets.token_hex(4)}")
        """Where this run's ranks read which version it has published; see `name_version`."""
        self._fingerprint = fingerprint
        self._lock: TextIO | None = None

    def take(self) -> bool:
        """Lock the folder; True when no other run uses it, so that it may be replaced.

        Raises UserError when others may write to the folder above it, or another process fills it for ever.
        """
        private_folder(self.path.parent)
        self._lock = _open_lock(self.path)
        _sweep(self.path.parent)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        deadline = time.monotonic() + LOCK_WAIT_S
        while time.monotonic() < deadline:
            # Shared while runs use the folder, exclusive only while one fills it.
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
            time.sleep(0.5)
        raise UserError(f"another process has been filling {self.path} for {LOCK_WAIT_S:.0f} s; end it")

    def share(self) -> None:
        """Make the folder if it is missing, and let other runs join."""
        assert self._lock is not None, "take it first"
        self.path.mkdir(mode=0o700, exist_ok=True)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def release(self) -> None:
        """Use the folder no longer."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self.version_file.unlink()
            os.utime(self._lock.fileno())
            self._lock.close()
            self._lock = None

    def seal(self, manifest: Manifest, key: bytes | None) -> None:
        """Note what the folder holds, beside it, signed when there is a key."""
        _write_whole(self._beside(".json"), seal(manifest, key))

    def name_version(self, name: str) -> None:
        """Tell this run's ranks what the folder was published as."""
        _write_whole(self.version_file, name.encode())

    def sealed(self, key: bytes | None) -> Manifest | None:
        """Return what was noted, if every byte of the folder is still like that; with a key, if it signed."""
        try:
            manifest = unseal(self._beside(".json").read_bytes(), key)
        except (FileNotFoundError, RejectedArtifact):
            return None
        fits = manifest.fingerprint.id == self._fingerprint.id
        return manifest if fits and not mismatches(self.path, manifest.members) else None

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)


def _write_whole(path: Path, data: bytes) -> None:
    written = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        written.write_bytes(data)
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


def private_folder(folder: Path) -> None:
    """Make the root of all caches, or refuse one that others may write to: what lies there is executed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UserError(
            f"{folder} belongs to another user or can be written by others, and what lies there is executed: "
            "set local_root of the compile cache to a folder of your own (mode 0700)"
        )


def hold(folder: Path) -> TextIO:
    """Keep a folder from being removed as unused, until what is returned is closed."""
    lock = _open_lock(folder)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def _open_lock(folder: Path) -> TextIO:
    """Open the file beside a folder that is locked while runs use it; its time says when one last did."""
    lock = _lock_path(folder).open("a")
    os.utime(lock.fileno())
    return lock


def _lock_path(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")


def _sweep(root: Path) -> None:
    """Remove what killed processes left while they packed or unpacked, and what no run has used for long, but
    nothing that others put there.
    """
    for path in [*root.iterdir(), *(root / BYTE_CODE).glob("*")]:
        with contextlib.suppress(OSError):  # of a folder that is in use, gone meanwhile, or not ours
            if not path.is_dir():
                continue
            if FOLDER_NAME.fullmatch(path.name):
                _remove_unused(path)
            elif path.name.startswith(UNFINISHED) and time.time() - path.stat().st_mtime > LEFTOVER_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)


def _remove_unused(folder: Path) -> None:
    """Remove a folder and what is noted beside it, unless a run did use it not long ago. Raises OSError when
    one does now.

    The lock itself stays: who has opened it already would otherwise hold one that nobody else sees.
    """
    with _lock_path(folder).open() as lock:  # without one it is none of ours

        def unused() -> bool:
            return time.time() - os.fstat(lock.fileno()).st_mtime > UNUSED_AFTER_S

        if unused():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if unused():  # a run may have come and gone
                remove_folder(folder)
                folder.with_name(folder.name + ".json").unlink(missing_ok=True)
                for left in folder.parent.glob(f"{folder.name}.version-*"):  # by killed launchers
                    left.unlink(missing_ok=True)
