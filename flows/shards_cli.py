"""`dflash shards`: what a data set holds, whether it is whole, and how to mend it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from storage.dataset import Dataset, DatasetError, ShardRecord, open_dataset
from storage.dataset_spec import PLAN_KEY, SPEC_KEY
from storage.manifest import Totals
from storage.objects import ObjectInfo, ObjectNotFound, Store, open_store
from storage.verify import (
    Depth,
    ShardFinding,
    damaged_inputs,
    named_now,
    orphans,
    restore_scales,
    verify_dataset,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="List, show, verify and repair the shards of a data set.",
)

Address = Annotated[str, typer.Argument(metavar="URI", help="Data set: a folder, file:///... or s3://...")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Threads = Annotated[int, typer.Option(min=1, help="Shards checked at a time.")]


_ONLY_JSON = {"supervised", "row_groups", "object"}
"""Columns of `list` that a terminal has no room for."""
_UNPLANNED = "no plan: its creation did not finish; run the extraction again"
_NEVER_CUT = 10_000
"""Width that tables are laid out for: names are there to be copied; a narrow terminal wraps their lines."""


class Look(StrEnum):
    """How far `verify` looks."""

    sizes = "sizes"
    bytes = "bytes"
    cells = "cells"


@app.command("list")
def list_shards(uri: Address, as_json: AsJson = False) -> None:
    """List the shards of a data set, or the data sets of a store."""
    store = open_store(uri)
    rows = [] if _holds(store, SPEC_KEY) else [_dataset_row(child) for child in _datasets_in(store)]
    planned = [row for row in rows if row.get("problem") != _UNPLANNED]
    if not rows or (len(planned) == 1 and "problem" not in planned[0]):  # the one that `show` takes
        rows = _shard_rows(open_dataset(uri))
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    sound = [row for row in rows if "problem" not in row]
    if sound:
        _print_table([{name: row[name] for name in row if name not in _ONLY_JSON} for row in sound])
    for row in rows:
        if "problem" in row:
            typer.echo(f"! {row['data_set']}: {row['problem']}")


@app.command()
def show(uri: Address, as_json: AsJson = False) -> None:
    """Say what a data set is and holds: target, tokens, sizes and errors per layer, lengths, what lacks."""
    facts = _facts(open_dataset(uri))
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        _print_facts(facts)


@app.command()
def verify(
    uri: Address,
    look: Annotated[
        Look,
        typer.Option(help="sizes: of shards alone; bytes: every digest, the input's too; cells: decode all."),
    ] = Look.bytes,
    threads: Threads = 4,
    as_json: AsJson = False,
) -> None:
    """Check every shard against its commit record. Exit code 1 when any is missing, corrupt or unchecked."""
    dataset = open_dataset(uri)
    findings = _verify(dataset, look.value, threads, quiet=as_json)
    inputs = damaged_inputs(dataset, look.value, threads)
    unread = orphans(dataset) if all(f.state != "corrupt" for f in findings) else []
    unfinished = list(dataset.store.abort_unfinished("", dry_run=True))
    bad = [finding for finding in findings if finding.state != "good"]
    if as_json:
        print(json.dumps(_verdict(dataset, findings, inputs, unread, unfinished), indent=1))
    else:
        for key in inputs:
            typer.echo(
                f"{key} is gone or damaged: the input of shards still to be written, and of verification"
            )
        for finding in bad:
            typer.echo(f"shard {finding.shard} {finding.state}: {finding.problem}")
        good = sum(finding.state == "good" for finding in findings)
        seal = "sealed" if dataset.sealed else "not sealed"
        typer.echo(f"{good} of {len(findings)} shards good, {seal}; {dataset.uri}")
        if unread or unfinished:
            typer.echo(
                f"left by workers that were killed, never read: {len(unread)} objects, {len(unfinished)} "
                f"unfinished uploads; `dflash shards repair {dataset.uri}` removes those older than a day"
            )
    if bad or inputs:
        raise typer.Exit(1)


@app.command()
def repair(
    uri: Address,
    look: Annotated[Look, typer.Option(help="How far to look for corrupt shards; see verify.")] = Look.bytes,
    threads: Threads = 4,
    leftovers: Annotated[
        float, typer.Option(min=0, help="Remove unread leftovers older than so many hours.")
    ] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Forget corrupt shards, so that the next extraction writes just them; remove old leftovers."""
    dataset = open_dataset(uri)
    if not dry_run and restore_scales(dataset):
        typer.echo("put the scales back from a shard's footer", err=True)
        dataset = open_dataset(uri)
    inputs = damaged_inputs(dataset, look.value, threads)
    findings = _verify(dataset, look.value, threads, quiet=as_json)
    corrupt = sorted(finding.shard for finding in findings if finding.state == "corrupt")
    missing = sorted(finding.shard for finding in findings if finding.state == "missing")
    if not dry_run:
        for shard in corrupt:
            dataset.drop(shard)
    removed = [] if dry_run and corrupt else _remove_leftovers(dataset, leftovers * 3600, dry_run)
    if inputs and not dry_run:
        dataset.drop_plan(inputs)
    waiting = sorted(corrupt + missing)
    what = ", ".join(([f"shards {_ranges(waiting)}"] if waiting else []) + inputs)
    command = f"dflash extract --config FILE   # as before; writes just {what}"
    if as_json:
        result = {
            "uri": dataset.uri,
            "dropped": corrupt,
            "missing": missing,
            "inputs": inputs,
            "removed": removed,
            "dry_run": dry_run,
        }
        print(json.dumps(result | {"next": command if waiting or inputs else None}, indent=1))
        return
    for finding in findings:
        # Without the advice to do what is done here.
        problem = finding.problem.partition(f"; `dflash shards repair {dataset.uri}`")[0]
        if finding.state == "corrupt":
            typer.echo(f"{'would drop' if dry_run else 'dropped'} shard {finding.shard}: {problem}")
        if finding.state == "unchecked":
            typer.echo(f"kept shard {finding.shard}: {problem}")
    for key in removed:
        typer.echo(f"{'would remove' if dry_run else 'removed'} {key}")
    for key in inputs:
        typer.echo(f"{'would drop' if dry_run else 'dropped'} {key}: gone or damaged")
    typer.echo(f"next: {command}" if waiting or inputs else "every shard is good: nothing to extract")


