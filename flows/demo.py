"""The whole pipeline with a real small chat model and a few dozen prompts, on the CPU."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from dflash_core.configuration import UserError
from flows.config import ExtractConfig, TrainConfig, load_config
from flows.console import bars
from flows.demo_target import write_demo_target

Result = TypeVar("Result")
CONFIGS = Path("configs/demo")
TRAINED_ON, HELD_OUT = "trained on", "held out"
SHORTLY_EVALUATED = 3
"""Prompts of each family that a drafter of a shortened training decodes."""


def demo(output: Path, steps: int | None = None) -> dict[str, Any]:
    """Run the demo into `output` and return the report that it writes to report.json there.

    `steps` shortens the training, and the evaluation with it. Run again, it continues what it finds.
    Raises UserError when a stage fails.
    """
    if not CONFIGS.is_dir():
        raise UserError(f"no {CONFIGS} here: run the demo in the root of the repository")
    output.mkdir(parents=True, exist_ok=True)
    extract, train = _configurations(output.resolve(), steps)
    seconds: dict[str, float] = {}
    with bars() as console:
        console.print(f"[bold]DFlash demo[/] in {output}: SmolLM2-135M-Instruct learns to be drafted for")
        _timed(seconds, "target", lambda: write_demo_target(Path(extract.target.path)))
        with _private_prefect(output):
            from flows.extract import extract_hidden_states
            from flows.train import train_drafter

            dataset = _timed(
                seconds, "extract", lambda: _result(extract_hidden_states(extract, return_state=True))
            )
            summary = _timed(seconds, "train", lambda: _result(train_drafter(train, return_state=True)))
    report = _report(Path(train.output), dataset, summary, seconds)
    (output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    _show(report, Console())
    return report


def _configurations(output: Path, steps: int | None) -> tuple[ExtractConfig, TrainConfig]:
    """The demo's configurations with every path moved to `output`, trained for `steps` if given."""
    extract = load_config(ExtractConfig, CONFIGS / "extract.yaml")
    train = load_config(TrainConfig, CONFIGS / "train.yaml")
    assert extract.responses is not None
    target, store = str(output / "target"), str(output / "store")
    extract = extract.model_copy(
        update={
            "store": store,
            "target": extract.target.model_copy(update={"path": target}),
            "responses": extract.responses.model_copy(update={"output": str(output / "responses")}),
        }
    )
    update: dict[str, Any] = {"dataset": store, "target": target, "output": str(output / "training")}
    if steps is not None:
        assert train.evaluation is not None
        update["training"] = train.training.model_copy(update={"max_steps": steps})
        # A drafter that has learned little takes longest to decode with.
        update["evaluation"] = train.evaluation.model_copy(update={"prompts_per_family": SHORTLY_EVALUATED})
        update["output"] = str(output / f"training-{steps}")  # another training, not a part of the whole one
    return extract, train.model_copy(update=update)


@contextmanager
def _private_prefect(output: Path) -> Iterator[None]:
    """Prefect without any server to set up: one that is running here already, or a temporary one whose
    database lies in the output folder.
    """
    from flows.cli import prefect_server

    home = output / "prefect"
    home.mkdir(exist_ok=True)
    os.environ["PREFECT_HOME"] = str(home.resolve())
    os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "WARNING"
    os.environ.pop("PREFECT_API_URL", None)
    with prefect_server():
        yield


def _timed(seconds: dict[str, float], stage: str, work: Callable[[], Result]) -> Result:
    started = time.monotonic()
    result = work()
    seconds[stage] = round(time.monotonic() - started, 1)
    return result


def _result(state: Any) -> Any:
    """What a finished run returned. Raises UserError when it failed."""
    if state.is_completed():
        return state.result()
    raise UserError(state.message or state.name)


def _report(
    training: Path, dataset: str, summary: dict[str, Any], seconds: dict[str, float]
) -> dict[str, Any]:
    from storage.dataset import open_dataset

    data = open_dataset(dataset)
    manifest = data.manifest()
    families = summary["acceptance"]["families"]
    return {
        "acceptance_length_trained_on": families[TRAINED_ON]["acceptance_length"],
        "acceptance_length_held_out": families[HELD_OUT]["acceptance_length"],
        "acceptance_length_plain_target": 1.0,
        "lossless": summary["acceptance"]["lossless"],
        "ties": summary["acceptance"]["ties"],
        "speed_up_trained_on": families[TRAINED_ON]["speed_up"],
        "speed_up_held_out": families[HELD_OUT]["speed_up"],
        "texts_equal_to_greedy": {name: family["equal_texts"] for name, family in families.items()},
        "prompts": {name: family["prompts"] for name, family in families.items()},
        "tokens": data.plan.tokens,
        "bytes_per_token": round(manifest.bytes / data.plan.tokens, 1),
        "relative_error": manifest.relative_error,
        "seconds": {**seconds, "total": round(sum(seconds.values()), 1)},
        "dataset": dataset,
        "drafter": str(training / "drafter"),
        "plots": [str(training / "training.png"), str(training / "acceptance.png")],
        "versions": summary["versions"],
    }


def _show(report: dict[str, Any], console: Console) -> None:
    table = Table(title="Tokens per target call (greedy decoding)", title_justify="left")
    for column in ("prompts", "plain target", "with the drafter", "speed-up", "texts equal to greedy"):
        table.add_column(column, justify="left" if column == "prompts" else "right")
    for name, key in ((TRAINED_ON, "trained_on"), (HELD_OUT, "held_out")):
        equal, prompts = report["texts_equal_to_greedy"][name], report["prompts"][name]
        length, speed_up = report[f"acceptance_length_{key}"], report[f"speed_up_{key}"]
        table.add_row(name, "1.00", f"{length:.2f}", f"{speed_up:.2f}x", f"{equal} of {prompts}")
    console.print(table)
    proof = "is" if report["lossless"] else "IS NOT"
    but = ", but for ties of floating point" if report["lossless"] and report["ties"] else ""
    console.print(f"Speculative output {proof} the target's own greedy output{but}.")
    console.print(
        f"{report['tokens']} tokens stored in {report['bytes_per_token']:.0f} bytes each; "
        f"{report['seconds']['total']:.0f} s in all: {report['seconds']}"
    )
    console.print(f"data set   {report['dataset']}\ndrafter    {report['drafter']}", soft_wrap=True)
    console.print("plots      " + "\n           ".join(report["plots"]), soft_wrap=True)
    console.print(
        "\nNext: `dflash shards list` on the data set; `dflash up` for the Prefect UI and the deployments; "
        "configs/qwen3-8b for a real target on GPUs."
    )
