"""A relay in front of a local server that makes it answer as from far away. Knows nothing of HTTP."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

FIRST_BYTE_SECONDS = 0.02
"""From the last byte of a request to the first byte of its answer: what object stores take."""
CONNECTION_BYTES_S = 80e6
"""What one connection carries at most, each way."""
_CHUNK = 1 << 18


@contextmanager
def far_away(port: int) -> Iterator[str]:
    """Relay to 127.0.0.1:port from a process of its own; gives the address to use instead."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(port, theirs), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()


def _serve(port: int, pipe: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        pipe.send(listener.getsockname()[1])
        while True:
            near, _ = listener.accept()
            _Link(near, socket.create_connection(("127.0.0.1", port)))


class _Link:
    """One connection: two threads, one each way."""

    def __init__(self, near: socket.socket, server: socket.socket) -> None:
        for connection in (near, server):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._asked = 0.0
        for source, target, answers in ((near, server, False), (server, near, True)):
            threading.Thread(target=self._carry, args=(source, target, answers), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        buffer, free = memoryview(bytearray(_CHUNK)), 0.0
        with suppress(OSError):
            while size := source.recv_into(buffer):
                now = time.monotonic()
                if answers:
                    free = max(free, self._asked + FIRST_BYTE_SECONDS)
                else:
                    self._asked = now
                free = max(free, now) + size / CONNECTION_BYTES_S
                time.sleep(max(0.0, free - now))
                target.sendall(buffer[:size])
        for connection in (source, target):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
