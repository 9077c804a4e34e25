"""One start of a run on one machine: fingerprint, restore, variables for the ranks, reports, publish.

A launcher does:

    with CompileSession.open(store, graphs, config, ranks=3, run_name=name) as session:
        run_ranks(..., environment=session.environment, on_message=session.on_message)
        result = session.summary()  # for the report, the checkpoints and Prefect's artifact
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from dflash_core.compile_fingerprint import Fingerprint, GraphSet, environment_here
from dflash_core.compile_watch import FIXED_VARIABLES, CompileReport, StartState, environment_for_ranks
from dflash_core.configuration import Config, UserError
from storage.compile_archive import Manifest, RejectedArtifact, mismatches, package, seal, unseal
from storage.compile_cache import (
    Current,
    Version,
    choose,
    nearest,
    place_of,
    publish,
    read_current,
    remove_folder,
    restore,
)
from storage.compile_retention import pin, prune
from storage.objects import Store, StoreError

log = logging.getLogger(__name__)

LOCK_WAIT_S = 900.0
"""How long to wait for another run on this machine that is restoring the same cache."""

LEFTOVER_AFTER_S = 24 * 3600.0
"""Unfinished folders that are older than this belong to nobody."""


class CompileCacheConfig(Config):
    """Which compile caches a run uses, and where they lie on this machine."""

    uri: str | None = None
    """Folder or bucket of the compile caches; by default `compile-cache` beside the data sets."""
    local_root: str = ""
    """Absolute folder of this machine, the same on all machines that share caches, not on a network mount.
    By default /var/tmp/dflash-compile-cache-<user id>."""
    version: str | None = None
    """Name of the version to restore, as `dflash cache list` prints it; by default the current one."""
    pin_as: str | None = None
    """Pin the version that this run uses under this name, so that it is never pruned."""
    signing_key_variable: str = "DFLASH_COMPILE_CACHE_KEY"
    """Environment variable with a secret. When set, manifests are signed with it, and no others are taken."""
    keep_versions: int = 2
    """Versions kept for one fingerprint when a new one is published."""
    keep_fingerprints: int = 4
    """Fingerprints kept for one graph set and kind of GPU."""

    @property
    def root(self) -> str:
        """The folder of this machine, the default resolved."""
        root = self.local_root or f"/var/tmp/dflash-compile-cache-{os.getuid()}"
        if not Path(root).is_absolute():
            raise UserError(f"local_root must be an absolute path, not {root!r}")
        return root

    @property
    def signing_key(self) -> bytes | None:
        """The secret, or None."""
        return os.environ.get(self.signing_key_variable, "").encode() or None


class CompileSession:
    """Holds one machine's cache folder for the ranks of a run. Made by `open`, closed by `close`."""

    def __init__(
        self, store: Store, fingerprint: Fingerprint, config: CompileCacheConfig, ranks: int, run_name: str
    ) -> None:
        self.fingerprint = fingerprint
        self.state: StartState = "cold"
        self.version: Version | None = None
        """The version that was restored, or published by this run."""
        self.notes: list[str] = []
        """What happened, in words."""
        self.restore_seconds = 0.0
        self.publish_seconds: float | None = None
        self.reports: dict[int, CompileReport] = {}
        self._store, self._config, self._ranks = store, config, ranks
        self._run_name = run_name
        self._current = Current(etag=None, manifest_name=None)
        self._lock: TextIO | None = None
        self._store_is_behind = False
        self._settled = False

    @classmethod
    def open(
        cls,
        store: Store,
        graphs: GraphSet,
        config: CompileCacheConfig,
        *,
        ranks: int = 1,
        run_name: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> CompileSession:
        """Find out what fits, restore it, and hold the folder until `close`.

        Nothing that is wrong with an artifact or with the store raises: the start is then cold, in an empty
        folder, and `notes` say why.

        Args:
            store: root of the compile caches.
            graphs: what the ranks will compile.
            ranks: how many of them report on this machine.
            variables: environment variables that the ranks get beside `environment`.

        Raises:
            UserError: the wished version does not exist or cannot be pinned, or the local root is not usable.
        """
        environment = environment_here({**FIXED_VARIABLES, **(variables or {})})
        fingerprint = Fingerprint(environment=environment, graphs=graphs, local_root=config.root)
        session = cls(store, fingerprint, config, ranks, run_name or f"{socket.gethostname()}-{os.getpid()}")
        session.prepare()
        return session

    @property
    def folder(self) -> Path:
        """The cache folder of this machine."""
        return self.fingerprint.cache_dir

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the ranks need before they import torch."""
        name = self.version.name if self.version else None
        return environment_for_ranks(self.fingerprint, self.state, name)

    def prepare(self) -> None:
        """Take the folder and fill it. `open` calls it."""
        began = time.monotonic()
        _private_folder(self.folder.parent)
        _sweep(self.folder.parent)
        alone = self._take_lock()
        sealed = self._sealed()
        try:
            self._fill(alone, sealed)
        except RejectedArtifact as error:
            self._start_cold(alone, f"rejected: {error}")
        except StoreError as error:
            if sealed is None:
                self._start_cold(alone, f"rejected: the store failed: {error}")
            else:
                self._use_local(
                    f"the store failed ({error}); the folder on this machine is whole and was used"
                )
        self.folder.mkdir(mode=0o700, exist_ok=True)
        assert self._lock is not None
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self.restore_seconds = time.monotonic() - began
        if self._config.pin_as and self.version is not None:
            pin(self._store, self.version, self._config.pin_as)
        for note in self.notes:
            log.info("compile cache %s: %s", self.fingerprint.id[:16], note)

    def _fill(self, alone: bool, sealed: Manifest | None) -> None:
        self._current = read_current(self._store, place_of(self.fingerprint))
        wish, key = self._config.version, self._config.signing_key
        version = choose(self._store, self.fingerprint, self._current, wish=wish, key=key)
        if version is None:
            self._store_is_behind = True
            if sealed is not None:
                self._use_local("the store has no version, but this machine has one")
            else:
                self._start_cold(alone, self._why_missing())
            return
        if sealed is None or sealed.archive_sha256 != version.manifest.archive_sha256:
            if not alone:
                self._start_cold(alone, "another run on this machine is using the folder")
                return
            restore(self._store, version, self.folder)
            self._seal(version.manifest)
            self.notes.append(f"restored version {version.name}")
        else:
            self.notes.append(f"version {version.name} was still on this machine, every digest checked")
        self.state, self.version = "restored", version

    def _why_missing(self) -> str:
        near = nearest(self._store, self.fingerprint)
        if near is None:
            return "the store has no version of anything yet"
        version, words = near
        return f"no version fits; the nearest, {version.name}, was made for: {'; '.join(words[:8])}"

    def _use_local(self, note: str) -> None:
        self.state = "local"
        self.notes.append(note)

    def _start_cold(self, alone: bool, note: str) -> None:
        self.state = "cold"
        self.notes.append(note)
        if alone:
            remove_folder(self.folder)

    # The folder on this machine.

    def _beside(self, suffix: str) -> Path:
        return self.folder.with_name(self.folder.name + suffix)

    def _take_lock(self) -> bool:
        """Lock the folder; True when no other run uses it, so that it may be replaced."""
        self._lock = self._beside(".lock").open("a")
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
        raise UserError(f"another process has been filling {self.folder} for {LOCK_WAIT_S:.0f} s; end it")

    def _sealed(self) -> Manifest | None:
        """Return the manifest of the folder as it lies, if every byte is still as this machine noted it."""
        try:
            manifest = unseal(self._beside(".json").read_bytes(), None)
        except (FileNotFoundError, RejectedArtifact):
            return None
        fits = manifest.fingerprint.id == self.fingerprint.id
        return manifest if fits and not mismatches(self.folder, manifest.members) else None

    def _seal(self, manifest: Manifest) -> None:
        written = self._beside(f".json.{os.getpid()}")
        written.write_bytes(seal(manifest, None))
        written.replace(self._beside(".json"))

    # The ranks' reports.

    def on_message(self, message: Mapping[str, Any]) -> None:
        """Take a rank's message; when the last rank has reported, publish what was compiled.

        Messages of other kinds are ignored.
        """
        if message.get("kind") != "compile_report":
            return
        report = CompileReport.model_validate(message)
        self.reports[report.rank] = report
        made_for = self.fingerprint.environment.device
        if report.device not in (made_for, "cpu"):
            self.notes.append(f"rank {report.rank} runs on {report.device}, the cache is that of {made_for}")
        for reason in report.reasons:
            log.info("rank %d compiled: %s", report.rank, reason)
        if len(self.reports) >= self._ranks and not self._settled:
            self._settled = True
            self.publish_if_new()

    def publish_if_new(self) -> Version | None:
        """Publish the folder if a rank compiled something that can be stored, or if the store has nothing.

        A store that fails does not end a training run: the failure is noted, and the folder stays sealed on
        this machine for the next start.
        """
        wrote = any(report.compiled and report.new_files for report in self.reports.values())
        if not wrote and not (self._store_is_behind and self.state == "local"):
            return None
        began = time.monotonic()
        try:
            published = self._publish()
        except StoreError as error:
            self.notes.append(f"not published: {error}")
            log.warning("compile cache not published: %s", error)
            return None
        self.publish_seconds = time.monotonic() - began
        if published is None:
            self.notes.append("not published: another run was first")
            return None
        self.version = published
        self.notes.append(f"published version {published.name}")
        return published

    def _publish(self) -> Version | None:
        config = self._config
        cold_seconds = self.first_step_seconds if self.state == "cold" else None
        if cold_seconds is None and self.version is not None:
            cold_seconds = self.version.manifest.cold_seconds
        with package(
            self.folder, self.fingerprint, created_by=self._run_name, cold_seconds=cold_seconds
        ) as packed:
            self._seal(packed.manifest)
            published = publish(self._store, packed, replacing=self._current, key=config.signing_key)
        if published is None:
            return None
        if config.pin_as:
            pin(self._store, published, config.pin_as)
        prune(
            self._store,
            within=published.folder.rsplit("/", 2)[0],
            versions=config.keep_versions,
            fingerprints=config.keep_fingerprints,
        )
        return published

    @property
    def first_step_seconds(self) -> float | None:
        """From the start of the slowest rank's process to the end of its first full step."""
        return max((report.seconds_since_process_start for report in self.reports.values()), default=None)

    def summary(self) -> dict[str, Any]:
        """Return what a report, a checkpoint and Prefect's artifact say about the cache, as JSON values."""
        manifest = self.version.manifest if self.version else None
        cold, first = manifest.cold_seconds if manifest else None, self.first_step_seconds
        saved = cold - first if cold is not None and first is not None and self.state != "cold" else None
        return {
            "state": self.state,
            "version": self.version.name if self.version else None,
            "fingerprint": self.fingerprint.id,
            "notes": list(self.notes),
            "nothing_compiled": bool(self.reports) and not any(r.compiled for r in self.reports.values()),
            "compiled": {str(rank): list(report.reasons) for rank, report in sorted(self.reports.items())},
            "first_step_seconds": first,
            "cold_first_step_seconds": cold,
            "seconds_saved": saved,
            "restore_seconds": round(self.restore_seconds, 3),
            "publish_seconds": self.publish_seconds,
            "archive_bytes": manifest.archive_bytes if manifest else None,
            "unpacked_bytes": manifest.unpacked_bytes if manifest else None,
        }

    def close(self) -> None:
        """Let the folder go. Its content stays for the next start."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> CompileSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _private_folder(folder: Path) -> None:
    """Make the root of all caches, or refuse one that others may write to: what lies there is executed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UserError(
            f"{folder} belongs to another user or can be written by others, and kernels there are executed: "
            "set local_root of the compile cache to a folder of your own (mode 0700)"
        )


def _sweep(root: Path) -> None:
    """Remove what killed processes left while they packed or unpacked."""
    for path in root.glob(".*"):
        if path.is_dir() and time.time() - path.stat().st_mtime > LEFTOVER_AFTER_S:
            shutil.rmtree(path, ignore_errors=True)
