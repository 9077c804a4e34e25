"""A small HTTP proxy in front of a real server that loses, cuts, refuses and delays what a test says."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

Fault = Literal[
    "refuse", "cut request", "hold request", "lose answer", "cut answer", "stall", "ignore range", "delay"
]
"""503 SlowDown; connection cut inside the body on its way in; the same, but not before the test lets go;
request done, answer never seen; connection cut inside the body on its way out; body that stops for longer
than the client waits; 200 and the whole object where a range was asked for (the signature covers ranges, so
`FaultyProxy.whole` must say what there is); nothing but time lost."""

STALL_SECONDS = 1.5
DELAY_SECONDS = 0.2
_SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate</Message></Error>"
)
_EXPIRED = b"<?xml version='1.0'?><Error><Code>ExpiredToken</Code><Message>Too old</Message></Error>"


@dataclass
class Rule:
    """The next `times` requests of this method (any: "") whose path contains the text meet this fault."""

    fault: Fault
    method: str
    contains: str
    times: int = 1
    held: threading.Event = field(default_factory=threading.Event)
    """The server has half of a request that is held."""
    let_go: threading.Event = field(default_factory=threading.Event)
    """What is held may be cut."""


class FaultyProxy(ThreadingHTTPServer):
    """Forwards to 127.0.0.1:port. `rules` may be changed at any time."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Relay)
        self.port_behind = port
        self.rules: list[Rule] = []
        self.met: list[Fault] = []
        self.expired: set[str] = set()
        """Access keys whose requests are answered with 400 ExpiredToken."""
        self.whole: Callable[[str], bytes] = lambda path: b""
        self.most_delayed = 0
        """Most requests that were delayed at the same time."""
        self._delayed = 0
        self._lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def rule_of(self, method: str, path: str) -> Rule | None:
        """Return the rule that the next request falls under, which counts it."""
        with self._lock:
            for rule in self.rules:
                if rule.times and rule.method in ("", method) and rule.contains in path:
                    rule.times -= 1
                    self.met.append(rule.fault)
                    return rule
        return None

    def delay(self) -> None:
        with self._lock:
            self._delayed += 1
            self.most_delayed = max(self.most_delayed, self._delayed)
        time.sleep(DELAY_SECONDS)
        with self._lock:
            self._delayed -= 1

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves is part of the game."""


@contextmanager
def faulty_proxy(port: int) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(port)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()


class _Relay(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def _relay(self) -> None:
        rule = self.server.rule_of(self.command, self.path)
        fault = rule.fault if rule else None
        if fault == "delay":
            self.server.delay()
        assert "chunked" not in self.headers.get("Transfer-Encoding", "")
        length = int(self.headers.get("Content-Length") or 0)
        if rule and fault in ("cut request", "hold request"):
            return self._cut_request(length, rule)
        body = self.rfile.read(length)
        if any(f"Credential={key}/" in self.headers.get("Authorization", "") for key in self.server.expired):
            return self._answer(400, "Bad Request", [("Content-Type", "application/xml")], _EXPIRED)
        if fault == "refuse":
            return self._answer(503, "Slow Down", [("Content-Type", "application/xml")], _SLOW_DOWN)
        if fault == "ignore range" and "Range" in self.headers:
            return self._answer(200, "OK", [], self.server.whole(urlsplit(self.path).path))
        behind = http.client.HTTPConnection("127.0.0.1", self.server.port_behind, timeout=30)
        with contextlib.closing(behind):
            try:
                self._begin(behind)
                behind.send(body)
                answer = behind.getresponse()
                data = answer.read()
            except OSError:
                return self._hang_up()
        if fault == "lose answer":
            return self._hang_up()
        headers = [
            (name, value) for name, value in answer.getheaders() if name.lower() != "transfer-encoding"
        ]
        self._answer(answer.status, answer.reason, headers, data, fault)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _relay

    def _begin(self, behind: http.client.HTTPConnection) -> None:
        behind.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("expect", "connection"):
                behind.putheader(name, value)
        behind.endheaders()

    def _cut_request(self, length: int, rule: Rule) -> None:
        """Half of the body reaches the server, then both connections end."""
        half = self.rfile.read(length // 2)
        behind = http.client.HTTPConnection("127.0.0.1", self.server.port_behind, timeout=30)
        with contextlib.closing(behind):
            self._begin(behind)
            behind.send(half)
            if rule.fault == "hold request":
                rule.held.set()
                rule.let_go.wait(30)
            else:
                time.sleep(0.05)
        self._hang_up()

    def _answer(
        self,
        status: int,
        reason: str,
        headers: list[tuple[str, str]],
        data: bytes,
        fault: Fault | None = None,
    ) -> None:
        self.send_response_only(status, reason)
        for name, value in headers:
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if fault in ("cut answer", "stall"):
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            if fault == "cut answer":
                return self._hang_up()
            time.sleep(STALL_SECONDS)
            data = data[len(data) // 2 :]
        if self.command != "HEAD":
            self.wfile.write(data)

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
