"""Work on threads ahead of its use: results in order, and only a few of them held at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


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
