"""What every store promises: keys, whole objects created once, reads by range, and the errors of all that."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from pydantic import Field

from dflash_core.configuration import Config, UserError


class StoreError(UserError):
    """The store cannot be used as asked (address, permission, space, network)."""


class ObjectExists(StoreError):
    """A create-only put found the key taken. Nothing was changed."""


class ObjectNotFound(StoreError):
    """There is no object of this key."""


class ObjectTruncated(StoreError):
    """An object ends before the bytes that were asked for."""


class StoreConfig(Config):
    """How to speak to an S3-compatible server."""

    part_bytes: int = Field(default=16 << 20, ge=5 << 20)
    """Size of one part of a multipart upload, and of one request of a parallel read."""
    parallel_parts: int = Field(default=4, ge=1)
    """Parts of one object that are sent, or read, at a time. Raise it for a store that is far away."""
    patience: float = Field(default=300.0, ge=0)
    """Seconds that a request is begun again while server or network fail it (5xx, SlowDown, cut) and nothing
    arrives."""
    connect_timeout: float = Field(default=10.0, gt=0)
    """Seconds."""
    read_timeout: float = Field(default=60.0, gt=0)
    """Seconds without a byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """What a store says of an object without reading it."""

    key: str
    size: int
    etag: str
    """Changes when the object is replaced; opaque."""
    modified: float
    """Seconds since 1970."""


class Store(Protocol):
    """Objects below one root. Keys are relative to it ("a/b/c"). Threads may share a store."""

    uri: str
    """Address of the root, without credentials: file:///abs/path or s3://bucket/prefix."""
    scratch_dir: Path | None
    """Where unpublished files are best written: the store's own file system, if it has one."""

    def put_file(self, key: str, source: Path | BinaryIO, *, overwrite: bool = False) -> None:
        """Publish a file (a path, or an open binary file with a descriptor) whole or not at all.

        Of several that create one key at once, one wins, as far as the server keeps that promise: AWS does;
        SeaweedFS 4.48 was seen to let several multipart uploads win, the last one's content staying. So give
        large objects names that carry their content's hash, and let a small object say which one counts.
        Raises ObjectExists when the key is taken and not `overwrite`; StoreError otherwise.
        """

    def put_bytes(self, key: str, data: bytes, *, overwrite: bool = False) -> None:
        """As `put_file`, for data in memory."""

    def replace(self, key: str, data: bytes, etag: str) -> None:
        """Replace an object that still has this etag. Raises ObjectExists (changed), ObjectNotFound."""

    def get(self, key: str) -> bytes:
        """Return the whole object. Raises ObjectNotFound."""

    def get_range(self, key: str, start: int, size: int) -> bytes:
        """Return exactly `size` bytes from `start`. Raises ObjectNotFound, ObjectTruncated."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill a writable buffer of bytes from `start`; long reads go in parallel. Errors as `get_range`."""

    def open(self, key: str) -> BinaryIO:
        """Return a seekable file for reading, each read a range read (what pyarrow wants)."""

    def head(self, key: str) -> ObjectInfo:
        """Describe an object. Raises ObjectNotFound."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Describe every object whose key begins with `prefix`, in no promised order."""

    def folders(self) -> Sequence[str]:
        """Name the folders directly below the root that hold any object."""

    def delete(self, key: str) -> None:
        """Remove an object; silent when there is none."""

    def remove_folders(self) -> None:
        """Remove those folders that this very store has made and that are empty; S3 has none."""

    def abort_unfinished(
        self, prefix: str = "", older_than: float = 0.0, dry_run: bool = False
    ) -> Sequence[str]:
        """Remove what killed writers left (multipart uploads, temporary files) and name the keys meant.

        `older_than` is in seconds: younger ones may belong to a living writer.
        """

    def child(self, folder: str) -> Store:
        """Return the store of a folder below this one (same connections)."""


def check_key(key: str) -> str:
    """Return `key` when it is a plain relative key. Raises StoreError."""
    if not key or key.startswith("/") or any(part in ("", ".", "..") for part in key.split("/")):
        raise StoreError(f"{key!r} is no key of an object: write a/b/c, relative, without '..'")
    return key


@contextmanager
def open_source(source: Path | BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield (descriptor, size) of what `put_file` was given."""
    if isinstance(source, Path):
        with source.open("rb") as file:
            yield file.fileno(), os.fstat(file.fileno()).st_size
    else:
        source.flush()
        yield source.fileno(), os.fstat(source.fileno()).st_size


class RangeFile(io.RawIOBase):
    """A read-only seekable file over range reads of one object."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key, self._size, self._position = store, key, store.head(key).size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        size = max(0, min(len(view), self._size - self._position))
        if size:
            self._store.read_into(self._key, self._position, view[:size])
        self._position += size
        return size
