"""A compile cache as bytes: one folder <-> one tar.zst and a manifest that lists every member. No store here.

What is in such an archive is executed. So nothing is unpickled or written anywhere before the whole archive
has the digest that its manifest states, and then only regular files that the manifest lists are written, into
a fresh folder that takes its final name in one rename.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, Literal

import zstandard
from pydantic import ValidationError

from dflash_core.compile_fingerprint import Fingerprint
from dflash_core.compile_watch import cache_files
from dflash_core.configuration import Config, UserError

CHUNK = 1 << 20
MAX_MANIFEST_BYTES = 64 << 20
ZSTD_LEVEL = 3
SIGNED_TEXT = b"dflash compile cache manifest 1\n"


class RejectedArtifact(UserError):
    """A compile artifact was not used, and nothing of it was left behind. The message says why."""


class Member(Config):
    """One regular file of an archive."""

    name: str
    """Relative, with "/" between its parts."""
    size: int
    sha256: str
    executable: bool = False


class Manifest(Config):
    """What an archive is, what it fits, and each file in it."""

    format: Literal[1] = 1
    fingerprint: Fingerprint
    archive_sha256: str
    archive_bytes: int
    members: tuple[Member, ...]
    created: str
    """ISO 8601, UTC."""
    created_by: str
    """Host and run, for people."""
    cold_seconds: float | None = None
    """Process start to the end of the first step of the start that compiled it, if that was measured."""

    @property
    def archive_name(self) -> str:
        return f"cache-{self.archive_sha256}.tar.zst"

    @property
    def unpacked_bytes(self) -> int:
        return sum(member.size for member in self.members)


def pack(folder: Path, target: Path) -> tuple[Member, ...]:
    """Write a folder's files as tar.zst to `target` and list them.

    Locks and temporary files are left out, and so is a file that vanishes meanwhile. Equal folders give equal
    archives. Raises UserError when there is nothing to pack, or something other than a regular file.
    """
    members: list[Member] = []
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, threads=-1)
    with (
        target.open("wb") as file,
        compressor.stream_writer(file, closefd=False) as stream,
        tarfile.open(fileobj=stream, mode="w|") as tar,
    ):
        for name in cache_files(folder):
            try:
                data, executable = _read_regular(folder / name)
            except FileNotFoundError:
                continue
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755 if executable else 0o644
            tar.addfile(info, io.BytesIO(data))
            digest = hashlib.sha256(data).hexdigest()
            members.append(Member(name=name, size=len(data), sha256=digest, executable=executable))
    if not members:
        raise UserError(f"{folder} holds no compiled files to pack")
    return tuple(members)


@dataclass(frozen=True, kw_only=True)
class Package:
    """An archive on this machine, and its manifest."""

    archive: Path
    manifest: Manifest


@contextmanager
def package(
    folder: Path, fingerprint: Fingerprint, *, created_by: str, cold_seconds: float | None = None
) -> Iterator[Package]:
    """Pack a folder into an archive beside it, which is gone after the `with` block. Errors as in `pack`."""
    with tempfile.TemporaryDirectory(prefix=".package-", dir=folder.parent) as scratch:
        archive = Path(scratch) / "archive"
        members = pack(folder, archive)
        manifest = Manifest(
            fingerprint=fingerprint,
            archive_sha256=file_sha256(archive),
            archive_bytes=archive.stat().st_size,
            members=members,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            created_by=created_by,
            cold_seconds=cold_seconds,
        )
        yield Package(archive=archive, manifest=manifest)


def _read_regular(path: Path) -> tuple[bytes, bool]:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise UserError(f"{path} is not a regular file; a compile cache holds nothing else")
    with path.open("rb") as file:
        return file.read(), bool(os.fstat(file.fileno()).st_mode & 0o100)


def mismatches(folder: Path, members: tuple[Member, ...]) -> list[str]:
    """Say how a folder differs from a list of members, reading every byte; empty when it does not."""
    listed = {member.name: member for member in members}
    present = set(cache_files(folder)) if folder.is_dir() else set()
    found = [f"{name} is missing" for name in listed if name not in present]
    found += [f"{name} is not listed" for name in sorted(present - set(listed))]
    for name in sorted(present & set(listed)):
        path = folder / name
        if path.is_symlink() or not path.is_file():
            found.append(f"{name} is not a regular file")
        elif path.stat().st_size != listed[name].size or file_sha256(path) != listed[name].sha256:
            found.append(f"{name} has other content")
    return found


def file_sha256(path: Path) -> str:
    """Return the digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(manifest: Manifest, key: bytes | None) -> bytes:
    """Write a manifest as JSON, signed (HMAC-SHA256) when there is a key."""
    body = manifest.model_dump(mode="json")
    return json.dumps({"manifest": body, "signature": _signature(body, key) if key else None}).encode()


