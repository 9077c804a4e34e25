"""Tables and plots of the quality run: means over seeds with their spread, from the result files."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quality_prompts import TRAINED, UNSEEN
from quality_runs import BASE, COARSE, GROUPS, LONGER, ORDER

from dflash_core.configuration import UserError

Results = list[dict[str, Any]]
PARTS = {"trained_families": "tab:blue", "unseen_families": "tab:orange"}
"""What is told apart, and its colour in plots."""


def write_report(folder: Path, others: Sequence[Path] = ()) -> str:
    """Write quality.json, tables.md and the plots into `folder`; returns the tables.

    With the folders of `others`, runs on other data, acceptance over families is given as a share of what the
    default earned in the same run. Raises UserError when one of them, or `folder` then, lacks the default.
    """
    results = _results(folder)
    if not results:
        return "no results yet"
    if others:
        results = [result for run in (folder, *others) for result in _in_shares(run)]
    by_name: dict[tuple[str, str], Results] = defaultdict(list)
    for result in results:
        by_name[result["group"], result["name"]].append(result)
    tables = [_codec_table(by_name), _family_table(by_name), _ablation_table(by_name)]
    if others:
        tables.insert(
            0, "Families together: shares of what the default earned in the same run. By family: lengths."
        )
    text = "\n\n".join(tables)
    (folder / "tables.md").write_text(text + "\n")
    (folder / "quality.json").write_text("[\n" + ",\n".join(map(_short, results)) + "\n]\n")
    _plots(by_name, "times the default's tokens a target call" if others else "tokens a target call", folder)
    return text


def _short(result: dict[str, Any]) -> str:
    """A result on one line, without the curve of its training."""
    text = json.dumps({name: value for name, value in result.items() if name != "curve"})
    return json.dumps(json.loads(text, parse_float=lambda digits: round(float(digits), 5)))


def _results(folder: Path) -> Results:
    results = [json.loads(path.read_text()) for path in sorted((folder / "results").glob("*.json"))]
    for result in results:
        decoded = folder / "decoded" / f"{result['key']}.json"
        result["decoded"] = json.loads(decoded.read_text()) if decoded.exists() else {}
        families = result["simulated"]
        result["trained_families"] = _together(families, TRAINED)
        result["unseen_families"] = _together(families, UNSEEN)
    return results


def _in_shares(folder: Path) -> Results:
    """Acceptance of each drafter as a share of the default's in the same run, its mean over seeds."""
    results = _results(folder)
    base = [result for result in results if (result["group"], result["name"]) == BASE]
    if not base:
        raise UserError(f"{folder} has no result of the default ({' '.join(BASE)}) to compare others with")
    means = {part: statistics.fmean(r[part] for r in base) for part in PARTS}
    return [
        result | {part: result[part] / mean for part, mean in means.items()} | {"run": str(folder)}
        for result in results
    ]


def _together(families: dict[str, Any], names: Any) -> float:
    """Acceptance length over all blocks of some families."""
    chosen = [families[name] for name in names if name in families]
    blocks = sum(family["blocks"] for family in chosen)
    return sum(family["tokens"] for family in chosen) / blocks if blocks else float("nan")


