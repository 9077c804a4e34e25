"""Objects by key, on a local folder or S3: created once, atomically, and read by range. Alone names boto3."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import unquote, urlsplit

from dflash_core.configuration import fingerprint
from storage.local_objects import LocalStore
from storage.object_store import (
    ObjectExists,
    ObjectInfo,
    ObjectNotFound,
    ObjectTruncated,
    RangeFile,
    Store,
    StoreConfig,
    StoreError,
    check_key,
    open_source,
)

__all__ = [
    "ObjectExists",
    "ObjectInfo",
    "ObjectNotFound",
    "ObjectTruncated",
    "Store",
    "StoreConfig",
    "StoreError",
    "open_store",
]


def open_store(uri: str | Path, config: StoreConfig | None = None) -> Store:
    """Open file:///abs/path, a plain path, or s3://bucket/prefix.

    Keys, endpoint and region of S3 come from the usual AWS_* variables and files.
    Raises StoreError for another scheme or an address that carries credentials. What is wrong is not shown:
    a secret with a slash in it looks like the beginning of a prefix.
    """
    text = str(uri)
    if "://" not in text:
        return LocalStore(Path(text))
    parts = urlsplit(text)
    if "@" in parts.netloc:
        raise StoreError(
            f"the {parts.scheme}:// address carries credentials: leave them out and set AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY instead"
        )
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise StoreError("a file:// address names no host: write file:///absolute/path (three slashes)")
        return LocalStore(Path(unquote(parts.path)))
    if parts.scheme == "s3":
        config = config or StoreConfig()
        if not re.fullmatch(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]", parts.netloc):
            raise StoreError(
                "what follows s3:// is no name of a bucket: write s3://bucket/prefix, and set credentials as "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        connection = _connect(config)
        _greet(connection, parts.netloc)
        return S3Store(connection, parts.netloc, text.split("://", 1)[1].partition("/")[2])
    raise StoreError(
        f"{parts.scheme}:// is no store's address: write a local path, file:///path or s3://bucket/prefix"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Connection:
    """One boto3 client and what is needed to speak of its errors without its secrets."""

    client: Any
    greeter: Any
    """Another client, without patience."""
    greeted: set[str]
    """Buckets whose server has answered."""
    config: StoreConfig
    checksum: str | None
    secrets: tuple[str, ...] = field(repr=False)
    """What no error may show. Not shown by tracebacks that print variables either."""

    def scrub(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def _connect(config: StoreConfig) -> _Connection:
    """Return the client of this process for the AWS_* variables as they are now."""
    found = sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))
    return _new_connection(config, os.getpid(), fingerprint(found))


def _greet(connection: _Connection, bucket: str) -> None:
    """Fail within seconds when there is no server: a minute's patience would hide a wrong address."""
    from botocore.exceptions import ClientError, ConnectionError, HTTPClientError, NoCredentialsError

    if bucket in connection.greeted:
        return
    for wait in (0.2, 1.0, 2.0, None):
        try:
            connection.greeter.head_bucket(Bucket=bucket)
        except ClientError:  # an answer; what it forbids, the request that needs it will say
            pass
        except NoCredentialsError:
            raise StoreError(
                f"s3://{bucket}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from None
        except (ConnectionError, HTTPClientError) as error:
            if wait is not None:
                time.sleep(wait)
                continue
            raise StoreError(
                f"s3://{bucket}: no answer from {connection.scrub(connection.client.meta.endpoint_url)} "
                f"({type(error).__name__}); check AWS_ENDPOINT_URL and the server"
            ) from None
        connection.greeted.add(bucket)
        return


@lru_cache(maxsize=8)
def _new_connection(config: StoreConfig, process: int, variables: str) -> _Connection:
    """Make a client; one for each process and state of the AWS_* variables.

    Payloads are unsigned, the checksum guards them: signing would hash every byte.
    """
    import boto3
    from botocore.config import Config as BotoConfig

    session = boto3.session.Session()
    region = session.region_name or "us-east-1"

    def client(style: str, attempts: int) -> Any:
        settings = BotoConfig(
            signature_version="s3v4",
            s3={"addressing_style": style, "payload_signing_enabled": False},
            retries={"mode": "standard", "max_attempts": attempts},
            connect_timeout=config.connect_timeout,
            read_timeout=config.read_timeout,
            max_pool_connections=64,
            # What is read is checked against the digests in the commit records, range reads too.
            response_checksum_validation="when_required",
        )
        try:
            with _translated(None, "opening the store"):
                return session.client("s3", region_name=region, config=settings)
        except StoreError:
            raise
        except ValueError:  # its text shows the address, which may hold a password
            raise StoreError(
                "opening the store: AWS_ENDPOINT_URL is no address; write http:// or https:// in front of it"
            ) from None

    ours = {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"} & os.environ.keys()
    style = "path" if ours else "auto"
    greeter = client(style, 1)
    if not ours and ".amazonaws.com" not in greeter.meta.endpoint_url:  # an endpoint from a profile
        style = "path"
        greeter = client(style, 1)
    made = client(style, config.attempts)
    wanted = made.meta.config.request_checksum_calculation != "when_required"
    name = "CRC64NVME" if importlib.util.find_spec("awscrt") else "CRC32"
    credentials = session.get_credentials()
    frozen = credentials.get_frozen_credentials() if credentials else ()
    secrets = [secret for secret in frozen if isinstance(secret, str) and secret]
    if "@" in urlsplit(made.meta.endpoint_url).netloc:
        secrets.append(urlsplit(made.meta.endpoint_url).netloc.rpartition("@")[0])
    return _Connection(
        client=made,
        greeter=greeter,
        greeted=set(),
        config=config,
        checksum=name if wanted else None,
        secrets=tuple(secrets),
    )


_MISSING = {"NoSuchKey", "404", "NotFound"}
_TAKEN = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409"}
_REFUSED = {"AccessDenied", "403", "Forbidden", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"}


def _code(error: Exception) -> str:
    return str((getattr(error, "response", None) or {}).get("Error", {}).get("Code", ""))


def _tries_before(error: Exception) -> int:
    """How often botocore repeated the request: if it did, the first try may have succeeded."""
    return int((getattr(error, "response", None) or {}).get("ResponseMetadata", {}).get("RetryAttempts", 0))


@contextmanager
def _translated(connection: _Connection | None, what: str) -> Iterator[None]:
    """Turn botocore's errors into ours, without secrets and without the chain that might carry them."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (ClientError, BotoCoreError) as error:
        text = connection.scrub(str(error)) if connection else str(error)
        raise _our_error(_code(error), what, f"{type(error).__name__}: {text}") from None


def _our_error(code: str, what: str, text: str) -> StoreError:
    if code in _MISSING:
        return ObjectNotFound(f"{what}: there is no such object")
    if code in _TAKEN:
        return ObjectExists(f"{what}: the key is taken, or the object has changed")
    if code == "InvalidRange":
        return ObjectTruncated(f"{what}: the object is shorter than it should be")
    if code == "NoSuchBucket":
        return StoreError(f"{what}: the bucket does not exist; create it first")
    if code in _REFUSED:
        return StoreError(
            f"{what}: the server refused these credentials ({code}); check AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and the bucket's policy"
        )
    return StoreError(f"{what} failed: {text}")


class _Interrupted(Exception):
    """The network failed more often than botocore tries, or in the body of an answer, where it never does."""


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


@contextmanager
def _interruptions() -> Iterator[None]:
    from botocore.exceptions import ConnectionError, HTTPClientError, IncompleteReadError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (
        ConnectionError,
        HTTPClientError,
        IncompleteReadError,
        HTTPError,
        HTTPException,
        EOFError,
        OSError,
    ) as error:
        raise _Interrupted(type(error).__name__) from None


class S3Store:
    """Store on any S3-compatible server with conditional writes (If-None-Match, If-Match)."""

    def __init__(self, connection: _Connection, bucket: str, prefix: str) -> None:
        self._connection, self._client, self._config = connection, connection.client, connection.config
        self._bucket, self._prefix = bucket, prefix.strip("/") + "/" if prefix.strip("/") else ""
        self.uri = f"s3://{bucket}/{self._prefix}".rstrip("/")
        self.scratch_dir: Path | None = None

    def child(self, folder: str) -> S3Store:
        return S3Store(self._connection, self._bucket, self._prefix + check_key(folder))

    def _where(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    def _translated(self, doing: str, key: str) -> Any:
        return _translated(self._connection, f"{doing} {self.uri}/{key}")

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
        def put() -> None:
            self._client.put_object(**self._where(key), Body=data, **condition, **self._checksum)

        self._settle(key, put, lambda: self.get(key) == data)

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
        with self._translated("starting the upload of", key):
            upload = self._client.create_multipart_upload(**where, **checksum)["UploadId"]

        def send(number: int) -> dict[str, Any]:
            offset = (number - 1) * part_bytes
            body = os.pread(descriptor, min(part_bytes, size - offset), offset)
            part = {"UploadId": upload, "PartNumber": number, "Body": body, **checksum}
            answer = self._patiently("uploading", key, lambda: self._client.upload_part(**where, **part))
            sums = {name: answer[name] for name in ("ChecksumCRC32", "ChecksumCRC64NVME") if name in answer}
            return {"PartNumber": number, "ETag": answer["ETag"], **sums}

        def complete() -> None:
            self._client.complete_multipart_upload(
                **where, UploadId=upload, MultipartUpload={"Parts": parts}, **condition
            )

        try:
            with self._translated("uploading", key), ThreadPoolExecutor(self._config.threads) as pool:
                parts = list(pool.map(send, range(1, -(-size // part_bytes) + 1)))
            self._settle(key, complete, lambda: self._holds(key, descriptor, size))
        except BaseException:
            # Where this fails too, `abort_unfinished` finds the upload later.
            with suppress(StoreError), self._translated("aborting the upload of", key):
                self._client.abort_multipart_upload(**where, UploadId=upload)
            raise

    def _settle(self, key: str, write: Callable[[], None], is_ours: Callable[[], bool]) -> None:
        """Run a write whose answer may be lost: when it is unclear whether it took place, look.

        botocore repeats a request whose answer it never saw, and the repetition then meets its own success:
        with a condition that is 412, after a completed upload 404. Contents equal to ours settle it.
        409 means that another request was in the way and nothing was done: try again.
        """
        from botocore.exceptions import ClientError, ConnectionError, HTTPClientError

        with self._translated("putting", key):
            for wait in (0.1, 0.5, 2.0, None):
                try:
                    return write()
                except ClientError as error:
                    code = _code(error)
                    if code in ("ConditionalRequestConflict", "409") and wait is not None:
                        time.sleep(wait)
                        continue
                    unclear = _tries_before(error) > 0 and code in _TAKEN | {"NoSuchUpload"}
                    if unclear and self._looks(is_ours):
                        return
                    raise
                except (HTTPClientError, ConnectionError):
                    if self._looks(is_ours):
                        return
                    raise

    def _looks(self, is_ours: Callable[[], bool]) -> bool:
        try:
            return is_ours()
        except StoreError:
            return False

    def _holds(self, key: str, descriptor: int, size: int) -> bool:
        """Compare an object with a local file, byte by byte."""
        if self.head(key).size != size:
            return False
        step = self._config.part_bytes
        ranges = ((start, min(step, size - start)) for start in range(0, size, step))
        return all(self.get_range(key, start, n) == os.pread(descriptor, n, start) for start, n in ranges)

    # Reading.

    def get(self, key: str) -> bytes:
        def read() -> bytes:
            return cast(bytes, self._client.get_object(**self._where(key))["Body"].read())

        return cast(bytes, self._patiently("reading", key, read))

    def get_range(self, key: str, start: int, size: int) -> bytes:
        buffer = bytearray(size)
        self.read_into(key, start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        step = self._config.part_bytes
        if len(buffer) <= 2 * step:
            return self._read_piece(key, start, buffer)
        offsets = range(0, len(buffer), step)
        with ThreadPoolExecutor(self._config.threads) as pool:
            list(pool.map(lambda o: self._read_piece(key, start + o, buffer[o : o + step]), offsets))

    def _read_piece(self, key: str, start: int, buffer: memoryview) -> None:
        """Read one range with one request; a body that is cut is continued where it ended."""
        done = 0

        def read() -> None:
            nonlocal done
            first, last = start + done, start + len(buffer) - 1
            answer = self._client.get_object(**self._where(key), Range=f"bytes={first}-{last}")
            with _received(answer["Body"]) as receive:
                self._check_range(key, answer, first, last)
                while done < len(buffer):
                    got = receive(buffer[done:])
                    if not got:
                        raise EOFError("the body ended early")
                    done += got

        if len(buffer):
            self._patiently("reading", key, read, lambda: done)

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

    def _patiently(
        self, doing: str, key: str, call: Callable[[], Any], progress: Callable[[], int] = lambda: 0
    ) -> Any:
        """Begin a request again when the network fails it, until nothing arrives for `patience` seconds."""
        since, before, wait = time.monotonic(), progress(), 0.05
        with self._translated(doing, key):
            while True:
                try:
                    with _interruptions():
                        return call()
                except _Interrupted as error:
                    if progress() > before:
                        since, before, wait = time.monotonic(), progress(), 0.05
                    elif time.monotonic() - since > self._config.patience:
                        text = f"{doing} {self.uri}/{key}: the connection failed again and again"
                        raise StoreError(f"{text} ({error}); check the network and the server") from None
                    time.sleep(wait)
                    wait = min(2 * wait, 5.0)

    def open(self, key: str) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(RangeFile(self, key), 1 << 18))

    def head(self, key: str) -> ObjectInfo:
        with self._translated("looking at", key):
            answer = self._client.head_object(**self._where(key))
        modified = answer["LastModified"].timestamp()
        return ObjectInfo(key=key, size=answer["ContentLength"], etag=answer["ETag"], modified=modified)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        pages = self._client.get_paginator("list_objects_v2")
        with self._translated("listing", prefix):
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix):
                for item in page.get("Contents", ()):
                    key, modified = item["Key"][len(self._prefix) :], item["LastModified"].timestamp()
                    yield ObjectInfo(key=key, size=item["Size"], etag=item["ETag"], modified=modified)

    def folders(self) -> Sequence[str]:
        pages = self._client.get_paginator("list_objects_v2")
        with self._translated("listing", ""):
            found = [
                item["Prefix"][len(self._prefix) : -1]
                for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix, Delimiter="/")
                for item in page.get("CommonPrefixes", ())
            ]
        return sorted(found)

    # Removing.

    def delete(self, key: str) -> None:
        with self._translated("deleting", key):
            self._client.delete_object(**self._where(key))

    def abort_unfinished(
        self, prefix: str = "", older_than: float = 0.0, dry_run: bool = False
    ) -> Sequence[str]:
        keys = []
        pages = self._client.get_paginator("list_multipart_uploads")
        with self._translated("listing unfinished uploads of", prefix):
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix):
                for upload in page.get("Uploads", ()):
                    if time.time() - upload["Initiated"].timestamp() < older_than:
                        continue
                    keys.append(upload["Key"][len(self._prefix) :])
                    if not dry_run:
                        with suppress(ObjectNotFound), self._translated("aborting", keys[-1]):
                            self._client.abort_multipart_upload(
                                Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                            )
        return keys
