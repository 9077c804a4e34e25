"""A rank that says who it is, and then does as its argument says; imports no torch, to start at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from dflash_core.compile_watch import CacheCounts, CompileReport
from dflash_core.configuration import UserError
from flows.ranks import say, serve_rank


def main() -> None:
    rank, fault = int(os.environ["RANK"]), sys.argv[1]
    if fault == "saving":
        signal.signal(signal.SIGTERM, save)
    if fault == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 0 and len(sys.argv) > 2:
            Path(sys.argv[2]).touch()
    say(
        "hello",
        rank=rank,
        pid=os.getpid(),
        world=os.environ["WORLD_SIZE"],
        threads=os.environ["OMP_NUM_THREADS"],
    )
    if fault == "reports":
        for _ in range(100):
            say(**compile_report(rank).model_dump(mode="json"))
    if rank == 1 and fault == "user":
        raise UserError("mend this")
    if rank == 1 and fault == "error":
        raise RuntimeError("it broke")
    if rank == 1 and fault == "stubborn":
        while not Path(sys.argv[2]).exists():  # rank 0 hears SIGTERM until then
            time.sleep(0.01)
        raise RuntimeError("the other one does not hear")
    if rank == 1 and fault == "kill":
        os.kill(os.getpid(), 9)
    if fault not in ("fine", "reports"):
        time.sleep(3600)


def save(number: int, frame: FrameType | None) -> None:
    """Do what ours do when they are told to stop: they say their numbers, then write a checkpoint."""
    say("metrics", text="long " * 2000)
    Path(sys.argv[2]).touch()
    sys.exit()


def compile_report(rank: int) -> CompileReport:
    """The report of a cold start, some 35 KB long."""
    files = tuple(f'triton/{"X" * 52}/a kernel of "rank {rank}", {i}.cubin' for i in range(400))
    nothing = CacheCounts.model_validate(dict.fromkeys(CacheCounts.model_fields, 0))
    return CompileReport(
        rank=rank,
        start="cold",
        fingerprint=None,
        cache_dir=None,
        device="cpu",
        seconds_since_process_start=1.0,
        events={},
        event_threads=(),
        caches=nothing,
        recompile_reasons=(),
        new_kernel_files=files,
        new_files=len(files),
    )


if __name__ == "__main__":
    serve_rank(main)
