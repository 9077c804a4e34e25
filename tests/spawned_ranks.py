"""Ranks in processes of their own, on this machine."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as multiprocessing


def results_of_ranks(
    rank: Callable[..., None], size: int, *arguments: Any, timeout: float = 400
) -> list[Any]:
    """Run `rank(number, size, port, results, *arguments)` for each rank; what they put, as it came.

    `port` is free, for the ranks to meet at; `results` is a queue, into which each puts one entry. No rank
    outlives the call, and each must end well.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks = [context.Process(target=rank, args=(i, size, port, results, *arguments)) for i in range(size)]
    try:
        for process in ranks:
            process.start()
        found = [results.get(timeout=timeout) for _ in ranks]
        for process in ranks:
            process.join(60)
            assert process.exitcode == 0
    finally:
        for process in ranks:
            process.kill()
    return found
