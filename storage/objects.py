"""Objects by key, on a local folder or S3: created once, atomically, and read by range. Alone names boto3."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from dflash_core.configuration import fingerprint
from storage.local_objects import LocalStore
from storage.object_store import (
    ObjectExists,
    ObjectInfo,
    ObjectNotFound,
    ObjectTruncated,
    Store,
    StoreConfig,
    StoreError,
)
from storage.patience import Interrupted, Patience
from storage.s3_store import S3Store

__all__ = [
    "ObjectExists",
    "ObjectInfo",
    "ObjectNotFound",
    "ObjectTruncated",
    "Store",
    "StoreConfig",
    "StoreError",
    "check_address",
    "open_store",
]

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


def check_address(uri: str) -> str:
    """Return the address of a store unchanged.

    Raises StoreError for a scheme other than file:// and s3://, a mistyped one, or an address that carries
    credentials. What is wrong there is not shown: a secret with a slash in it looks like the beginning of a
    prefix.
    """
    if "://" not in uri:
        if re.match(r"[A-Za-z][A-Za-z0-9+.\-]*:/|s3/", uri):
            raise StoreError(
                "the store's address looks mistyped: write s3://bucket/prefix, or ./ before a folder's name"
            )
        return uri
    try:
        parts = urlsplit(uri)
    except ValueError:  # its words would show what was given
        raise StoreError(
            "the store's address has brackets where its bucket or host stands: write s3://bucket/prefix"
        ) from None
    if "@" in parts.netloc:
        raise StoreError(
            f"the {parts.scheme}:// address carries credentials: leave them out and set AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY instead"
        )
    if parts.scheme not in ("file", "s3"):
        raise StoreError(
            f"{parts.scheme}:// is no store's address: write a local path, file:///path or s3://bucket/prefix"
        )
    if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
        raise StoreError("a file:// address names no host: write file:///absolute/path (three slashes)")
    if parts.scheme == "s3" and not re.fullmatch(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]", parts.netloc):
        raise StoreError(
            "what follows s3:// is no name of a bucket: write s3://bucket/prefix, and set credentials as "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    return uri


def open_store(uri: str | Path, config: StoreConfig | None = None) -> Store:
    """Open file:///abs/path, a plain path, or s3://bucket/prefix.

    Keys, endpoint and region of S3 come from the usual AWS_* variables and files. Raises StoreError for what
    is no address (`check_address`), and for a bucket that does not answer.
    """
    text = check_address(str(uri))
    if "://" not in text:
        return LocalStore(Path(text))
    parts = urlsplit(text)
    if parts.scheme == "file":
        return LocalStore(Path(unquote(parts.path)))
    connection = _connect(config or StoreConfig())
    _greet(connection, parts.netloc)
    return S3Store(connection, parts.netloc, text.split("://", 1)[1].partition("/")[2])


def _connect(config: StoreConfig) -> Connection:
    """Return the connection of this process for the AWS_* variables as they are now."""
    found = sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))
    return _connection(config, os.getpid(), fingerprint(found))


@lru_cache(maxsize=8)
def _connection(config: StoreConfig, process: int, variables: str) -> Connection:
    return Connection(config)


def _greet(connection: Connection, bucket: str) -> None:
    """Fail within seconds when there is no server: minutes of patience would hide a wrong address."""
    from botocore.exceptions import ClientError, ConnectionError, HTTPClientError, NoCredentialsError

    if bucket in connection.greeted:
        return
    for wait in (0.2, 1.0, 2.0, None):
        try:
            connection.client.head_bucket(Bucket=bucket)
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


class Connection:
    """The boto3 client of a process: speaks of errors without its secrets, and renews its credentials.

    Threads share it. It tries a request once; `patience` is for waiting.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.patience = Patience(config.patience)
        self.greeted: set[str] = set()
        """Buckets whose server has answered."""
        self._secrets: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self.client = self._new_client()
        wanted = self.client.meta.config.request_checksum_calculation != "when_required"
        name = "CRC64NVME" if importlib.util.find_spec("awscrt") else "CRC32"
        self.checksum = name if wanted else None

    def attempt(self, doing: str, call: Callable[[Any], Answer]) -> Answer:
        """Call with the client; when its credentials have expired, once more with those that are there now.

        `doing` begins the message of an error. Raises Interrupted for what may pass, StoreError otherwise.
        """
        client = self.client
        try:
            with self._errors(doing):
                return call(client)
        except CredentialsExpired:
            client = self._renewed(client)
        try:
            with self._errors(doing):
                return call(client)
        except CredentialsExpired as error:
            raise StoreError(
                f"{error}, also those that were read anew just now: put valid ones into the AWS_* variables "
                "or AWS's credentials file, and run again"
            ) from None

    def scrub(self, text: str) -> str:
        """Return a text without the secrets of this connection."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _renewed(self, expired: Any) -> Any:
        """Return a client that has read the credentials after `expired` did."""
        with self._lock:
            if self.client is expired:
                self.client = self._new_client()
                log.info("S3: the credentials had expired and were read anew")
            return self.client

    def _new_client(self) -> Any:
        try:
            with self._errors("opening the store"):
                return self._client_of_new_session()
        except StoreError:
            raise
        except ValueError:  # its text shows the address, which may hold a password
            raise StoreError(
                "opening the store: AWS_ENDPOINT_URL is no address; write http:// or https:// in front of it"
            ) from None

    def _client_of_new_session(self) -> Any:
        """Make a session, which reads variables and files, and its client; note what is secret about them.

        Payloads are unsigned, the checksum guards them: signing would hash every byte.
        """
        import boto3
        from botocore.config import Config as BotoConfig

        session = boto3.session.Session()
        region = session.region_name or "us-east-1"

        def client(style: str) -> Any:
            settings = BotoConfig(
                signature_version="s3v4",
                s3={"addressing_style": style, "payload_signing_enabled": False},
                # botocore's own tries draw on a quota that all threads share: many use it up within seconds.
                retries={"mode": "standard", "total_max_attempts": 1},
                connect_timeout=self.config.connect_timeout,
                read_timeout=self.config.read_timeout,
                max_pool_connections=256,  # that are kept open; as many as are asked for are opened
                # What is read is checked against the digests in the commit records, range reads too.
                response_checksum_validation="when_required",
            )
            return session.client("s3", region_name=region, config=settings)

        ours = {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"} & os.environ.keys()
        made = client("path" if ours else "auto")
        if not ours and ".amazonaws.com" not in made.meta.endpoint_url:  # an endpoint from a profile
            made = client("path")
        credentials = session.get_credentials()
        frozen = credentials.get_frozen_credentials() if credentials else ()
        user, at, _ = urlsplit(made.meta.endpoint_url).netloc.rpartition("@")
        self._secrets |= {secret for secret in (*frozen, at and user) if isinstance(secret, str) and secret}
        return made

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Turn errors of boto3 and of the network into ours, without the chain that might carry secrets."""
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            ConnectionError,
            HTTPClientError,
            IncompleteReadError,
        )
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ClientError as error:
            raise _our_error(doing, error.response, self.scrub(str(error))) from None
        except (
            ConnectionError,
            HTTPClientError,
            IncompleteReadError,
            HTTPError,
            HTTPException,
            EOFError,
            OSError,
        ) as error:
            raise Interrupted(doing, type(error).__name__) from None
        except BotoCoreError as error:
            text = self.scrub(str(error))
            raise StoreError(f"{doing} failed: {type(error).__name__}: {text}") from None


