"""Work ahead of its use gives what a plain loop gives, and holds little."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from storage import ahead as module
from storage.ahead import ahead, read_ahead
from storage.objects import ObjectTruncated, open_store
from tests.memory import peak_of


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


PIECE = 100_000


def read_all(folder: str) -> int:
    """Bytes of the object, read in pieces by four threads."""
    module.PIECE_BYTES = PIECE
    store = open_store(folder)
    return sum(len(piece) for piece in read_ahead(store, "key", store.head("key").size, threads=4))


def test_an_object_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.ahead.PIECE_BYTES", PIECE)
    store, data = open_store(tmp_path), bytes(range(251)) * 20_000
    store.put_bytes("key", data)
    assert b"".join(read_ahead(store, "key", len(data))) == data
    assert b"".join(read_ahead(store, "key", 7)) == data[:7] and not list(read_ahead(store, "key", 0))
    with pytest.raises(ObjectTruncated):
        list(read_ahead(store, "key", len(data) + 1))
    assert read_all(str(tmp_path)) == len(data)
    assert peak_of(read_all, str(tmp_path)) < 7 * PIECE
