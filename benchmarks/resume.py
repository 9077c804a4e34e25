"""Trains twice without a stop and once with one, and compares the curves. Prints JSON lines.

python benchmarks/resume.py train.yaml --steps 200 --stop-at 80
python benchmarks/resume.py --draw resume.jsonl --plot resume.png

A run that is stopped by SIGTERM and begun again with the same command should go on as if nothing had
happened: bit for bit on a CPU, and on a GPU, where sums come out in another order each time, within what two
undisturbed runs differ. Each optimizer step's loss is read, so each is waited for. "differs": by how much two
runs' losses differ, relative, over the steps behind the stop; "equal_steps": how many losses are equal to the
last bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from flows.config import TrainConfig, load_config
from flows.launch import Message
from flows.ranks import RanksFailed
from flows.train_steps import TrainingLog, open_training_data, train

Curve = dict[int, float]
"""Loss of each optimizer step."""


def losses_of(config: TrainConfig, folder: Path, stop_at: int | None = None) -> Curve:
    """Run the ranks until they have finished, or are stopped behind this step."""
    losses: Curve = {}
    pid = 0

    def follow(message: Message) -> None:
        nonlocal pid
        if message["kind"] == "started":
            pid = message["pid"]
        elif message["kind"] == "stderr":
            print(message["text"], file=sys.stderr, flush=True)
        elif message["kind"] == "metrics" and "loss" in message:
            losses[message["step"]] = message["loss"]
            if message["step"] == stop_at:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    log = TrainingLog()
    try:
        train(config, *open_training_data(config), folder, log, follow)
    except RanksFailed:
        if stop_at is None or log.stopped_at is None:
            raise
    return losses


def run(config: TrainConfig, steps: int, stop_at: int, then_gpus: list[str] | None) -> None:
    """Train three times and say how the curves differ."""
    curves: dict[str, Curve] = {}
    stopped = 0
    with tempfile.TemporaryDirectory(prefix="dflash-resume-") as scratch:
        for name in ("whole", "again", "resumed"):
            folder = Path(scratch) / name
            folder.mkdir()
            often = {"max_steps": steps, "epochs": 10**6, "log_every": 1, "checkpoint_every": 10**6}
            training = config.training.model_copy(update=often)
            settings = config.model_copy(update={"output": str(folder), "training": training})
            first = losses_of(settings, folder, stop_at) if name == "resumed" else {}
            if len(first) == steps:
                raise RuntimeError("the run had ended before it could be stopped: a smaller --stop-at")
            if first and then_gpus is not None:
                settings = settings.model_copy(update={"gpus": tuple(then_gpus)})
            second = losses_of(settings, folder)
            if again := sorted(first.keys() & second.keys()):
                raise RuntimeError(f"steps {again} were taken twice")
            curves[name] = first | second
            stopped = max(first, default=0)
            tell("curve", run=name, stopped_behind_step=stopped, losses=curves[name])
    compare(curves, stopped, "again")
    compare(curves, stopped, "resumed")


def compare(curves: dict[str, Curve], stopped: int, other: str) -> None:
    """Say how far a run's losses are from those of the first one."""
    steps = sorted(curves["whole"])
    if sorted(curves[other]) != steps:
        raise RuntimeError(f"the run {other!r} took other steps than the first one")
    whole, found = (np.array([curves[name][step] for step in steps]) for name in ("whole", other))
    differs = np.abs(found / whole - 1)[np.array(steps) > stopped]
    tell(
        "differs",
        run=other,
        mean=round(float(differs.mean()), 6),
        most=round(float(differs.max()), 6),
        first_behind_the_stop=round(float(differs[0]), 6),
        equal_steps=int((whole == found).sum()),
        steps=len(steps),
        last_ten_losses=round(float(found[-10:].mean()), 4),
        last_ten_losses_of_whole=round(float(whole[-10:].mean()), 4),
    )


def tell(what: str, **found: Any) -> None:
    print(json.dumps({"what": what, **found}), flush=True)


def draw(lines: Path, picture: Path) -> None:
    """Draw the curves that an earlier run printed, and how they differ from the first."""
    from matplotlib.figure import Figure

    told = [json.loads(line) for line in lines.read_text().splitlines() if line.startswith("{")]
    runs = {t["run"]: t for t in told if t["what"] == "curve"}
    stop = runs["resumed"]["stopped_behind_step"]
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for name, style in (("whole", "-"), ("again", "--"), ("resumed", ":")):
        steps = [int(step) for step in runs[name]["losses"]]
        losses = np.array(list(runs[name]["losses"].values()))
        above.plot(steps, losses, style, label=name)
        if name != "whole":
            relative = losses / np.array(list(runs["whole"]["losses"].values())) - 1
            below.plot(steps, 100 * relative, style, color=above.lines[-1].get_color(), label=name)
    for axes in (above, below):
        axes.axvline(stop, color="grey", linewidth=0.8)
        axes.legend()
    above.set_ylabel("loss")
    below.set_ylabel("difference from whole, %")
    below.set_xlabel(f"optimizer step (the resumed run was stopped behind step {stop})")
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", help="a training configuration; its output is not touched")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stop-at", type=int, default=80)
    parser.add_argument("--then-gpus", help="continue on these GPUs instead, e.g. 0")
    parser.add_argument("--draw", type=Path, help="what an earlier run printed: draw it, train nothing")
    parser.add_argument("--plot", type=Path, default=Path("resume.png"), help="with --draw: the picture")
    arguments = parser.parse_args()
    if arguments.draw is not None:
        draw(arguments.draw, arguments.plot)
        return
    if arguments.config is None:
        parser.error("name a training configuration, or --draw")
    if not 0 < arguments.stop_at <= arguments.steps - 5:
        parser.error("--stop-at must lie at least five steps before --steps")
    then = None if arguments.then_gpus is None else arguments.then_gpus.split(",")
    run(load_config(TrainConfig, arguments.config), arguments.steps, arguments.stop_at, then)


if __name__ == "__main__":
    main()
