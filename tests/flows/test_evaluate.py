"""Evaluation reads folders and files as a user has them, reports what it measured, fails when it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_core.configuration import UserError
from dflash_core.drafter import Drafter, DrafterConfig
from dflash_core.export import export_drafter
from dflash_core.target_identity import target_spec
from flows.acceptance_report import check_gates, print_report
from flows.evaluate import EvaluateConfig, evaluate
from flows.plots import plot_training
from tests.tiny import MASK_TOKEN_ID, NUM_LAYERS, VOCAB_SIZE, WIDTH, write_tiny_target

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
    assert 1 <= report["acceptance_length"] <= 4
    assert report["blocks"] == sum(family["blocks"] for family in report["families"].values())
    saved = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    assert saved["families"]["second"]["per_slot"] == report["families"]["second"]["per_slot"]
    assert saved["drafter"] == str(drafter_dir)
    assert (tmp_path / "out" / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    print_report(report)
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("first", "second", "all", "equal"))


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


def test_a_missed_minimum_fails_after_the_report_is_written(
    tiny_target_dir: Path, drafter_dir: Path, tmp_path: Path
) -> None:
    config = settings(tiny_target_dir, drafter_dir, tmp_path, minimum_acceptance_length=3.9)
    with pytest.raises(UserError, match=r"first: acceptance length .* below 3\.90; second: "):
        evaluate(config)
    assert (tmp_path / "out" / "acceptance.json").exists()


def test_a_text_that_differs_fails_unless_it_is_a_tie() -> None:
    difference = {"prompt": 3, "position": 7, "tie": False}
    family: dict[str, Any] = {"acceptance_length": 2.0, "lossless": False, "differences": [difference]}
    with pytest.raises(UserError, match="code: text of prompt 3 differs at token 7"):
        check_gates({"families": {"code": family}}, None, require_lossless=True)
    check_gates({"families": {"code": family}}, 1.5, require_lossless=False)
    nothing = {**family, "acceptance_length": float("nan"), "lossless": None}
    with pytest.raises(UserError, match="nan is below"):
        check_gates({"families": {"code": nothing}}, 1.0, require_lossless=True)


def test_another_target_is_refused(drafter_dir: Path, tmp_path: Path) -> None:
    other = write_tiny_target(tmp_path / "other", seed=5)
    with pytest.raises(UserError, match="another target"):
        evaluate(settings(other, drafter_dir, tmp_path))


def test_a_family_without_prompts_is_refused(
    tiny_target_dir: Path, drafter_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="no usable prompt"):
        evaluate(settings(tiny_target_dir, drafter_dir, tmp_path, max_prompt_tokens=3))


def test_training_plot_passes_over_what_is_missing(tmp_path: Path) -> None:
    rows = [{"step": i, "loss": 5.0 / (i + 1), "lr": 1.0} for i in range(40)]
    rows += [{"step": 10, "validation/loss": 3.0, "validation/acceptance_length": float("nan")}]
    path = plot_training(rows, tmp_path / "deep" / "loss.png", "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert plot_training([], tmp_path / "empty.png").exists()
