"""A rank that says who it is, and then does as its argument says; imports no torch, to start at once."""

from __future__ import annotations

import os
import signal
import sys
import time

from dflash_core.configuration import UserError
from flows.ranks import say, serve_rank


def main() -> None:
    rank, fault = int(os.environ["RANK"]), sys.argv[1]
    if fault == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say(
        "hello",
        rank=rank,
        pid=os.getpid(),
        world=os.environ["WORLD_SIZE"],
        threads=os.environ["OMP_NUM_THREADS"],
    )
    if rank == 1 and fault == "user":
        raise UserError("mend this")
    if rank == 1 and fault == "error":
        raise RuntimeError("it broke")
    if rank == 1 and fault == "stubborn":
        time.sleep(2)  # rank 0 has its handler by now
        raise RuntimeError("the other one does not hear")
    if rank == 1 and fault == "kill":
        os.kill(os.getpid(), 9)
    if fault != "fine":
        time.sleep(3600)


if __name__ == "__main__":
    serve_rank(main)