def _verify(dataset: Dataset, depth: Depth, threads: int, quiet: bool) -> list[ShardFinding]:
    total = len(dataset.plan.shards)
    findings = []
    with tqdm(total=total, unit="shard", desc="verify", disable=quiet or None) as bar:
        read = 0
        for finding in verify_dataset(dataset, depth, threads=threads):
            findings.append(finding)
            read += finding.bytes
            bar.set_postfix_str(f"{read / 1e6:,.0f} MB", refresh=False)
            bar.update()
    return findings


def _verdict(
    dataset: Dataset,
    findings: list[ShardFinding],
    inputs: list[str],
    unread: list[ObjectInfo],
    unfinished: list[str],
) -> dict[str, Any]:
    states = Counter(finding.state for finding in findings)
    return {
        "uri": dataset.uri,
        "sealed": dataset.sealed,
        "good": states["good"],
        "missing": [finding.shard for finding in findings if finding.state == "missing"],
        "corrupt": {f.shard: f.problem for f in findings if f.state == "corrupt"},
        "unchecked": {f.shard: f.problem for f in findings if f.state == "unchecked"},
        "inputs": inputs,
        "bytes": sum(finding.bytes for finding in findings),
        "orphans": [info.key for info in unread],
        "unfinished_uploads": unfinished,
    }


def _remove_leftovers(dataset: Dataset, older_than: float, dry_run: bool) -> list[str]:
    """Remove orphans and unfinished uploads that no living worker can still need."""
    removed = []
    for info in orphans(dataset):
        if time.time() - info.modified >= older_than and not named_now(dataset, info.key):
            removed.append(info.key)
            if not dry_run:
                dataset.store.delete(info.key)
    return removed + list(dataset.store.abort_unfinished("", older_than, dry_run))


# What there is.


def _holds(store: Store, key: str) -> bool:
    try:
        store.head(key)
    except ObjectNotFound:
        return False
    return True


def _datasets_in(store: Store) -> list[Store]:
    """Return the folders of a store that hold a data set, finished or not."""
    children = (store.child(folder) for folder in store.folders())
    return [child for child in children if _holds(child, SPEC_KEY) or _holds(child, PLAN_KEY)]


def _dataset_row(store: Store) -> dict[str, Any]:
    """Describe the data set in a folder, or say as its "problem" why that cannot be done."""
    name = store.uri.rpartition("/")[2]
    if not _holds(store, PLAN_KEY):
        return {"data_set": name, "problem": _UNPLANNED}
    if not _holds(store, SPEC_KEY):
        return {"data_set": name, "problem": f"{SPEC_KEY} is gone; put it back"}
    try:
        dataset = open_dataset(store.uri)
        plan, missing = dataset.plan, dataset.missing()
    except DatasetError as error:
        return {"data_set": name, "problem": str(error)}
    return {
        "data_set": name,
        "target": dataset.spec.target.name,
        "codec": dataset.spec.codec,
        "samples": plan.samples,
        "tokens": plan.tokens,
        "shards": len(plan.shards),
        "missing": len(missing),
        "sealed": dataset.sealed,
    }