def unseal(data: bytes, key: bytes | None) -> Manifest:
    """Read and check a manifest. With a key, only one that was signed with it is taken.

    Raises RejectedArtifact.
    """
    try:
        envelope = json.loads(data)
        body, signature = envelope["manifest"], envelope["signature"]
        if key and not signature:
            raise RejectedArtifact("the manifest is not signed, but a signing key is configured")
        if key and not hmac.compare_digest(str(signature), _signature(body, key)):
            raise RejectedArtifact("the manifest's signature does not match the signing key")
        manifest = Manifest.model_validate(body)
    except (ValidationError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, RejectedArtifact):
            raise
        raise RejectedArtifact(f"the manifest cannot be read: {str(error).splitlines()[0]}") from error
    _check_names(manifest)
    return manifest


def _signature(body: object, key: bytes) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, SIGNED_TEXT + text.encode(), hashlib.sha256).hexdigest()


def _check_names(manifest: Manifest) -> None:
    seen: set[str] = set()
    for member in manifest.members:
        pure = PurePosixPath(member.name)
        plain = pure.parts and not pure.is_absolute() and pure.as_posix() == member.name
        if not plain or ".." in pure.parts or {"\\", "\0"} & set(member.name):
            raise RejectedArtifact(f"the manifest lists a file outside the folder: {member.name!r}")
        if member.name in seen or member.size < 0:
            raise RejectedArtifact(f"the manifest lists {member.name!r} twice, or with an impossible size")
        seen.add(member.name)
    if not all(char in "0123456789abcdef" for char in manifest.archive_sha256):
        raise RejectedArtifact("the manifest's archive digest is not hexadecimal")


def unpack(archive: Path, manifest: Manifest, folder: Path) -> None:
    """Make `folder` hold exactly the manifest's members. It must be missing or empty.

    The archive's size and digest are checked before it is opened. Raises RejectedArtifact, after which
    `folder` is as it was.
    """
    if archive.stat().st_size != manifest.archive_bytes:
        raise RejectedArtifact(
            f"the archive has {archive.stat().st_size} bytes, its manifest says {manifest.archive_bytes}"
        )
    if file_sha256(archive) != manifest.archive_sha256:
        raise RejectedArtifact("the archive's sha256 is not the one in its manifest")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".unpack-{folder.name}-", dir=folder.parent))
    try:
        with archive.open("rb") as file:
            _extract(file, manifest, fresh)
        fresh.rename(folder)
    except (tarfile.TarError, zstandard.ZstdError, EOFError) as error:
        raise RejectedArtifact(f"the archive cannot be unpacked: {error}") from error
    except OSError as error:
        raise RejectedArtifact(f"the archive cannot be unpacked into {folder.parent}: {error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _extract(archive: BinaryIO, manifest: Manifest, fresh: Path) -> None:
    awaited = {member.name: member for member in manifest.members}
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    with decompressor.stream_reader(archive) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        for entry in tar:
            member = awaited.pop(entry.name, None)
            if member is None:
                raise RejectedArtifact(f"the archive holds {entry.name!r}, which the manifest does not list")
            if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or entry.size != member.size:
                raise RejectedArtifact(
                    f"the archive's {entry.name!r} is not the regular file of the manifest"
                )
            content = tar.extractfile(entry)
            assert content is not None
            _write_checked(content, member, fresh / member.name)
    if awaited:
        raise RejectedArtifact(f"the archive lacks {len(awaited)} listed file(s): {sorted(awaited)[0]}")


def _write_checked(content: IO[bytes], member: Member, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o755 if member.executable else 0o644
    digest = hashlib.sha256()
    # The folder is fresh and nothing but regular files is ever written to it, so no link can lead outside.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
        while chunk := content.read(CHUNK):
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != member.sha256:
        raise RejectedArtifact(f"{member.name!r} in the archive has other content than the manifest says")
