"""The `dflash` command. What a subcommand needs is imported when it runs, so that help is there at once."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dflash_core.configuration import UserError

USER_ERROR = 2
"""Exit code when the user can mend it; 1 when the work itself failed."""


class Commands(TyperGroup):
    """Says what the user can mend in one line, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            typer.echo(f"error: {error}", err=True)
            sys.exit(USER_ERROR)


def finite(value: float) -> float:
    """Refuse nan and inf, which pass for numbers within bounds."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number.")
    return value


app = typer.Typer(
    name="dflash",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="From chats to a DFlash drafter: capture hidden states, train from them, export, evaluate.",
)

ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="YAML file of the run.", metavar="FILE")]
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command()
def extract(
    config: ConfigFile,
    only: Annotated[
        str | None, typer.Option(help="Redo just these shards, e.g. 3,17.", metavar="N,N")
    ] = None,
    store: Annotated[str | None, typer.Option(help="Put the data set here instead.", metavar="URI")] = None,
) -> None:
    """Turn chats into a sealed data set of the target's hidden states; run again to continue."""
    from flows.config import ExtractConfig, load_config

    settings = load_config(ExtractConfig, config)
    shards = [] if only is None else parse_numbers(only)
    goes_on = "captures those that are missing" if only is None else f"redoes all of {only}"
    kept = f"finished shards are kept in {store or settings.store}, and the same command {goes_on}"
    with interrupted_in_words(kept), prefect_server():
        from flows.extract import extract_hidden_states

        finish(extract_hidden_states(settings, only=shards, store=store, return_state=True))


@app.command()
def train(
    config: ConfigFile,
    dataset: Annotated[str | None, typer.Option(help="Train from this one instead.", metavar="URI")] = None,
) -> None:
    """Train a drafter from a sealed data set, export and evaluate it; run again to continue."""
    from flows.config import TrainConfig, load_config

    settings = load_config(TrainConfig, config)
    kept = (
        f"checkpoints are kept in {settings.output}, and the same command continues from the latest, or from "
        "the start where there is none"
    )
    with interrupted_in_words(kept), prefect_server():
        from flows.train import train_drafter

        finish(train_drafter(settings, dataset=dataset, return_state=True))


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for everything it makes.")] = Path("runs/demo"),
    steps: Annotated[
        int | None, typer.Option(help="Train for so many steps: fewer are quicker, and earn less.", min=1)
    ] = None,
) -> None:
    """Run the whole pipeline with a small real chat model on the CPU, in minutes."""
    from flows.demo import demo as run

    run(output, steps)


@app.command()
def doctor(
    store: Annotated[str | None, typer.Option(help="Try out this object store.", metavar="URI")] = None,
    run: Annotated[
        str | None, typer.Option(help="Compare with a report.json or a data set.", metavar="PATH")
    ] = None,
) -> None:
    """Say what this environment is, what is missing for work or for speed, and how to mend it."""
    from flows.doctor import examine, lines

    findings = examine(store, run)
    for line in lines(findings):
        typer.echo(line)
    if any(finding.state == "broken" for finding in findings):
        sys.exit(1)