def _shard_rows(dataset: Dataset) -> list[dict[str, Any]]:
    committed = {record.shard: _committed_row(dataset, record) for record in dataset.iter_records()}
    return [
        {
            "shard": planned.shard,
            "samples": planned.samples,
            "tokens": planned.tokens,
            "supervised": planned.supervised,
            **committed.get(planned.shard, {"state": "missing"}),
        }
        for planned in dataset.plan.shards
    ]


def _committed_row(dataset: Dataset, record: ShardRecord) -> dict[str, Any]:
    return {
        "state": "committed",
        "bytes": record.size,
        "bytes_per_token": round(record.size / record.tokens, 1),
        "ratio": _ratio(dataset, record.tokens, record.size),
        "row_groups": len(record.row_groups),
        "object": record.object,
    }


def _facts(dataset: Dataset) -> dict[str, Any]:
    plan, spec = dataset.plan, dataset.spec
    totals, done, versions = Totals(dataset.columns), set(), set()
    for record in dataset.iter_records():
        totals.add(record)
        done.add(record.shard)
        versions.add(json.dumps(record.versions, sort_keys=True))
    tokens, size = totals.tokens, totals.bytes
    bf16 = 2 * spec.target.hidden_size * tokens
    layers = {}
    for column, error in totals.errors.items():
        held = totals.column_bytes[column]
        layers[column] = {
            "bytes": held,
            "bits_per_value": round(16 * held / bf16, 3) if bf16 else None,
            "ratio": round(bf16 / held, 3) if held else None,
            "relative_error": error.relative_error,
            "energy_error": error.energy_error,
        }
    return {
        "uri": dataset.uri,
        "fingerprint": dataset.fingerprint,
        "sealed": dataset.sealed,
        "spec": spec.model_dump(mode="json"),
        "samples": plan.samples,
        "tokens": plan.tokens,
        "supervised": plan.supervised,
        "duplicates_dropped": plan.duplicates_dropped,
        "shards": len(plan.shards),
        "missing": [p.shard for p in plan.shards if p.shard not in done],
        "bytes": size,
        "bytes_per_token": round(size / tokens, 1) if tokens else None,
        "ratio": _ratio(dataset, tokens, size),
        "layers": layers,
        "lengths": _lengths(dataset),
        "versions": [json.loads(version) for version in sorted(versions)],
    }


def _ratio(dataset: Dataset, tokens: int, size: int) -> float | None:
    """Bytes of the same states in bf16 for each byte of shards that hold so many tokens."""
    return round(dataset.spec.token_bytes * tokens / size, 3) if size else None


def _lengths(dataset: Dataset) -> dict[str, int]:
    """Histogram of sample lengths in powers of two: "lowest-highest" -> samples."""
    tokens_N = dataset.index.tokens_N
    counts = Counter((int(length) - 1).bit_length() for length in tokens_N)
    return {f"{2 ** (bits - 1) + 1 if bits else 1}-{2**bits}": counts[bits] for bits in sorted(counts)}


def _print_facts(facts: dict[str, Any]) -> None:
    spec, console = facts["spec"], Console()
    typer.echo(facts["uri"])
    done = facts["shards"] - len(facts["missing"])
    state = "sealed" if facts["sealed"] else "NOT sealed"
    lines = {
        "target": "{name} ({model_type}, width {hidden_size})".format(**spec["target"]),
        "taps": f"{spec['capture']['tap_layer_ids']}, last hidden state: {spec['capture']['last_hidden']}",
        "codec": spec["codec"],
        "samples": f"{facts['samples']:,} ({facts['duplicates_dropped']:,} with an id seen before dropped)",
        "tokens": f"{facts['tokens']:,}, {facts['supervised']:,} of them supervised",
        "shards": f"{done:,} of {facts['shards']:,}, {state}",
        "size": f"{facts['bytes'] / 1e6:,.1f} MB, {facts['bytes_per_token']} bytes a token, "
        f"{facts['ratio']}x smaller than bf16"
        if facts["bytes"]
        else "nothing is captured yet",
        "fingerprint": facts["fingerprint"],
    }
    for name, line in lines.items():
        console.print(f"  {name:12} {line}", highlight=False, soft_wrap=True)
    if facts["missing"]:
        console.print(f"  [red]missing      shards {_ranges(facts['missing'])}[/red]", highlight=False)
    _print_table([{"layer": name} | layer for name, layer in facts["layers"].items()])
    most = max(facts["lengths"].values(), default=1)
    for name, count in facts["lengths"].items():
        console.print(f"  {name:>15} tokens {count:10,} {'#' * -(-40 * count // most)}", highlight=False)


def _print_table(rows: list[dict[str, Any]]) -> None:
    if not rows:
        raise DatasetError("there is nothing to list")
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*[name.replace("_", " ") for name in names])
    for row in rows:
        table.add_row(*[_cell(row.get(name)) for name in names])
    Console(width=_NEVER_CUT).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 7 -> "0-2, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