class CredentialsExpired(StoreError):
    """The server takes these credentials no longer."""


_MISSING = {"NoSuchKey", "NoSuchUpload", "404", "NotFound"}
_TAKEN = {"PreconditionFailed", "412"}
_CONFLICT = {"ConditionalRequestConflict", "409"}
"""Another request was in the way, and nothing was done."""
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "400"}
"""400 is what an answer without a body says instead, to HEAD."""
_REFUSED = {"AccessDenied", "403", "Forbidden", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
_PASSING = (
    "SlowDown",
    "ServiceUnavailable",
    "InternalError",
    "RequestTimeout",
    "Throttling",
    "TooManyRequests",
)
"""Beginnings of codes."""
_PASSING_STATUS = {429, 500, 502, 503, 504}


def _our_error(doing: str, response: dict[str, Any], text: str) -> StoreError:
    code = str(response.get("Error", {}).get("Code", ""))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if code.startswith(_PASSING) or status in _PASSING_STATUS:
        return Interrupted(doing, code)
    if code in _CONFLICT:
        return Interrupted(doing, code, perhaps_done=False)
    if code in _MISSING:
        return ObjectNotFound(f"{doing}: there is no such object")
    if code in _TAKEN:
        return ObjectExists(f"{doing}: the key is taken, or the object has changed")
    if code == "InvalidRange":
        return ObjectTruncated(f"{doing}: the object is shorter than it should be")
    if code == "NoSuchBucket":
        return StoreError(f"{doing}: the bucket does not exist; create it first")
    if code in _EXPIRED:
        why = "perhaps because" if code == "400" else "because"
        return CredentialsExpired(f"{doing}: the server answers {code}, {why} the credentials have expired")
    if code in _REFUSED:
        return StoreError(
            f"{doing}: the server refused these credentials ({code}); check AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and the bucket's policy"
        )
    return StoreError(f"{doing} failed: ClientError: {text}")
