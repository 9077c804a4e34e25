"""Times what checkpoints cost a running training step on a GPU. Prints JSON lines.

python benchmarks/checkpoint.py --setting 8B --steps 8 --folder /tmp

Steps as in `benchmarks/train_step.py`, and three checkpoints of weights and moments with `--steps` of them
behind each; the first one also page-locks the buffers. "stall_ms": by how much longer than steps alone these
steps took, altogether; "save_ms": how long the host stood still in `save`; "committed_s": until the
checkpoint was on the store, digest and fsync included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from train_step import SETTINGS, build, milliseconds, synchronise

from dflash_core.distributed import join_world
from storage.checkpoints import Checkpoints, Position
from storage.objects import open_store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--setting", default="8B", choices=SETTINGS)
    parser.add_argument("--steps", type=int, default=8, help="steps between two checkpoints")
    parser.add_argument("--folder", help="where checkpoints are written; a temporary folder by default")
    arguments = parser.parse_args()
    trainer, row, _ = build(SETTINGS[arguments.setting], 4096, {}, join_world())
    alone_ms = sum(milliseconds(lambda: trainer.step([row], 1), arguments.steps, warm=3)) / arguments.steps
    size = sum(t.numel() * t.element_size() for t in trainer.state().values())
    print(json.dumps({"setting": arguments.setting, "gib": round(size / 2**30, 2), "step_ms": alone_ms}))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        checkpoints = Checkpoints(open_store(folder), {}, keep=1)
        for number in range(3):
            found = one_checkpoint(trainer, row, checkpoints, number, arguments.steps)
            found["stall_ms"] = round(sum(found["steps_ms"]) - arguments.steps * alone_ms, 1)
            print(json.dumps(found), flush=True)
        checkpoints.close()


def one_checkpoint(
    trainer: Any, row: Any, checkpoints: Checkpoints, number: int, steps: int
) -> dict[str, Any]:
    """Save, and go on training."""
    checkpoints.wait()
    synchronise()
    marks = [mark()]
    began = time.perf_counter()
    position = Position(optimizer_step=trainer.optimizer_step, epoch=0, step_in_epoch=0)
    trainer.hold(checkpoints.save(position, trainer.state(), {}))
    saved_ms = 1000 * (time.perf_counter() - began)
    done: list[float] = []

    def watch() -> None:
        checkpoints.wait()
        done.append(time.perf_counter() - began)

    waiting = threading.Thread(target=watch)
    waiting.start()
    for _ in range(steps):
        trainer.step([row], 1)
        marks.append(mark())
    waiting.join()
    synchronise()
    times = [passed(a, b) for a, b in itertools.pairwise(marks)]
    return {
        "checkpoint": number,
        "save_ms": round(saved_ms, 1),
        "steps_ms": [round(ms, 1) for ms in times],
        "committed_s": round(done[0], 2),
    }


def mark() -> Callable[[], float] | torch.cuda.Event:
    """A point of time on the device's stream, or of the host."""
    if torch.cuda.is_available():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    now = time.perf_counter()
    return lambda: now


def passed(before: Any, after: Any) -> float:
    """Milliseconds between two marks."""
    if torch.cuda.is_available():
        return float(before.elapsed_time(after))
    return 1000 * float(after() - before())


if __name__ == "__main__":
    main()
