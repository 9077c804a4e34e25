"""Memory that a call needs, measured in a process of its own.

Python 3.11 may crash where tracemalloc stops while other threads begin or end, and a test's process has many.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def peak_of(function: Callable[..., Any], *arguments: Any) -> int:
    """Bytes that a call of an importable function holds at most. Called once before, for what is kept."""
    return _alone(_peak, function, arguments)


def size_of(function: Callable[..., Any], *arguments: Any) -> int:
    """Bytes of what an importable function returns. It is called once before, for what is kept."""
    return _alone(_size, function, arguments)


def _alone(measure: Callable[..., int], function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measure, function, arguments).result(timeout=300)


def _peak(function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    function(*arguments)
    tracemalloc.start()
    function(*arguments)
    return tracemalloc.get_traced_memory()[1]


def _size(function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    function(*arguments)
    tracemalloc.start()
    made = function(*arguments)
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    del made
    return size