@app.command()
def plan(
    extraction: Annotated[
        Path, typer.Option("--extract", help="YAML file of the extraction.", metavar="FILE")
    ],
    training: Annotated[Path, typer.Option("--train", help="YAML file of the training run.", metavar="FILE")],
    tokens: Annotated[float, typer.Option(min=1, callback=finite, help="Tokens of the data set.")] = 1e9,
    extraction_gpus: Annotated[
        int | None,
        typer.Option(
            "--extract-gpus", min=1, help="Default: as configured, else those of this machine, else 1."
        ),
    ] = None,
    training_gpus: Annotated[
        int | None, typer.Option("--train-gpus", min=1, help="Default: as for extraction.")
    ] = None,
    network_gbit: Annotated[
        float,
        typer.Option(min=0.001, callback=finite, help="Between the store and all GPUs of a stage together."),
    ] = 25.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Work out storage, hours, network rates and the bottleneck of a project before it begins."""
    import json

    from flows import capacity
    from flows.config import ExtractConfig, TrainConfig, load_config

    values = capacity.capacity(
        load_config(ExtractConfig, extraction),
        load_config(TrainConfig, training),
        tokens,
        capacity.Rates(network_gbit=network_gbit),
        extraction_gpus,
        training_gpus,
    )
    if as_json:
        typer.echo(json.dumps(capacity.as_json(values), indent=1))
        return
    for name, value in capacity.table(values, tokens):
        typer.echo(f"{name:>14}  {value}")


@app.command()
def up(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the Prefect server.")] = 4200,
    host: Annotated[str, typer.Option(help="Address that the server listens on.")] = "127.0.0.1",
    limit: Annotated[int, typer.Option(min=1, help="Flow runs at a time.")] = 3,
    logs: Annotated[Path, typer.Option(help="Folder for the server's log.")] = Path("runs/up"),
) -> None:
    """Start a Prefect server with a worker and the deployments on this machine; Ctrl-C stops it."""
    from flows.up import up as run

    run(host, port, limit, logs)


@app.command()
def join(
    limit: Annotated[int, typer.Option(min=1, help="Flow runs at a time.")] = 3,
    healthcheck: Annotated[bool, typer.Option(help="Answer GET /health on port 8080.")] = False,
) -> None:
    """Work for the Prefect server at PREFECT_API_URL: register the deployments, take runs; Ctrl-C stops."""
    from flows.up import join as run

    run(limit, healthcheck)


@app.command(context_settings=PASSED_ON)
def shards(ctx: typer.Context) -> None:
    """List, show, verify and repair the shards of a data set."""
    from flows.shards_cli import app as shards_app

    shards_app(ctx.args, prog_name="dflash shards")


@app.command(context_settings=PASSED_ON)
def cache(ctx: typer.Context) -> None:
    """List, compare, verify, pin and prune the versions of the compile cache."""
    from flows.cache_cli import app as cache_app

    cache_app(ctx.args, prog_name="dflash cache")


@app.command()
def respond(config: ConfigFile) -> None:
    """Have the target write the responses of a set of chats again; run again to continue."""
    from flows.config import load_config
    from flows.respond import RespondConfig
    from flows.respond import respond as run

    with progress_line() as show_progress:
        report = run(load_config(RespondConfig, config), show_progress)
    typer.echo(f"{report.written} written, {report.resumed} found, {sum(report.bad.values())} bad")


@app.command()
def evaluate(config: ConfigFile) -> None:
    """Measure how many tokens a target call earns with a drafter, by real speculative decoding."""
    from flows.acceptance_report import check_gates, print_report
    from flows.config import load_config
    from flows.evaluate import EvaluateConfig
    from flows.evaluate import evaluate as run

    settings = load_config(EvaluateConfig, config)
    with progress_line() as show_progress:
        report = run(settings, show_progress)
    print_report(report)
    typer.echo(f"acceptance.json and acceptance.png are in {settings.output}")
    check_gates(report, settings.minimum_acceptance_length, require_lossless=settings.require_lossless)


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="Exported drafter, ours or another trainer's.")],
) -> None:
    """Say whether vLLM, SGLang and z-lab's loader would run an exported drafter as it was trained."""
    from dflash_core.export_check import check_export

    for view in check_export(folder):
        typer.echo(f"{view.engine}: as it was trained")
        for note in view.notes:
            typer.echo(f"  {note}")


def parse_numbers(text: str) -> list[int]:
    """Read "3,17" as numbers. Raises UserError."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--only takes numbers of shards with commas between them, not {text!r}") from None


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[int, int | None], None]]:
    """Give what rewrites one line of the terminal; the line ends with the block, also before an error."""
    begun = False

    def show(done: int, total: int | None) -> None:
        nonlocal begun
        begun = True
        typer.echo(f"\r{done} of {total if total is not None else '?'}", nl=False, err=True)

    try:
        yield show
    finally:
        if begun:
            typer.echo(err=True)


@contextlib.contextmanager
def interrupted_in_words(kept: str) -> Iterator[None]:
    """Say as the last line, where Ctrl-C ends the block, what is kept and how the run is continued."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {kept}", err=True)
        raise


@contextlib.contextmanager
def prefect_server() -> Iterator[None]:
    """Decide which Prefect server the runs in this block speak to.

    A server that is configured and answers is used, else one is started for as long as needed.
    """
    from flows.up import SERVER_RETRIES, answers, temporary_server

    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", str(SERVER_RETRIES))
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

    from flows.run_log import keep_last_words_for_the_command

    keep_last_words_for_the_command()
    url = PREFECT_API_URL.value()
    if url and answers(url):
        yield
        return
    if "PREFECT_API_URL" in os.environ:
        raise UserError(f"no Prefect server answers at {url}: start it, or unset PREFECT_API_URL")
    where = f"at {url}" if url else "configured"
    typer.echo(
        f"no Prefect server {where}: using a temporary one (`dflash up` starts a lasting one)", err=True
    )
    log = PREFECT_HOME.value() / "temporary-server.log"
    with temporary_server(log) as api, temporary_settings({PREFECT_API_URL: api}):
        yield


def finish(state: Any) -> None:
    """End the process as the run ended. Raises UserError when that was its end."""
    if state.is_completed():
        return
    outcome = state.result(raise_on_failure=False)
    if isinstance(outcome, UserError):
        raise outcome
    typer.echo(f"{state.name}: {state.message}", err=True)
    sys.exit(1)


if __name__ == "__main__":
    app()
