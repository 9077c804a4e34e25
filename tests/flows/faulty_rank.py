"""A rank that does what ours must never do: it calls compiled code in a second thread."""

from __future__ import annotations

import threading

import torch


def main() -> None:
    double = torch.compile(lambda x: x * 2)
    double(torch.ones(3))
    second = threading.Thread(target=double, args=(torch.ones(3),), name="second")
    second.start()
    second.join()
