"""Objects on S3: every request waited for, every write settled, ranges received in place."""

from __future__ import annotations

import builtins
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from storage.object_store import (
    ObjectExists,
    ObjectInfo,
    ObjectNotFound,
    ObjectTruncated,
    RangeFile,
    StoreError,
    check_key,
    open_source,
)
from storage.patience import Interrupted, Patience, PatienceEnded

if TYPE_CHECKING:
    from storage.objects import Connection

Answer = TypeVar("Answer")

_AFTER_FAILURE = 5.0
"""Seconds of patience for what is tried after a failure."""
_MARKERS = {
    "ContinuationToken": "NextContinuationToken",
    "KeyMarker": "NextKeyMarker",
    "UploadIdMarker": "NextUploadIdMarker",
}
"""What asks for the next page of a listing, and where the page before it says so."""


class S3Store:
    """Store on any S3-compatible server with conditional writes (If-None-Match, If-Match)."""

    def __init__(
        self, connection: Connection, bucket: str, prefix: str, patience: Patience | None = None
    ) -> None:
        self._connection, self._config = connection, connection.config
        self._patience = patience or connection.patience
        self._bucket, self._prefix = bucket, prefix.strip("/") + "/" if prefix.strip("/") else ""
        self.uri = f"s3://{bucket}/{self._prefix}".rstrip("/")
        self.scratch_dir: Path | None = None

    def child(self, folder: str) -> S3Store:
        return S3Store(self._connection, self._bucket, self._prefix + check_key(folder), self._patience)

    def _hurried(self) -> S3Store:
        """Return the same store with little patience."""
        patience = self._patience.of_seconds(_AFTER_FAILURE)
        return S3Store(self._connection, self._bucket, self._prefix, patience)

    def _where(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    def _request(
        self,
        doing: str,
        key: str,
        call: Callable[[Any], Answer],
        progress: Callable[[], int] = lambda: 0,
    ) -> Answer:
        """Have the client do something; begin again while that is interrupted, and `progress` is awaited."""
        what = f"{doing} {self.uri}/{key}"
        return self._patience.wait_out(lambda: self._connection.attempt(what, call), progress)

    @property
    def _checksum(self) -> dict[str, str]:
        return {"ChecksumAlgorithm": self._connection.checksum} if self._connection.checksum else {}

    # Writing.

    def put_bytes(self, key: str, data: bytes, *, overwrite: bool = False) -> None:
        condition = {} if overwrite else {"IfNoneMatch": "*"}
        self._put(key, data, condition)

    def replace(self, key: str, data: bytes, etag: str) -> None:
        self._put(key, data, {"IfMatch": etag})

    def _put(self, key: str, data: bytes, condition: dict[str, str]) -> None:
        arguments = {**self._where(key), "Body": data, **condition, **self._checksum}
        self._settle(key, lambda client: client.put_object(**arguments), lambda store: store.get(key) == data)

    def put_file(self, key: str, source: Path | BinaryIO, *, overwrite: bool = False) -> None:
        condition = {} if overwrite else {"IfNoneMatch": "*"}
        with open_source(source) as (descriptor, size):
            if size <= self._config.part_bytes:
                return self._put(key, os.pread(descriptor, size, 0), condition)
            if condition and self._exists(
                key
            ):  # an early look saves an upload; the condition is what decides
                raise ObjectExists(f"putting {self.uri}/{key}: the key is taken")
            self._multipart(key, descriptor, size, condition)

    def _exists(self, key: str) -> bool:
        try:
            self.head(key)
        except ObjectNotFound:
            return False
        return True

    def _multipart(self, key: str, descriptor: int, size: int, condition: dict[str, str]) -> None:
        where, checksum = self._where(key), self._checksum
        part_bytes = max(self._config.part_bytes, -(-size // 9_000))  # S3 allows 10,000 parts
        upload = self._request(
            "starting the upload of",
            key,
            lambda client: client.create_multipart_upload(**where, **checksum)["UploadId"],
        )

        def send(number: int) -> dict[str, Any]:
            offset = (number - 1) * part_bytes
            body = os.pread(descriptor, min(part_bytes, size - offset), offset)
            part = {"UploadId": upload, "PartNumber": number, "Body": body, **checksum}
            answer = self._request("uploading", key, lambda client: client.upload_part(**where, **part))
            sums = {name: answer[name] for name in ("ChecksumCRC32", "ChecksumCRC64NVME") if name in answer}
            return {"PartNumber": number, "ETag": answer["ETag"], **sums}

        def complete(client: Any) -> None:
            client.complete_multipart_upload(
                **where, UploadId=upload, MultipartUpload={"Parts": parts}, **condition
            )

        try:
            with ThreadPoolExecutor(self._config.parallel_parts) as pool:
                parts = list(pool.map(send, range(1, -(-size // part_bytes) + 1)))
            self._settle(key, complete, lambda store: store._holds(key, descriptor, size))
        except BaseException:
            # Where this fails too, `abort_unfinished` finds the upload later.
            with suppress(StoreError):
                self._hurried()._abort(key, upload)
            raise

    def _abort(self, key: str, upload: str) -> None:
        where = self._where(key)
        self._request(
            "aborting the upload of",
            key,
            lambda client: client.abort_multipart_upload(**where, UploadId=upload),
        )

    def _settle(self, key: str, write: Callable[[Any], object], is_ours: Callable[[S3Store], bool]) -> None:
        """Run a write whose answer may be lost: when it is unclear whether it took place, look.

        A write that is repeated because its answer was never seen meets its own success: with a condition
        that is 412, after a completed upload 404. Contents equal to ours settle it.
        """
        unclear = False

        def attempt() -> None:
            nonlocal unclear
            try:
                self._connection.attempt(f"putting {self.uri}/{key}", write)
            except Interrupted as error:
                unclear = unclear or error.perhaps_done
                raise
            except (ObjectExists, ObjectNotFound):
                if not (unclear and _looks(is_ours, self)):
                    raise

        try:
            self._patience.wait_out(attempt)
        except PatienceEnded:
            with suppress(StoreError):
                if unclear and is_ours(self._hurried()):
                    return
            raise

    def _holds(self, key: str, descriptor: int, size: int) -> bool:
        """Compare an object with a local file, byte by byte."""
        if self.head(key).size != size:
            return False
        step = self._config.part_bytes
        ranges = ((start, min(step, size - start)) for start in range(0, size, step))
        return all(self.get_range(key, start, n) == os.pread(descriptor, n, start) for start, n in ranges)

    # Reading.

    def get(self, key: str) -> bytes:
        where = self._where(key)
        return self._request(
            "reading", key, lambda client: cast(bytes, client.get_object(**where)["Body"].read())
        )

    def get_range(self, key: str, start: int, size: int) -> bytes:
        buffer = bytearray(size)
        self.read_into(key, start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        step = self._config.part_bytes
        if len(buffer) <= 2 * step:
            return self._read_piece(key, start, buffer)
        offsets = range(0, len(buffer), step)
        with ThreadPoolExecutor(self._config.parallel_parts) as pool:
            list(pool.map(lambda o: self._read_piece(key, start + o, buffer[o : o + step]), offsets))

    def _read_piece(self, key: str, start: int, buffer: memoryview) -> None:
        """Read one range with one request; a body that is cut is continued where it ended."""
        done = 0

        def read(client: Any) -> None:
            nonlocal done
            first, last = start + done, start + len(buffer) - 1
            answer = client.get_object(**self._where(key), Range=f"bytes={first}-{last}")
            with _received(answer["Body"]) as receive:
                self._check_range(key, answer, first, last)
                while done < len(buffer):
                    got = receive(buffer[done:])
                    if not got:
                        raise EOFError("the body ended early")
                    done += got

        if len(buffer):
            self._request("reading", key, read, lambda: done)

    def _check_range(self, key: str, answer: dict[str, Any], first: int, last: int) -> None:
        """Refuse an answer that is not the range that was asked for."""
        wanted = last - first + 1
        size = answer.get("ContentLength", wanted)
        partial = answer["ResponseMetadata"]["HTTPStatusCode"] == 206
        if not partial and (first > 0 or size > wanted):
            raise StoreError(
                f"reading {self.uri}/{key}: the server ignores ranges (asked for bytes {first} to {last}, it "
                "sent the whole object); set AWS_ENDPOINT_URL to a server that honours the Range header, not "
                "to a proxy that drops it"
            )
        if size < wanted:
            raise ObjectTruncated(f"reading {self.uri}/{key}: the object is shorter than it should be")

    def open(self, key: str) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(RangeFile(self, key), 1 << 18))

    def head(self, key: str) -> ObjectInfo:
        where = self._where(key)
        answer = self._request("looking at", key, lambda client: client.head_object(**where))
        modified = answer["LastModified"].timestamp()
        return ObjectInfo(key=key, size=answer["ContentLength"], etag=answer["ETag"], modified=modified)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for page in self._pages("list_objects_v2", prefix):
            for item in page.get("Contents", ()):
                key, modified = item["Key"][len(self._prefix) :], item["LastModified"].timestamp()
                yield ObjectInfo(key=key, size=item["Size"], etag=item["ETag"], modified=modified)

    def folders(self) -> Sequence[str]:
        return sorted(
            item["Prefix"][len(self._prefix) : -1]
            for page in self._pages("list_objects_v2", "", Delimiter="/")
            for item in page.get("CommonPrefixes", ())
        )

    def _pages(self, operation: str, prefix: str, **arguments: str) -> Iterator[dict[str, Any]]:
        """Yield the pages of a listing; each is a request of its own, begun again by itself."""
        arguments |= {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        page: dict[str, Any] = {"IsTruncated": True}
        while page.get("IsTruncated"):
            marker = {name: page[there] for name, there in _MARKERS.items() if page.get(there)}
            page = self._request(
                "listing",
                prefix,
                lambda client, marker=marker: getattr(client, operation)(**arguments, **marker),  # type: ignore[misc]
            )
            yield page

    # Removing.

    def delete(self, key: str) -> None:
        where = self._where(key)
        self._request("deleting", key, lambda client: client.delete_object(**where))

    def remove_folders(self) -> None:
        pass

    def abort_unfinished(
        self, prefix: str = "", older_than: float = 0.0, dry_run: bool = False
    ) -> Sequence[str]:
        keys: builtins.list[str] = []
        for page in self._pages("list_multipart_uploads", prefix):
            for upload in page.get("Uploads", ()):
                if time.time() - upload["Initiated"].timestamp() < older_than:
                    continue
                keys.append(upload["Key"][len(self._prefix) :])
                if not dry_run:
                    with suppress(ObjectNotFound):
                        self._abort(keys[-1], upload["UploadId"])
        return keys


def _looks(is_ours: Callable[[S3Store], bool], store: S3Store) -> bool:
    try:
        return is_ours(store)
    except PatienceEnded:
        raise
    except StoreError:
        return False


@contextmanager
def _received(body: Any) -> Iterator[Callable[[memoryview], int]]:
    """Give what receives the body of an answer into memory; its connection is free again afterwards.

    urllib3 copies what it reads four times, http.client below it not at all: that is used where it is found.
    """
    response: Any = getattr(body, "_raw_stream", None)
    direct = getattr(response, "_fp", None)
    try:
        if isinstance(direct, HTTPResponse):
            yield direct.readinto
            if direct.isclosed():  # all was read
                response.release_conn()
        else:
            yield body.readinto
    finally:
        body.close()
