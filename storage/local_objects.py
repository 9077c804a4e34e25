"""The store on a local (or mounted) folder: temporary file, fsync, then a link that fails on a taken name."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import unquote, urlsplit

from storage.object_store import (
    ObjectExists,
    ObjectInfo,
    ObjectNotFound,
    ObjectTruncated,
    StoreError,
    check_key,
    open_source,
)

_TEMPORARY = ".tmp-"
_LOCK = ".lock"
_COPY_BYTES = 4 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LocalStore:
    """Store whose keys are files below a folder. Readers see a whole object or none."""

    def __init__(self, root: Path) -> None:
        """Raises StoreError for a folder whose address would lead to another one."""
        self._root = root.expanduser().absolute()
        self.uri = f"file://{self._root}"
        if unquote(urlsplit(self.uri).path) != str(self._root):
            raise StoreError(f"{self._root}: the path of a store's folder may hold neither '#', '?' nor '%'")
        self.scratch_dir: Path | None = self._root
        self._made: set[Path] = set()
        """Folders that were not there before."""

    def child(self, folder: str) -> LocalStore:
        return LocalStore(self._root / check_key(folder))

    def path(self, key: str) -> Path:
        """Return the file that holds an object, to be read in place. Raises StoreError."""
        path = self._root / check_key(key)
        if path.name.startswith(_TEMPORARY) or path.name == _LOCK:
            raise StoreError(f"{key!r}: names of this form are kept for unfinished files")
        return path

    # Writing.

    def put_file(self, key: str, source: Path | BinaryIO, *, overwrite: bool = False) -> None:
        target = self.path(key)
        with self._translated("putting", key), open_source(source) as (descriptor, size):
            self._prepare(target, overwrite)
            if not overwrite and _link_anonymous(descriptor, target):
                return
            with self._temporary(target) as (temporary, file):
                for offset in range(0, size, _COPY_BYTES):
                    file.write(os.pread(descriptor, min(_COPY_BYTES, size - offset), offset))
                self._publish(temporary, file, target, overwrite)

    def put_bytes(self, key: str, data: bytes, *, overwrite: bool = False) -> None:
        target = self.path(key)
        with self._translated("putting", key):
            self._prepare(target, overwrite)
            with self._temporary(target) as (temporary, file):
                file.write(data)
                self._publish(temporary, file, target, overwrite)

    def replace(self, key: str, data: bytes, etag: str) -> None:
        target = self.path(key)
        with self._translated("replacing", key), self._locked(target.parent):
            if self.head(key).etag != etag:
                raise ObjectExists(f"replacing {self.uri}/{key}: the object has changed")
            with self._temporary(target) as (temporary, file):
                file.write(data)
                self._publish(temporary, file, target, overwrite=True)

    def _prepare(self, target: Path, overwrite: bool) -> None:
        above = (target.parent, *target.parent.parents)
        for folder in reversed([*takewhile(lambda folder: not folder.is_dir(), above)]):
            with suppress(FileExistsError):
                self._make(folder)
        if not overwrite and target.exists():  # saves the work; the link below is what decides
            raise FileExistsError(target)

    def _make(self, folder: Path) -> None:
        try:
            try:
                folder.mkdir()
            except FileNotFoundError:
                folder.mkdir()  # another process may have removed what is above, and made it again
        except (FileExistsError, NotADirectoryError):
            raise
        except OSError as error:
            above = folder.parent
            removed = isinstance(error, FileNotFoundError) and (above in self._made or not above.is_dir())
            if removed or error.errno in _FULL:
                raise
            raise StoreError(
                f"the folder {folder} cannot be made: {error.strerror}; name another folder for the store"
            ) from None
        self._made.add(folder)

    @contextmanager
    def _temporary(self, target: Path) -> Iterator[tuple[Path, BinaryIO]]:
        temporary = target.with_name(f"{_TEMPORARY}{os.getpid()}-{uuid.uuid4().hex[:8]}-{target.name}")
        try:
            with temporary.open("xb") as file:
                yield temporary, cast(BinaryIO, file)
        finally:
            temporary.unlink(missing_ok=True)

    def _publish(self, temporary: Path, file: BinaryIO, target: Path, overwrite: bool) -> None:
        file.flush()
        os.fsync(file.fileno())
        if overwrite:
            temporary.replace(target)
        else:
            os.link(temporary, target)
        _sync_folder(target.parent)

    @contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        """Keep other replacers of this folder out, in any process that shares the file system."""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / _LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    # Reading.

    def get(self, key: str) -> bytes:
        with self._translated("reading", key):
            return self.path(key).read_bytes()

    def get_range(self, key: str, start: int, size: int) -> bytes:
        buffer = bytearray(size)
        self.read_into(key, start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        with self._translated("reading", key), self.path(key).open("rb", buffering=0) as file:
            done = 0
            while done < len(buffer):
                got = os.preadv(file.fileno(), [buffer[done:]], start + done)
                if not got:
                    raise ObjectTruncated(
                        f"reading {self.uri}/{key}: the object is shorter than it should be"
                    )
                done += got

    def open(self, key: str) -> BinaryIO:
        with self._translated("opening", key):
            return self.path(key).open("rb")

    def head(self, key: str) -> ObjectInfo:
        with self._translated("looking at", key):
            return self._info(self.path(key))

    def _info(self, path: Path) -> ObjectInfo:
        stat = path.stat()
        key = path.relative_to(self._root).as_posix()
        etag = f"{stat.st_ino:x}-{stat.st_mtime_ns:x}-{stat.st_size:x}"
        return ObjectInfo(key=key, size=stat.st_size, etag=etag, modified=stat.st_mtime)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for path in self._files(prefix):
            if not path.name.startswith(_TEMPORARY) and path.name != _LOCK:
                try:
                    yield self._info(path)
                except FileNotFoundError:  # removed while we looked
                    continue

    def _files(self, prefix: str) -> Iterator[Path]:
        """Every file whose key begins with `prefix`; looks only into the folder that the prefix names."""
        folder = self._root / prefix.rpartition("/")[0]
        for path in folder.rglob("*"):
            if path.relative_to(self._root).as_posix().startswith(prefix) and path.is_file():
                yield path

    def folders(self) -> Sequence[str]:
        if not self._root.is_dir():
            return []
        return sorted(path.name for path in self._root.iterdir() if path.is_dir())

    # Removing.

    def delete(self, key: str) -> None:
        with self._translated("deleting", key):
            self.path(key).unlink(missing_ok=True)

    def remove_folders(self) -> None:
        for folder in sorted(self._made, key=lambda path: len(path.parts), reverse=True):
            with suppress(OSError):  # somebody else put something there, or removed it
                folder.rmdir()

    def abort_unfinished(
        self, prefix: str = "", older_than: float = 0.0, dry_run: bool = False
    ) -> Sequence[str]:
        keys = []
        for path in self._files(prefix.rpartition("/")[0] + "/" if "/" in prefix else ""):
            if path.name.startswith(_TEMPORARY):
                target = path.with_name(path.name.split("-", 3)[3]).relative_to(self._root).as_posix()
                if target.startswith(prefix) and time.time() - path.stat().st_mtime >= older_than:
                    keys.append(target)
                    if not dry_run:
                        path.unlink(missing_ok=True)
        return keys

    @contextmanager
    def _translated(self, doing: str, key: str) -> Iterator[None]:
        what = f"{doing} {self.uri}/{key}"
        try:
            yield
        except FileNotFoundError:
            raise ObjectNotFound(f"{what}: there is no such object") from None
        except FileExistsError:
            raise ObjectExists(f"{what}: the key is taken") from None
        except NotADirectoryError as error:
            files = [path for path in (self._root / key).parents if path.is_file()]
            why = f"{files[0]} is a file; name a folder for the store" if files else error.strerror
            raise StoreError(f"{what} failed: {why}") from None
        except OSError as error:
            full = error.errno in _FULL
            mend = "; free some space, then run the same command again" if full else ""
            raise StoreError(f"{what} failed: {error.strerror}{mend}") from None


def _link_anonymous(descriptor: int, target: Path) -> bool:
    """Publish a nameless file (O_TMPFILE) of the same file system without copying it. False: copy instead.

    Raises FileExistsError.
    """
    stat = os.fstat(descriptor)
    if stat.st_nlink or stat.st_dev != target.parent.stat().st_dev:
        return False
    with suppress(OSError):  # some mounted file systems know no modes
        os.fchmod(descriptor, 0o666 & ~_umask())
    os.fsync(descriptor)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        # A given folder descriptor makes Python call linkat(AT_SYMLINK_FOLLOW), which this needs.
        os.link(f"/proc/self/fd/{descriptor}", target.name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except FileExistsError:
        raise
    except OSError:
        return False
    finally:
        os.close(folder)
    return True


def _umask() -> int:
    """Read this process's umask where setting it, the only way that Python has, would race with threads."""
    status = Path("/proc/self/status").read_text()
    return next((int(line.split()[1], 8) for line in status.splitlines() if line.startswith("Umask:")), 0o022)


def _sync_folder(folder: Path) -> None:
    """Make a new name in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
