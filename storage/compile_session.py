"""One start of a run on one machine: fingerprint, restore, variables for the ranks, reports, publish.

A launcher does:

    with CompileSession.open(store, graphs, config, ranks=3, run_name=name) as session:
        run_ranks(..., environment=session.environment, on_message=session.on_message)
        result = session.summary()  # for the report, the checkpoints and Prefect's artifact
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from pydantic import Field

from dflash_core.compile_fingerprint import Fingerprint, GraphSet, environment_here
from dflash_core.compile_watch import (
    FIXED_VARIABLES,
    CompileReport,
    StartState,
    cache_files,
    environment_for_ranks,
)
from dflash_core.configuration import Config, Text, UserError, expand_home
from storage.byte_code import byte_code_variables
from storage.compile_archive import Manifest, RejectedArtifact, package
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
from storage.compile_folder import CacheFolder, hold
from storage.compile_retention import pin, prune
from storage.objects import Store, StoreError, open_store

log = logging.getLogger(__name__)


class CompileCacheConfig(Config):
    """Which compile caches a run uses, and where they lie on this machine."""

    uri: Text | None = None
    """Folder or bucket of the compile caches; by default `compile-cache` beside the data sets."""
    local_root: str = ""
    """Absolute folder of this machine, the same on all machines that share caches, not on a network mount.
    By default /var/tmp/dflash-compile-cache-<user id>."""
    version: Text | None = None
    """Name of the version to restore, as `dflash cache list` prints it; by default the current one."""
    pin_as: Text | None = None
    """Pin the version that this run uses under this name, so that it is never pruned."""
    signing_key_variable: str = "DFLASH_COMPILE_CACHE_KEY"
    """Environment variable with a secret. When set, manifests are signed with it, and no others are taken."""
    keep_versions: int = Field(default=2, ge=1)
    """Versions kept for one fingerprint when a new one is published."""
    keep_fingerprints: int = Field(default=4, ge=1)
    """Fingerprints kept for one graph set and kind of GPU."""

    @property
    def root(self) -> str:
        """The folder of this machine, the default resolved."""
        root = expand_home(self.local_root) or f"/var/tmp/dflash-compile-cache-{os.getuid()}"
        if not Path(root).is_absolute():
            raise UserError(f"local_root must be an absolute path, not {root!r}")
        return root

    @property
    def signing_key(self) -> bytes | None:
        """The secret, or None."""
        return os.environ.get(self.signing_key_variable, "").encode() or None


def open_compile_store(cache: CompileCacheConfig, dataset_uri: str | None = None) -> Store:
    """Open the store of compile caches: `cache.uri`, or `compile-cache` beside the data set.

    Raises UserError when `cache.uri` is missing and there is no data set, or nothing lies beside it.
    """
    if cache.uri is not None:
        return open_store(cache.uri)
    wanted = "set cache.uri to a folder or s3://bucket/prefix"
    if dataset_uri is None:
        raise UserError(f"say where compile caches lie: {wanted}")
    parent = dataset_uri.rpartition("/")[0]
    if parent.endswith("/"):  # "s3:/" of a bucket, "file://" of /
        raise UserError(
            f"compile caches cannot lie beside {dataset_uri}, which has no folder above it: {wanted}"
        )
    return open_store(parent).child("compile-cache")


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
        self.settled = False
        """Whether all ranks have reported, so that what they compiled was published."""
        self._store, self._config, self._ranks = store, config, ranks
        self._run_name = run_name
        self._current = Current(etag=None, manifest_name=None)
        self._folder = CacheFolder(fingerprint)
        self._byte_code: dict[str, str] = {}
        self._byte_code_lock: TextIO | None = None
        self._store_is_behind = False
        self._reporting = threading.Lock()

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
            run_name: who made it, for people; by default this process.
            variables: environment variables that the ranks get beside `environment`.

        Raises:
            UserError: the wished version does not exist or cannot be pinned, or the local root is not usable.
        """
        byte_code = byte_code_variables(config.root)
        environment = environment_here({**FIXED_VARIABLES, **byte_code, **(variables or {})})
        fingerprint = Fingerprint(environment=environment, graphs=graphs, local_root=config.root)
        session = cls(store, fingerprint, config, ranks, run_name or f"{socket.gethostname()}-{os.getpid()}")
        session._byte_code = byte_code
        try:
            if byte_code:
                session._byte_code_lock = hold(Path(byte_code["PYTHONPYCACHEPREFIX"]))
            session.prepare()
        except BaseException:
            session.close()
            raise
        return session

    @property
    def folder(self) -> Path:
        """The cache folder of this machine."""
        return self.fingerprint.cache_dir

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the ranks need before they import torch."""
        name = self.version.name if self.version else None
        ranks = environment_for_ranks(self.fingerprint, self.state, name, self._folder.version_file)
        return {**ranks, **self._byte_code}

    def prepare(self) -> None:
        """Take the folder and fill it. `open` calls it."""
        began = time.monotonic()
        alone = self._folder.take()
        sealed = self._folder.sealed(self._config.signing_key)
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
        self._folder.share()
        self.restore_seconds = time.monotonic() - began
        self._pin()
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
        if sealed is not None and sealed.archive_sha256 == version.manifest.archive_sha256:
            self.notes.append(f"version {version.name} was still on this machine, every digest checked")
        elif not alone:
            self._start_cold(alone, "another run on this machine is using the folder")
            return
        else:
            try:
                restore(self._store, version, self.folder)
                self._folder.seal(version.manifest, key)
            except OSError as error:
                raise RejectedArtifact(f"it cannot be kept on this machine: {error}") from error
            self.notes.append(f"restored version {version.name}")
        self.state, self.version = "restored", version

    def _pin(self, forgiven: type[UserError] = StoreError) -> None:
        if self._config.pin_as and self.version is not None:
            try:
                pin(self._store, self.version, self._config.pin_as)
            except forgiven as error:
                self._warn(f"not pinned: {error}")

    def _why_missing(self) -> str:
        try:
            near = nearest(self._store, self.fingerprint)
        except UserError as error:
            return f"no version fits, and what there is cannot be listed: {error}"
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

    # The ranks' reports.

    def on_message(self, message: Mapping[str, Any]) -> None:
        """Take a rank's message; when the last rank has reported, publish what was compiled.

        Messages of other kinds are ignored. Safe from any thread.
        """
        if message.get("kind") == "compile_report":
            with self._reporting:
                self._take(CompileReport.model_validate(message))

    def _take(self, report: CompileReport) -> None:
        if (first := self.reports.get(report.rank)) is not None:
            # It has met something new later on; how long its start took, its first report says.
            began = {"seconds_since_process_start": first.seconds_since_process_start, "parts": first.parts}
            report = report.model_copy(update=began)
        self.reports[report.rank] = report
        made_for = self.fingerprint.environment.device
        if report.device not in (made_for, "cpu"):
            self.notes.append(f"rank {report.rank} runs on {report.device}, the cache is that of {made_for}")
        for reason in report.reasons:
            log.info("rank %d compiled: %s", report.rank, reason)
        if len(self.reports) >= self._ranks and not self.settled:
            self.settled = True
            self.publish_if_new()

    def publish_rest(self) -> None:
        """Publish once more what ranks have compiled since their first reports, unless another run did so."""
        if not self.settled or self.version is None:
            return
        known = {member.name for member in self.version.manifest.members}
        if not set(cache_files(self.folder)) - known:
            return
        try:
            current = read_current(self._store, place_of(self.fingerprint))
        except StoreError as error:
            self.notes.append(f"what was compiled later is not published: {error}")
            return
        if current.manifest_name == self.version.manifest_name:
            self._current = current
            self.publish_if_new()

    def publish_if_new(self) -> Version | None:
        """Publish the folder if a rank compiled something that can be stored, or if the store has nothing.

        A failure, of the store or of the disk, does not end a training run: it is noted, and the folder stays
        sealed on this machine for the next start. Nor does one in pinning and pruning afterwards.
        """
        wrote = any(report.compiled and report.new_files for report in self.reports.values())
        if not wrote and not (self._store_is_behind and self.state == "local"):
            return None
        began = time.monotonic()
        try:
            published = self._publish()
        except (UserError, OSError) as error:
            self._warn(f"not published: {error}")
            return None
        self.publish_seconds = time.monotonic() - began
        if published is None:
            self.notes.append("not published: another run was first")
            return None
        self.version = published
        self.notes.append(f"published version {published.name}")
        log.info("compile cache %s: %s", self.fingerprint.id[:16], self.notes[-1])
        try:
            self._folder.name_version(published.name)
        except OSError as error:
            self._warn(f"checkpoints will not name it: {error}")
        self._pin(forgiven=UserError)
        self._prune(published)
        return published

    def _publish(self) -> Version | None:
        cold_seconds = self.first_step_seconds if self.state == "cold" else None
        if cold_seconds is None and self.version is not None:
            cold_seconds = self.version.manifest.cold_seconds
        with package(
            self.folder, self.fingerprint, created_by=self._run_name, cold_seconds=cold_seconds
        ) as packed:
            key = self._config.signing_key
            self._folder.seal(packed.manifest, key)
            return publish(self._store, packed, replacing=self._current, key=key)

    def _prune(self, published: Version) -> None:
        family = published.folder.rsplit("/", 2)[0]
        config = self._config
        try:
            prune(
                self._store,
                within=family,
                versions=config.keep_versions,
                fingerprints=config.keep_fingerprints,
            )
        except (UserError, OSError) as error:
            self._warn(f"not pruned: {error}")

    def _warn(self, note: str) -> None:
        self.notes.append(note)
        log.warning("compile cache %s: %s", self.fingerprint.id[:16], note)

    @property
    def first_step_seconds(self) -> float | None:
        """From the start of the slowest rank's process to its report: its first full step, or first shard."""
        return self._slowest.seconds_since_process_start if self._slowest else None

    @property
    def _slowest(self) -> CompileReport | None:
        reports = self.reports.values()
        return max(reports, key=lambda report: report.seconds_since_process_start, default=None)

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
            "slowest_start": self._slowest.parts if self._slowest else None,
            "nothing_compiled": bool(self.reports) and not any(r.compiled for r in self.reports.values()),
            "compiling_threads": sorted({t for r in self.reports.values() for t in r.event_threads}),
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
        self._folder.release()
        if self._byte_code_lock is not None:
            self._byte_code_lock.close()
            self._byte_code_lock = None

    def __enter__(self) -> CompileSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
