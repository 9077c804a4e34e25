"""Objects by key on a local folder or an S3 bucket: created once, atomically, and read by range. The only boto3 user."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from dflash_core.configuration import Config, UserError


class StoreError(UserError):
    """The store cannot be used as asked (address, permission, space, network): the message says how to mend it."""


class ObjectExists(StoreError):
    """A create-only put found the key taken. Nothing was changed."""


class ObjectNotFound(StoreError):
    """There is no object of this key."""


class StoreConfig(Config):
    """How to speak to a store."""

    part_bytes: int = 16 << 20
    """Size of one part of a multipart upload, and of one request of a parallel read."""
    threads: int = 4
    """Parts of one object in flight at a time."""
    attempts: int = 8
    """Tries of a request that the server or the network failed (5xx, SlowDown, cut connection)."""
    connect_timeout: float = 10.0
    """Seconds."""
    read_timeout: float = 60.0
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
    """Objects below one root. Keys are relative to it, with "/" between their parts. Threads may share a store."""

    uri: str
    """Address of the root, without credentials: file:///abs/path or s3://bucket/prefix."""

    def put_file(self, key: str, source: Path | BinaryIO, *, overwrite: bool = False) -> None:
        """Publish a file (a path, or an open binary file with a descriptor) whole or not at all.

        Raises ObjectExists when the key is taken and not `overwrite`; StoreError otherwise.
        """

    def put_bytes(self, key: str, data: bytes, *, overwrite: bool = False) -> None:
        """As `put_file`, for data in memory."""

    def replace(self, key: str, data: bytes, etag: str) -> None:
        """Replace an object if it still has this etag. Raises ObjectExists when somebody changed it, ObjectNotFound."""

    def get(self, key: str) -> bytes:
        """Return the whole object. Raises ObjectNotFound."""

    def get_range(self, key: str, start: int, size: int) -> bytes:
        """Return exactly `size` bytes from `start`. Raises ObjectNotFound; StoreError when the object is shorter."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill a writable byte buffer from `start`; long reads go in parallel. Errors as in `get_range`."""

    def open(self, key: str) -> BinaryIO:
        """Return a seekable file for reading, each read a range read (what pyarrow wants)."""

    def head(self, key: str) -> ObjectInfo:
        """Describe an object. Raises ObjectNotFound."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Describe every object whose key begins with `prefix`, in no promised order."""

    def delete(self, key: str) -> None:
        """Remove an object; silent when there is none."""

    def abort_unfinished(self, prefix: str = "", older_than: float = 0.0, dry_run: bool = False) -> list[str]:
        """Remove what killed writers left (multipart uploads, temporary files) and name the keys meant.

        `older_than` is in seconds: younger ones may belong to a living writer.
        """

    def child(self, folder: str) -> Store:
        """Return the store of a folder below this one (same connections)."""


def open_store(uri: str | Path, config: StoreConfig | None = None) -> Store:
    """Open file:///abs/path, a plain path, or s3://bucket/prefix.

    Keys, endpoint and region of S3 come from the usual AWS_* variables and files.
    Raises StoreError for another scheme or an address that carries credentials.
    """
    raise NotImplementedError