def _spread(values: list[float], digits: int = 2) -> str:
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [" | ".join(header), " | ".join(["---"] * len(header)), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def _codec_table(by_name: dict[tuple[str, str], Results]) -> str:
    runs = [(name, found) for (group, name), found in by_name.items() if group == "codec"]
    runs.sort(key=lambda item: -item[1][0]["costs"]["bits_per_value"])
    rows = [
        [
            name,
            f"{found[0]['costs']['bits_per_value']:.2f}",
            f"{found[0]['costs']['bytes_per_token']:.0f}",
            # Without channel scales an error can only be put in relation to the values themselves.
            f"{statistics.fmean(found[0]['costs']['relative_error']):.1%}"
            + ("" if name.startswith("tolerance") else " of the RMS"),
            str(len(found)),
            _spread([r["trained_families"] for r in found]),
            _spread([r["unseen_families"] for r in found]),
        ]
        for name, found in runs
    ]
    header = [
        "codec",
        "bits a value",
        "bytes a token",
        "error",
        "seeds",
        "trained families",
        "unseen families",
    ]
    trainings = {
        (r["steps"], r["row_tokens"], r["anchors"], r["optimizer"]) for _, found in runs for r in found
    }
    said = " and ".join(
        f"{steps:,} steps of {tokens:,} tokens and {blocks:,} blocks, {optimizer}"
        for steps, tokens, blocks, optimizer in sorted(trainings)
    )
    return f"Acceptance length on held-out chats, by codec of the training data ({said}).\n\n" + _table(
        header, rows
    )


def _family_table(by_name: dict[tuple[str, str], Results]) -> str:
    found = by_name.get(BASE) or next(iter(by_name.values()))
    rows = []
    for family in (*TRAINED, *UNSEEN):
        if family not in found[0]["simulated"]:
            continue
        simulated = _spread([r["simulated"][family]["acceptance_length"] for r in found])
        slots = [
            statistics.fmean(k)
            for k in zip(*(r["simulated"][family]["per_slot"] for r in found), strict=True)
        ]
        decoded = next((r["decoded"][family] for r in found if family in r["decoded"]), None)
        rows.append(
            [
                family + ("" if family in TRAINED else " (unseen)"),
                simulated,
                " ".join(f"{slots[k - 1]:.2f}" for k in (1, 2, 4, 8) if k <= len(slots)),
                *(_decoded_cells(decoded) if decoded else ["", "", ""]),
            ]
        )
    header = ["family", "simulated", "slots 1 2 4 8", "decoded", "speed-up", "texts equal + ties"]
    return f"By family, {found[0]['name']}.\n\n" + _table(header, rows)


def _decoded_cells(decoded: dict[str, Any]) -> list[str]:
    plain = decoded["plain_seconds"] / max(1, decoded["plain_tokens"])
    drafted = decoded["speculative_seconds"] / max(1, decoded["speculative_tokens"])
    return [
        f"{decoded['acceptance_length']:.2f}",
        f"{plain / drafted:.2f}",
        f"{decoded['equal_texts']} + {decoded['ties']} of {decoded['prompts']}",
    ]


def _recipes(by_name: dict[tuple[str, str], Results]) -> list[tuple[str, str]]:
    """All but the codecs, in the order in which they are shown."""
    keys = (key for key in by_name if key[0] != "codec")
    return sorted(keys, key=lambda key: (GROUPS.index(key[0]), ORDER.get(key, len(ORDER)), key[1]))


def _ablation_table(by_name: dict[tuple[str, str], Results]) -> str:
    keys = _recipes(by_name)
    coarse = next((i for i, key in enumerate(keys) if key[0] == "finer"), len(keys))
    keys = [BASE, *keys[:coarse], ("codec", COARSE), *keys[coarse:]]
    rows = [
        [
            group,
            name,
            str(len(found)),
            f"{found[0]['parameters'] / 1e6:.1f} M",
            f"{found[0]['anchors']} x {found[0]['block_size']}",
            _spread([r["trained_families"] for r in found]),
            _spread([r["unseen_families"] for r in found]),
        ]
        for group, name in keys
        if (found := by_name.get((group, name)))
    ]
    header = ["group", "what", "seeds", "parameters", "blocks a step", "trained families", "unseen families"]
    said = (
        f"Ablations; each changes {BASE[1]} in one point, those of the last group {COARSE}. "
        f"`combined` is Muon 2e-3 with D-PACE, by codec; `longer` the same with {LONGER} times as many steps."
    )
    return f"{said}\n\n" + _table(header, rows)


def _plots(by_name: dict[tuple[str, str], Results], unit: str, folder: Path) -> None:
    from matplotlib.figure import Figure

    for name, size, draw in (("codecs", (9, 4.4), _plot_codecs), ("ablations", (9, 4.4), _plot_ablations)):
        figure = Figure(figsize=size, layout="constrained")
        draw(by_name, unit, figure)
        figure.savefig(folder / f"{name}.png", dpi=120)


def _plot_ablations(by_name: dict[tuple[str, str], Results], unit: str, figure: Any) -> None:
    """Each recipe's acceptance beside that of the base, whose seeds spread over the shaded band."""
    runs = _recipes(by_name)[::-1]
    labels = [f"{group}: {name}" for group, name in runs]
    for axes, key in zip(figure.subplots(1, 2, sharey=True), PARTS, strict=True):
        values = [[r[key] for r in by_name[run]] for run in runs]
        axes.plot([statistics.fmean(v) for v in values], labels, "|", markersize=12, markeredgewidth=2)
        for place, seeds in enumerate(values):
            axes.plot(seeds, [place] * len(seeds), "k.", markersize=4)
        if base := [r[key] for r in by_name.get(BASE, [])]:
            axes.axvspan(min(base), max(base), color="black", alpha=0.25)
            axes.axvline(statistics.fmean(base), color="black", lw=1)
        axes.set_title(key.replace("_", " "), fontsize=10)
        axes.grid(alpha=0.3)
    figure.supxlabel(unit, fontsize=10)


def _plot_codecs(by_name: dict[tuple[str, str], Results], unit: str, figure: Any) -> None:
    """Acceptance over bits a value, for each recipe of which several codecs, or one, were tried."""
    axes = figure.subplots()
    recipes = {"codec": "AdamW", "combined": "Muon, D-PACE", "longer": f"the same, {LONGER} x the steps"}
    for (group, recipe), marker in zip(recipes.items(), "os^", strict=True):
        for key, colour in PARTS.items():
            points = sorted(
                (found[0]["costs"]["bits_per_value"], [r[key] for r in found], name)
                for (of, name), found in by_name.items()
                if of == group
            )
            if not points:
                continue
            bits = [x for x, _, _ in points]
            means = [statistics.fmean(values) for _, values, _ in points]
            spread = [statistics.stdev(values) if len(values) > 1 else 0.0 for _, values, _ in points]
            label = f"{key.replace('_', ' ')}, {recipe}"
            axes.errorbar(bits, means, yerr=spread, color=colour, marker=marker, capsize=3, label=label)
            if key == next(iter(PARTS)):
                for x, y, (_, _, name) in zip(bits, means, points, strict=True):
                    short = name.removeprefix("tolerance=")
                    axes.annotate(short, (x, y), textcoords="offset points", xytext=(3, 5), fontsize=7)
    axes.set_xlabel("bits a value in the shards")
    axes.set_ylabel(f"{unit}, held-out chats")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
