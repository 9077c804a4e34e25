"""Measures the store against the layouts in common use: one torch.save or safetensors file a sample.

python benchmarks/store.py --json
python benchmarks/store.py --states FILE --json    # real states, of `benchmarks/codec.py --cache FILE`

The same samples are written and read in five ways (torch.save, safetensors, and the store with the codecs
lossless, tolerance=0.1 and tolerance=0.3) to

  local    a local folder
  s3       a real S3 server (SeaweedFS, started here: it competes for the same cores, and nothing is far)
  s3-far   the same server behind a relay that answers after 20 ms and carries 80 MB/s a connection

Reading follows the plan of a training epoch and fills packed rows [C, L*D] with the bf16 states of all
layers; `--threads` files, parts or row groups are on their way at a time in every layout (row groups of the
store: `--fetch-threads`, where that is given).

Everything is written, and the machine comes to rest, before anything is read. Reading goes in `--epochs`
rounds, so that a machine that slows down, or a server with work of its own, meets all layouts. In a round
each layout has its turn, in a process of its own that lives on: three epochs that do not count, until reading
is as far ahead as in a long run, and the mean of two that do. Between its turns nothing of a layout is open
that could read ahead beside the others, or before its clock starts. "read" of a local folder comes from the
disk: what the page cache holds of it is dropped before every row. "read_cached" comes from the page cache.

Reported for each: write and read tokens_s, cpu_s (of its process, without the server), bytes_per_token, and
rss_MB: how much the peak of resident memory grew; medians over the rounds, which stand beside them (of rss_MB
the largest). "cpu_s_without_zstd" leaves out what zstandard takes to decode the same cells right afterwards.
`ratios` compares with the two file layouts, above 1 the store is better: median, least and largest of the
ratios within a round. In common use nobody syncs such files to the disk; here every layout does.

With `--device cuda` states come from the GPU and rows go there, the arithmetic of the codecs runs there, and
all phases share one process (rss_MB then says little).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from far import far_away
from safetensors.torch import save_file
from store_layouts import (
    CODECS,
    FILES,
    Figures,
    Layout,
    States,
    read_cached,
    read_from_disk,
    read_states,
    write,
)
from synthetic import synthetic_states

from dflash_core.records import tap_column


def main() -> None:
    options = parse_options()
    work = Path(tempfile.mkdtemp(prefix="store-bench-", dir=options.work))
    try:
        report = run(options, work)
    finally:
        shutil.rmtree(work)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        print_report(report)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--states", type=Path, help="safetensors of real states named <sample>.<column>")
    parser.add_argument("--tokens", type=int, default=6_000, help="of random states, without --states")
    parser.add_argument("--width", type=int, default=5120, help="that of a 27B target by default")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--length", type=int, default=300, help="mean tokens of a sample")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument(
        "--fetch-threads", type=int, help="row groups on their way at a time (default: --threads)"
    )
    parser.add_argument("--device", default="cpu", help="where states come from and go to")
    parser.add_argument("--stores", default="local,s3,s3-far")
    parser.add_argument("--epochs", type=int, default=5, help="rounds of reading")
    parser.add_argument("--work", type=Path, help="folder for what is written (default: the temporary one)")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def run(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    states = read_states(options.states) if options.states else random_states(options)
    save_file({f"{i}.{c}": t for i, sample in enumerate(states) for c, t in sample.items()}, work / "states")
    layout = Layout(
        name="",
        uri="",
        states=work / "states",
        lengths=tuple(len(next(iter(sample.values()))) for sample in states),
        columns=tuple(states[0]),
        width=next(iter(states[0].values())).shape[1],
        device=options.device,
        threads=options.threads,
        fetch_threads=options.fetch_threads or options.threads,
    )
    about = {
        "samples": len(states),
        "tokens": layout.tokens,
        "columns": len(layout.columns),
        "width": layout.width,
        "bf16_bytes_per_token": 2 * layout.width * len(layout.columns),
        "states": str(options.states.name) if options.states else "random, with the statistics of real ones",
        "cores": len(os.sched_getaffinity(0)),
        "threads": layout.threads,
        "fetch_threads": layout.fetch_threads,
        "rounds": options.epochs,
        "device": layout.device,
    }
    del states
    results: dict[str, dict[str, Figures]] = {}
    for store in options.stores.split(","):
        with address_of(store, work) as uri:
            layouts = [
                layout._replace(name=name, uri=f"{uri}/{name.replace('=', '-')}")
                for name in (*FILES, *CODECS)
            ]
            results[store] = measure(store, layouts, options.epochs)
    ratios = {store: ratios_of(of_store) for store, of_store in results.items()}
    return {"data": about, "results": results, "ratios": ratios}


@contextmanager
def address_of(store: str, work: Path) -> Iterator[str]:
    if store == "local":
        yield str(work / "local")
        return
    from tests.storage.seaweed import running_server

    (work / store).mkdir()
    with running_server(work / store) as server, ExitStack() as stack:
        endpoint = stack.enter_context(far_away(server.port)) if store == "s3-far" else server.endpoint
        os.environ.update(server.environment_through(endpoint))
        yield server.uri


def random_states(options: argparse.Namespace) -> States:
    random = np.random.default_rng(0)
    states: States = []
    while (done := sum(len(next(iter(sample.values()))) for sample in states)) < options.tokens:
        length = min(
            int(random.integers(options.length // 3, 5 * options.length // 3)), options.tokens - done
        )
        columns = [tap_column(layer) for layer in range(options.layers)]
        seeds = [1000 * len(states) + layer for layer in range(options.layers)]
        states.append(
            {
                c: synthetic_states(length, options.width, s, options.device).cpu()
                for c, s in zip(columns, seeds, strict=True)
            }
        )
    return states


# Measuring: each layout in a process of its own, so that its memory is its own.


def measure(store: str, layouts: Sequence[Layout], rounds: int) -> dict[str, Figures]:
    results: dict[str, Figures] = {}
    for layout in layouts:
        print(f"{store:>8} {layout.name}", file=sys.stderr, flush=True)
        with process_for(layout) as call:
            results[layout.name] = {"write": call(write, layout)}
        results[layout.name]["bytes_per_token"] = results[layout.name]["write"].pop("bytes_per_token")
    rest()
    phases = {"read": read_cached}
    if store == "local":
        phases = {"read": read_from_disk, "read_cached": read_cached}
    with ExitStack() as stack:
        turns = deque((layout, stack.enter_context(process_for(layout))) for layout in layouts)
        for phase, read in phases.items():
            found: dict[str, list[Figures]] = {layout.name: [] for layout in layouts}
            for number in range(rounds):
                print(f"{store:>8} {phase}, round {number + 1}", file=sys.stderr, flush=True)
                for layout, call in turns:
                    found[layout.name].append(call(read, layout))
                turns.rotate(-1)
            for name, of_layout in found.items():
                results[name][phase] = summary(of_layout)
    return results


@contextmanager
def process_for(layout: Layout) -> Iterator[Callable[[Callable[[Layout], Figures], Layout], Figures]]:
    """Give what calls a function in one new process; or in this one, for a GPU."""
    if layout.device != "cpu":
        torch.set_num_threads(1)
        yield lambda work, layout: work(layout)
        return
    with multiprocessing.get_context("spawn").Pool(1, torch.set_num_threads, (1,)) as pool:
        yield lambda work, layout: pool.apply(work, (layout,))


def rest(at_most: float = 30.0) -> None:
    """Wait until nothing keeps this machine busy, for so many seconds at most: others may work here."""
    end, share = time.monotonic() + at_most, 1.0
    while share > 0.05 and time.monotonic() < end:
        before, began = busy_seconds(), time.monotonic()
        time.sleep(2.0)
        share = (busy_seconds() - before) / (time.monotonic() - began)


def busy_seconds() -> float:
    """Time that all cores together have spent on anything, waiting for disks included."""
    user, nice, system, _, waiting, *interrupts = Path("/proc/stat").read_text().split("\n")[0].split()[1:8]
    ticks = sum(map(int, (user, nice, system, waiting, *interrupts)))
    return ticks / os.sysconf("SC_CLK_TCK")


# Reporting.


def summary(rounds: list[Figures]) -> Figures:
    """Of each figure the median over the rounds; of memory the largest."""
    of_rounds = {name: [figures[name] for figures in rounds] for name in rounds[0]}
    medians = {name: median(found) for name, found in of_rounds.items()}
    return medians | {"rss_MB": max(of_rounds["rss_MB"]), "rounds": rounds}


def ratios_of(results: dict[str, Figures]) -> dict[str, Any]:
    """How many times better than each of the two file layouts; above 1 is better."""
    ratios: dict[str, Any] = {}
    for codec in CODECS:
        ours = results[codec]
        for files in FILES:
            theirs = results[files]
            found: Figures = {"smaller": round(theirs["bytes_per_token"] / ours["bytes_per_token"], 2)}
            for phase in ("write", "read", "read_cached"):
                if phase in ours:
                    found |= {f"{phase}_{k}": v for k, v in compared(theirs[phase], ours[phase]).items()}
            ratios.setdefault(codec, {})[f"over {files}"] = found
    return ratios


def compared(theirs: Figures, ours: Figures) -> Figures:
    """Ratios of one phase, each round by itself: median, least and largest; where there was one, itself."""
    rounds = list(zip(theirs.get("rounds", [theirs]), ours.get("rounds", [ours]), strict=True))
    ratios = {"tokens_s": [t["seconds"] / o["seconds"] for t, o in rounds]}
    for name in ("cpu_s", "cpu_s_without_zstd"):
        if name in ours:
            ratios[f"per_{name}"] = [t["cpu_s"] / o[name] for t, o in rounds]
    return {name: spread([round(ratio, 2) for ratio in found]) for name, found in ratios.items()}


def spread(ratios: list[float]) -> float | dict[str, float]:
    if len(ratios) == 1:
        return ratios[0]
    return {"median": round(median(ratios), 2), "min": min(ratios), "max": max(ratios)}


def print_report(report: dict[str, Any]) -> None:
    print(json.dumps(report["data"]))
    for store, results in report["results"].items():
        print(f"\n{store:14} bytes/token   write tok/s  cpu s   read tok/s  cpu s  cached tok/s")
        for name, found in results.items():
            cached = found.get("read_cached", {}).get("tokens_s", "")
            print(
                f"{name:14} {found['bytes_per_token']:11,.0f} {found['write']['tokens_s']:13,} "
                f"{found['write']['cpu_s']:6.1f} {found['read']['tokens_s']:12,} "
                f"{found['read']['cpu_s']:6.1f} {cached:>13}"
            )
    print(json.dumps(report["ratios"], indent=1))


if __name__ == "__main__":
    main()
