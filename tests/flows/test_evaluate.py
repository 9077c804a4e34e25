"""Evaluation reads folders and files as a user has them, reports what it measured, fails when it should."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from typer.testing import CliRunner

from dflash_core.cached_target import CachedTarget
from dflash_core.configuration import UserError
from dflash_core.drafter import Drafter, DrafterConfig
from dflash_core.export import export_drafter
from dflash_core.speculative import DrafterProposer, greedy_generate
from dflash_core.target_identity import target_spec
from flows.acceptance_report import (
    DIFFERENCES_SHOWN,
    FamilyResult,
    check_gates,
    difference_lines,
    make_report,
    print_report,
    text_verdict,
    write_report,
)
from flows.cli import app
from flows.config import TrainConfig, dump_config
from flows.evaluate import EvaluateConfig, evaluate, measure
from flows.plots import plot_training
from flows.train_steps import TrainingLog
from tests.tiny import MASK_TOKEN_ID, NUM_LAYERS, VOCAB_SIZE, WIDTH, tiny_model, write_tiny_target

CHATS = [
    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "never read"}]},
    {"messages": [{"role": "user", "content": "what is 2+2?"}]},
    {"messages": [{"role": "assistant", "content": "no user turn"}]},
    {"conversations": [{"from": "human", "value": "ShareGPT"}, {"from": "gpt", "value": "form"}]},
]


@pytest.fixture
def drafter_dir(tiny_target_dir: Path, tmp_path: Path) -> Path:
    return export_drafter(
        random_drafter(), tmp_path / "drafter", target_spec(str(tiny_target_dir), None, None)
    )


def random_drafter() -> Drafter:
    config = DrafterConfig(
        hidden_size=WIDTH,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=10000.0,
        vocab_size=VOCAB_SIZE,
        block_size=4,
        mask_token_id=MASK_TOKEN_ID,
        tap_layer_ids=(1, 4),
        target_num_layers=NUM_LAYERS,
    )
    drafter = Drafter(config)
    drafter.init_weights(0, std=0.1)
    return drafter


def settings(target: Path, drafter: Path, tmp_path: Path, **changes: Any) -> EvaluateConfig:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(chat) for chat in CHATS) + "\n")
    values: dict[str, Any] = {
        "target": str(target),
        "drafter": drafter,
        "prompts": {"first": str(path), "second": str(path)},
        "output": tmp_path / "out",
        "max_new_tokens": 20,
        "dtype": "float32",
        "device": "cpu",
        "prompts_per_family": 3,
    }
    return EvaluateConfig(**{**values, **changes})


def test_report_plot_and_table(
    tiny_target_dir: Path, drafter_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[int, int]] = []
    config = settings(tiny_target_dir, drafter_dir, tmp_path)
    report = evaluate(config, lambda done, total: told.append((done, total)))
    assert told == [(i, 6) for i in range(1, 7)], "the chat without a user turn is passed over"
    assert report["lossless"] is True
    assert report["families"]["first"]["equal_texts"] == 3
    assert report["families"]["first"]["passed_over"] == {"without a user turn": 1}
    assert 1 <= report["acceptance_length"] <= 4
    assert report["blocks"] == sum(family["blocks"] for family in report["families"].values())
    saved = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    assert saved["families"]["second"]["per_slot"] == report["families"]["second"]["per_slot"]
    assert saved["drafter"] == str(drafter_dir)
    assert (tmp_path / "out" / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    print_report(report)
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("first", "second", "all", "equal"))
    assert "second: chats passed over: 1 without a user turn\n" in printed
    assert text_verdict(report) == "equal" and not difference_lines(report)


def test_it_is_heard_of_while_the_target_is_read(
    tiny_target_dir: Path, drafter_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_core.load_progress.LOOK_EVERY_S", 0.001)
    monkeypatch.setattr("dflash_core.load_progress.LEAST_BYTES", 1)
    heard: list[tuple[int, int | None]] = []
    config = settings(tiny_target_dir, drafter_dir, tmp_path, prompts_per_family=1, max_new_tokens=2)
    evaluate(config, lambda done, total: heard.append((done, total)))
    assert heard[0] == (0, None) and heard[-1] == (2, 2)


def test_sampling_has_nothing_to_compare_with(
    tiny_target_dir: Path, drafter_dir: Path, tmp_path: Path
) -> None:
    report = evaluate(settings(tiny_target_dir, drafter_dir, tmp_path, temperature=0.8, drafts="sample"))
    assert report["lossless"] is None
    assert report["speed_up"] is None
    assert report["acceptance_length"] >= 1


def test_a_missed_minimum_fails_after_all_is_shown(
    tiny_target_dir: Path, drafter_dir: Path, tmp_path: Path
) -> None:
    config = settings(tiny_target_dir, drafter_dir, tmp_path, minimum_acceptance_length=3.9)
    path = tmp_path / "evaluate.yaml"
    path.write_text(dump_config(config))
    result = CliRunner().invoke(app, ["evaluate", "--config", str(path)])
    assert result.exit_code == 2
    assert "Acceptance, blocks of 4" in result.stdout and "equal" in result.stdout
    assert re.search(
        r"error: the drafter is not good enough: first: .* below 3\.90; second: .*\n$", result.stderr
    )
    assert (tmp_path / "out" / "acceptance.json").exists()


class Swapping(DrafterProposer):
    """Exchanges two rows of the target's head when a text begins, after its first token: the plain run, which
    comes next, has the logits of these two tokens the other way round."""

    def __init__(self, drafter: Drafter, target: CachedTarget, rows: tuple[int, ...]) -> None:
        self.rows = rows
        super().__init__(drafter, target)

    def start(self) -> None:
        head = self.target.model.get_output_embeddings().weight
        with torch.no_grad():
            head[list(self.rows)] = head[list(self.rows[::-1])]
        super().start()


PROMPT = [18, 19, 20]


@pytest.fixture
def swapping() -> Iterator[Swapping]:
    """A target whose two best tokens after PROMPT change places between the two runs."""
    with CachedTarget(tiny_model(), (1, 4)) as target:
        best = greedy_generate(target, PROMPT, max_new_tokens=1).candidates[0]
        assert best.logits[0] - best.logits[1] > 0.03 * max(map(abs, best.logits[:2])), "else it may be a tie"
        drafter = random_drafter()
        drafter.compute_dtype = torch.float32
        yield Swapping(drafter, target, best.tokens[:2])


def measured(swapping: Swapping, tmp_path: Path, prompts: int, **changes: Any) -> FamilyResult:
    config = settings(tmp_path, tmp_path, tmp_path, max_new_tokens=6, **changes)
    return measure(swapping.target, swapping, [PROMPT] * prompts, config, stop_ids=[])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_text_that_differs_is_named_with_its_candidates(
    swapping: Swapping, tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    before = greedy_generate(swapping.target, PROMPT, max_new_tokens=1).candidates[0]
    result = measured(swapping, tmp_path, 1, dtype=dtype)
    after = greedy_generate(swapping.target, PROMPT, max_new_tokens=1).candidates[0]
    assert before.tokens[:2] == after.tokens[1::-1]

    write_report(make_report({"code": result}, 4, greedy=True, settings={}), tmp_path)
    report = json.loads((tmp_path / "acceptance.json").read_text())
    [entry] = report["families"]["code"]["differences"]
    assert (entry["prompt"], entry["position"], entry["tie"]) == (0, 0, False)
    for name, candidates in (("greedy_candidates", after), ("speculative_candidates", before)):
        assert entry[name]["tokens"] == list(candidates.tokens) and len(candidates.tokens) == 4
        assert entry[name]["logits"] == pytest.approx(candidates.logits)

    print_report(report)
    table, *below = capsys.readouterr().out.rsplit("code, prompt 0, token 0: ", 1)
    assert "DIFFERS" in table and "equal" not in table
    first, second = before.tokens[:2]
    assert below[0].startswith(f"{first} instead of {second}, NOT a tie\n")
    for label, candidates in (("plain", after), ("drafted", before)):
        pairs = zip(candidates.tokens, candidates.logits, strict=True)
        assert f"  {label:<8} " + "  ".join(f"{token}: {logit:.6g}" for token, logit in pairs) in below[0]

    words = f"code: text of prompt 0 differs at token {entry['position']}"
    with pytest.raises(UserError, match=f"not good enough: {words}"):
        check_gates(report, None, require_lossless=True)
    check_gates(report, 1.0, require_lossless=False)


def test_ties_are_not_shown_as_equal_texts(
    swapping: Swapping, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = measured(swapping, tmp_path, 7, tie_tolerance=1.0)
    report = make_report({"code": result}, 4, greedy=True, settings={})
    check_gates(report, None, require_lossless=True)
    print_report(report)
    printed = capsys.readouterr().out
    assert "7 ties of 7" in printed and "equal" not in printed and "DIFFERS" not in printed
    assert printed.count("a tie\n") == DIFFERENCES_SHOWN
    assert printed.endswith(f"\n{7 - DIFFERENCES_SHOWN} more in acceptance.json\n")
    other = measured(swapping, tmp_path, 1, tie_tolerance=0.0)
    both = make_report({"ties": result, "worse": other}, 4, greedy=True, settings={})
    assert text_verdict(both["families"]["ties"]) == "7 ties of 7"
    assert text_verdict(both) == text_verdict(both["families"]["worse"]) == "DIFFERS"
    assert difference_lines(both)[0].startswith("worse, prompt 0")


def test_the_training_report_says_the_same_of_the_texts(swapping: Swapping, tmp_path: Path) -> None:
    from flows.report import training_page

    families = {
        "ties": measured(swapping, tmp_path, 2, tie_tolerance=1.0),
        "worse": measured(swapping, tmp_path, 1),
    }
    report = make_report(families, 4, greedy=True, settings={})
    shape = {"block_size": 4, "num_layers": 2, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2}
    config = TrainConfig.model_validate({"dataset": "d", "target": "t", "output": "o", "drafter": shape})
    summary = dict.fromkeys(("target", "dataset", "tokens", "drafter", "last_metrics"), "")
    page = training_page(config, {**summary, "versions": {}}, TrainingLog(acceptance=report), tmp_path)
    rows = {row.split(" | ")[0]: row for row in page.splitlines() if row.startswith("| ")}
    assert rows["| ties"].endswith("| 2 ties of 2 |") and rows["| worse"].endswith("| DIFFERS |")
    assert "\n".join(["```", *difference_lines(report), "```"]) in page and "worse, prompt 0, token 0" in page


def test_the_table_fits_eighty_columns(
    swapping: Swapping,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = measured(swapping, tmp_path, 12, tie_tolerance=1.0)
    families = {"trained on": result, "[what nobody has seen] " * 3: result}
    print_report(make_report(families, 4, greedy=True, settings={}))
    lines = capsys.readouterr().out.splitlines()
    header = " ".join(next(line for line in lines if line.startswith("family")).split())
    assert header == "family prompts tokens a call slot 1 slot 2 slot 4 speed-up text"
    assert all(len(line) <= 80 for line in lines if "instead of" not in line)
    text = "\n".join(lines)
    assert "…" not in text and "24 ties of 24" in text and "12 ties of 12" in text
    assert "[what" in text


@pytest.mark.parametrize("columns", [60, 79])
def test_a_narrow_table_names_every_family(
    swapping: Swapping,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = measured(swapping, tmp_path, 12, tie_tolerance=1.0)
    print_report(make_report({"trained on": result, "[unseen]": result}, 4, greedy=True, settings={}))
    lines = [line for line in capsys.readouterr().out.splitlines() if "instead of" not in line]
    for name in ("trained on", "[unseen]", "all"):
        row = next(line for line in lines if line.startswith(f"{name} "))
        assert re.search(r"\d", row)
        assert "…" not in row
        assert len(row) <= columns


def test_a_drafter_without_a_block_is_below_every_minimum() -> None:
    family: dict[str, Any] = {"lossless": None, "differences": []}
    nothing = {**family, "acceptance_length": float("nan")}
    with pytest.raises(UserError, match="nan is below"):
        check_gates({"families": {"code": nothing}}, 1.0, require_lossless=True)


def test_another_target_is_refused(drafter_dir: Path, tmp_path: Path) -> None:
    other = write_tiny_target(tmp_path / "other", seed=5)
    with pytest.raises(UserError, match="another target"):
        evaluate(settings(other, drafter_dir, tmp_path))


def test_a_family_without_prompts_is_refused(
    tiny_target_dir: Path, drafter_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        UserError, match=r"'first' .* no usable prompt: 3 too long \(.*chats\.jsonl:1: \d+ tok"
    ):
        evaluate(settings(tiny_target_dir, drafter_dir, tmp_path, max_prompt_tokens=3))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{broken\n" * 3, r"3 unreadable \(the first is .*code\.jsonl:1: not JSON: .*"),
        ("\n", "it holds no chats"),
    ],
)
def test_prompts_are_read_before_the_drafter(
    tiny_target_dir: Path, tmp_path: Path, text: str, words: str
) -> None:
    source = tmp_path / "code.jsonl"
    source.write_text(text)
    with pytest.raises(UserError, match=f"'code' names .* no usable prompt: {words}$"):
        evaluate(settings(tiny_target_dir, tmp_path / "none", tmp_path, prompts={"code": str(source)}))


def test_prompts_are_read_no_further_than_needed(
    tiny_target_dir: Path, drafter_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "prompts"
    folder.mkdir()
    (folder / "a.jsonl").write_text("[1]\n" + "".join(json.dumps(chat) + "\n" for chat in CHATS))
    (folder / "b.json").write_text("that cannot be read at all")
    config = settings(tiny_target_dir, drafter_dir, tmp_path, prompts={"code": str(folder)}, max_new_tokens=2)
    for number, passed_over in ((2, {"unreadable": 1}), (3, {"unreadable": 1, "without a user turn": 1})):
        report = evaluate(config.model_copy(update={"prompts_per_family": number}))
        family = report["families"]["code"]
        assert (family["prompts"], family["passed_over"]) == (number, passed_over)
    with pytest.raises(UserError, match=r"b\.json is not JSON"):
        evaluate(config.model_copy(update={"prompts_per_family": 4}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"output": "a file"}, "output a file cannot be made: File exists"),
        ({"device": "tpu"}, "device 'tpu' is not here: name cpu"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not here: name cpu"),
    ],
)
def test_what_cannot_be_had_is_said_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a file").touch()
    with pytest.raises(UserError, match=words):
        evaluate(settings(tmp_path / "no target", tmp_path / "no drafter", tmp_path, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"prompts": {}},
        {"prompts": {"code": ""}},
        *({"minimum_acceptance_length": value} for value in (float("nan"), float("inf"), -1, 0.9)),
        *({"seed": value} for value in (-1, 1 << 80)),
    ],
)
def test_values_that_mean_nothing_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(change))):
        settings(tmp_path, tmp_path, tmp_path, **change)


def test_a_home_is_found(
    tiny_target_dir: Path, drafter_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "target").symlink_to(tiny_target_dir)
    config = settings(Path("~/target"), Path("~/drafter"), tmp_path, output=Path("~/out"), max_new_tokens=2)
    evaluate(config.model_copy(update={"prompts": {"code": "~/chats.jsonl"}}))
    assert (tmp_path / "out" / "acceptance.json").exists()


def test_training_plot_passes_over_what_is_missing(tmp_path: Path) -> None:
    rows = [{"step": i, "loss": 5.0 / (i + 1), "lr": 1.0} for i in range(40)]
    rows += [{"step": 10, "validation/loss": 3.0, "validation/acceptance_length": float("nan")}]
    path = plot_training(rows, tmp_path / "deep" / "loss.png", "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert plot_training([], tmp_path / "empty.png").exists()
