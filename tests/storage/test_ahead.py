"""Work ahead of its use gives what a plain loop gives, and holds little."""

from __future__ import annotations

import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from storage.ahead import ahead, read_ahead
from storage.objects import ObjectTruncated, open_store


def test_results_in_order_and_few_at_a_time() -> None:
    lock, begun, taken, most = threading.Lock(), 0, 0, 0

    def square(n: int) -> int:
        nonlocal begun, most
        with lock:
            begun += 1
            most = max(most, begun - taken)
        time.sleep(0.003 * (n % 3))
        return n * n

    results = []
    for result in ahead(square, range(50), threads=4, limit=6):
        results.append(result)
        with lock:
            taken += 1
    assert results == [n * n for n in range(50)] and 2 <= most <= 7
    assert list(ahead(square, [], threads=2)) == []


def test_an_error_comes_in_its_place_and_ends_the_work() -> None:
    begun = []

    def work(n: int) -> float:
        begun.append(n)
        return 1 / (3 - n)

    results = ahead(work, range(100), threads=1)
    assert [next(results) for _ in range(3)] == [1 / 3, 1 / 2, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert max(begun) < 10


def test_an_object_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.ahead.PIECE_BYTES", 100_000)
    store, data = open_store(tmp_path), bytes(range(251)) * 20_000
    store.put_bytes("key", data)
    assert b"".join(read_ahead(store, "key", len(data))) == data
    assert b"".join(read_ahead(store, "key", 7)) == data[:7] and not list(read_ahead(store, "key", 0))
    with pytest.raises(ObjectTruncated):
        list(read_ahead(store, "key", len(data) + 1))
    tracemalloc.start()
    try:
        assert sum(len(piece) for piece in read_ahead(store, "key", len(data), threads=4)) == len(data)
        assert tracemalloc.get_traced_memory()[1] < 7 * 100_000
    finally:
        tracemalloc.stop()
