"""Work on threads ahead of its use: results in order, and only a few of them held at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from storage.object_store import Store

Item = TypeVar("Item")
Result = TypeVar("Result")
PIECE_BYTES = 16 << 20


def ahead(
    work: Callable[[Item], Result], items: Iterable[Item], *, threads: int, limit: int | None = None
) -> Iterator[Result]:
    """Yield `work(item)` for each item, in order.

    At most `limit` results (default: two a thread) are being made or wait to be taken. An error of `work` is
    raised in its result's place; what has not begun then never does.
    """
    limit = limit or 2 * threads
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            if len(waiting) == limit:
                yield waiting.popleft().result()
            waiting.append(pool.submit(work, item))
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def read_ahead(store: Store, key: str, size: int, *, threads: int = 8) -> Iterator[memoryview]:
    """Yield the first `size` bytes of an object in order, in pieces of PIECE_BYTES (the last may be shorter).

    Each piece is a range read of its own; `threads` of them are made or held at a time. Errors as
    `Store.read_into`.
    """

    def fetch(start: int) -> memoryview:
        piece = np.empty(min(PIECE_BYTES, size - start), np.uint8).data
        store.read_into(key, start, piece)
        return piece

    return ahead(fetch, range(0, size, PIECE_BYTES), threads=threads, limit=threads)
