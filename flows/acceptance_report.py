"""What an evaluation found: per family of prompts and together, as JSON, plot, table and gate."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.configuration import UserError
from flows.plots import plot_acceptance

if TYPE_CHECKING:  # what measures needs transformers, which takes seconds to import
    from dflash_core.acceptance import AcceptanceStats, Difference

DIFFERENCES_SHOWN = 5
"""Texts that the terminal and the training report name; acceptance.json has all of them."""
SLOTS_SHOWN = (1, 2, 4)
WIDE, NARROW_NAME = 80, 10
"""Columns of a terminal that shows slots too, and of a family's name (it folds) where the terminal has fewer.
"""


@dataclass(frozen=True, kw_only=True)
class FamilyResult:
    """One family of prompts, measured."""

    stats: AcceptanceStats
    prompts: int
    new_tokens: int
    plain_seconds: float
    """Decoding time of the plain target (0 with a temperature)."""
    speculative_seconds: float
    differences: list[tuple[int, Difference]]
    """(prompt number, first difference) of every text that is not the plain target's."""
    passed_over: dict[str, int] = field(default_factory=dict)
    """Chats before the last of the prompts that gave none, by reason."""

    @property
    def lossless(self) -> bool:
        """Every text equals the plain target's, or leaves it at a floating-point tie."""
        return all(difference.tie for _, difference in self.differences)

    def report(self) -> dict[str, Any]:
        """The family's entry in acceptance.json."""
        timed = self.plain_seconds > 0
        return {
            **self.stats.report(),
            "prompts": self.prompts,
            "passed_over": self.passed_over,
            "new_tokens": self.new_tokens,
            "speed_up": self.plain_seconds / self.speculative_seconds if timed else None,
            "plain_seconds": self.plain_seconds,
            "speculative_seconds": self.speculative_seconds,
            "lossless": self.lossless if timed else None,
            "equal_texts": self.prompts - len(self.differences) if timed else None,
            "ties": sum(difference.tie for _, difference in self.differences),
            "differences": [{"prompt": i, **asdict(difference)} for i, difference in self.differences],
        }


def make_report(
    results: dict[str, FamilyResult], block_size: int, *, greedy: bool, settings: dict[str, Any]
) -> dict[str, Any]:
    """The content of acceptance.json: all families together, then each, then `settings` as they are."""
    stats = [result.stats for result in results.values()]
    together = sum(stats[1:], start=stats[0])
    plain = sum(result.plain_seconds for result in results.values())
    speculative = sum(result.speculative_seconds for result in results.values())
    families = {name: result.report() for name, result in results.items()}
    return {
        **together.report(),
        "prompts": sum(family["prompts"] for family in families.values()),
        "speed_up": plain / speculative if greedy else None,
        "lossless": all(result.lossless for result in results.values()) if greedy else None,
        "equal_texts": sum(family["equal_texts"] for family in families.values()) if greedy else None,
        "ties": sum(family["ties"] for family in families.values()),
        "families": families,
        "block_size": block_size,
        **settings,
    }


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write acceptance.json and acceptance.png into a folder that is there."""
    text = json.dumps(without_nan(report), indent=2, allow_nan=False)
    (folder / "acceptance.json").write_text(text + "\n")
    title = f"{report['acceptance_length']:.2f} tokens a target call, blocks of {report['block_size']}"
    plot_acceptance(report["families"], folder / "acceptance.png", title)


def check_gates(report: dict[str, Any], minimum: float | None, *, require_lossless: bool) -> None:
    """Raise UserError naming every family that is below the minimum or not lossless."""
    misses = []
    for name, family in report["families"].items():
        got = family["acceptance_length"]
        if minimum is not None and not got >= minimum:
            misses.append(f"{name}: acceptance length {got:.2f} is below {minimum:.2f}")
        if require_lossless and family["lossless"] is False:
            wrong = next(d for d in family["differences"] if not d["tie"])
            misses.append(f"{name}: text of prompt {wrong['prompt']} differs at token {wrong['position']}")
    if misses:
        raise UserError(f"the drafter is not good enough: {'; '.join(misses)}")


def text_verdict(counts: dict[str, Any]) -> str:
    """Say of a family, or of a whole report, whether the texts equal the plain target's."""
    if counts["equal_texts"] is None:
        return "sampled"
    prompts, ties = counts["prompts"], counts["ties"]
    if counts["equal_texts"] == prompts:
        return "equal"
    if counts["equal_texts"] + ties == prompts:
        return f"{ties} tie{'s' if ties > 1 else ''} of {prompts}"
    return "DIFFERS"


def difference_lines(report: dict[str, Any]) -> list[str]:
    """Name the texts that leave the plain target's, and its candidates there; what is no tie comes first."""
    found = [(name, entry) for name, family in report["families"].items() for entry in family["differences"]]
    found.sort(key=lambda pair: pair[1]["tie"])
    lines = []
    for name, entry in found[:DIFFERENCES_SHOWN]:
        drafted, plain = (
            "the end" if token is None else token
            for token in (entry["speculative_token"], entry["greedy_token"])
        )
        kind = "a tie" if entry["tie"] else "NOT a tie"
        place = f"{name}, prompt {entry['prompt']}, token {entry['position']}"
        lines += [
            f"{place}: {drafted} instead of {plain}, {kind}",
            f"  plain    {_candidates(entry['greedy_candidates'])}",
            f"  drafted  {_candidates(entry['speculative_candidates'])}",
        ]
    if len(found) > DIFFERENCES_SHOWN:
        lines.append(f"{len(found) - DIFFERENCES_SHOWN} more in acceptance.json")
    return lines


def passed_over_lines(report: dict[str, Any]) -> list[str]:
    """Say of each family how many chats gave no prompt, and why."""
    lines = []
    for name, family in report["families"].items():
        if reasons := family["passed_over"]:
            told = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            lines.append(f"{name}: chats passed over: {told}")
    return lines


def _candidates(found: dict[str, Any] | None) -> str:
    """Tokens with their logits, best first."""
    if found is None:
        return "-"
    return "  ".join(
        f"{token}: {logit:.6g}" for token, logit in zip(found["tokens"], found["logits"], strict=True)
    )


def print_report(report: dict[str, Any]) -> None:
    """Print the table of families on the terminal; below it what was passed over, and texts that differ."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=f"Acceptance, blocks of {report['block_size']}", box=SIMPLE_HEAD, padding=0, show_edge=False
    )
    console = Console()
    narrow = console.width < WIDE
    table.add_column("family", overflow="fold", width=NARROW_NAME if narrow else None)
    slots = () if narrow else SLOTS_SHOWN
    headers = [f"slot {k}" for k in slots]
    for column in ("prompts", "tokens", "tokens\na call", *headers, "speed-up", "text"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = dict(report["families"])
    if len(rows) > 1:
        rows["all"] = report
    for name, family in rows.items():
        shares = family["per_slot"]
        shown = [f"{shares[k - 1]:.2f}" if k <= len(shares) else "" for k in slots]
        speed = family.get("speed_up")
        table.add_row(
            Text(name),
            str(family["prompts"]),
            str(family["tokens"]),
            f"{family['acceptance_length']:.2f}",
            *shown,
            f"{speed:.2f}x" if speed else "",
            text_verdict(family),
        )
    console.print(table)
    for line in [*passed_over_lines(report), *difference_lines(report)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def without_nan(value: Any) -> Any:
    """Replace numbers that JSON cannot hold by None."""
    if isinstance(value, dict):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
