"""What the quality run measures is what it says: acceptance of many chats at once, data in its place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from quality_data import (
    CHAT,
    Chats,
    DataSets,
    answer_greedily,
    create_datasets,
    goes_in_circles,
    open_datasets,
    read_responses,
    write_responses,
)
from quality_report import write_report
from quality_runs import Bench, measured_rows, simulated

from dflash_core.acceptance import AcceptanceStats, teacher_forced_acceptance
from dflash_core.configuration import UserError
from dflash_core.drafter import Drafter
from dflash_core.records import CaptureSpec, Sample
from dflash_core.respond import Responder
from tests.core.test_speculative import build
from tests.core.tiny_drafter import SPEC, tiny_drafter

WORDS = 2
"""So few words that a drafter of random weights is often right."""


def chats_of(lengths: list[int], width: int) -> Chats:
    chance = np.random.default_rng(0)
    samples = []
    for i, length in enumerate(lengths):
        mask_T = np.arange(length) >= 4
        mask_T[length // 2] = length % 2 == 0  # some have two responses
        samples.append(
            Sample(
                sample_id=f"family{i % 2}-held_out-{i:05d}",
                token_ids_T=chance.integers(0, WORDS, length).astype(np.int32),
                loss_mask_T=mask_T,
            )
        )
    starts_S = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    taps_TE = torch.randn(int(starts_S[-1]), width, generator=torch.Generator().manual_seed(1))
    return Chats(samples=samples, taps_TE=taps_TE, last_TD=None, starts_S=starts_S)


def one_by_one(bench: Bench, drafter: Drafter) -> dict[str, AcceptanceStats]:
    found: dict[str, AcceptanceStats] = {}
    for i, sample in enumerate(bench.held_out.samples):
        stats = teacher_forced_acceptance(
            drafter,
            bench.held_out.of(i),
            torch.from_numpy(sample.token_ids_T),
            torch.from_numpy(sample.loss_mask_T),
            bench.embedding_VD,
            bench.head_VD,
        )
        family = f"family{i % 2}"
        found[family] = found[family] + stats if family in found else stats
    return found


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("anchors", [12, 64])
def test_many_chats_at_once_are_measured_as_one_by_one(window: int | None, anchors: int) -> None:
    kinds = None if window is None else ("sliding_attention", "full_attention", "sliding_attention")
    drafter = tiny_drafter(layer_types=kinds, sliding_window=window)
    drafter.compute_dtype = torch.float32
    drafter.requires_grad_(True)
    config = drafter.config
    chance = torch.Generator().manual_seed(2)
    chats = chats_of([9, 30, 41, 6, 22, 17, 40], len(config.tap_layer_ids) * config.hidden_size)
    head_VD = torch.zeros(config.vocab_size, config.hidden_size)
    head_VD[0] = torch.randn(config.hidden_size, generator=chance)
    head_VD[1] = -head_VD[0]
    bench = Bench(
        held_out=chats,
        target=SPEC,
        tap_layer_ids=config.tap_layer_ids,
        embedding_VD=torch.randn(config.vocab_size, config.hidden_size, generator=chance),
        head_VD=head_VD,
        steps=1,
        training={"row_tokens": 64},
        device=torch.device("cpu"),
    )
    together, alone = simulated(bench, drafter, None, anchors), one_by_one(bench, drafter)
    assert together.keys() == alone.keys()
    for family, stats in together.items():
        assert stats.tokens == alone[family].tokens
        assert stats.reached_K.tolist() == alone[family].reached_K.tolist()
    assert sum(stats.reached_K[2] for stats in together.values()) > 5, "hardly any draft was accepted"
    rows = measured_rows(chats, config, row_tokens=64, anchors=anchors, device=torch.device("cpu"))
    parts = sum(len(row.samples) for row in rows)
    assert len(rows) < parts
    assert (parts > len(chats.samples)) == (anchors == 12)
    assert all((row.token_B >= 0).sum() <= anchors for row in rows)


def test_answers_that_go_in_circles_are_recognised() -> None:
    chance = np.random.default_rng(3)
    plain_T = chance.integers(0, 50, 200)
    assert not goes_in_circles(plain_T)
    assert goes_in_circles(np.concatenate([plain_T[:80], np.tile(plain_T[80:110], 4)]))
    assert not goes_in_circles(np.concatenate([plain_T, plain_T[:30]])), (
        "one sentence said twice is no circle"
    )
    assert not goes_in_circles(plain_T[:5])


def test_answers_in_a_shrinking_batch_are_those_of_each_prompt_alone() -> None:
    model, new_tokens = build("llama"), 40
    chance = np.random.default_rng(5)
    prompts = [chance.integers(1, 90, n).tolist() for n in (3, 11, 6, 17, 8, 5, 9, 14)]

    def alone(prompt: list[int]) -> list[int]:
        ids = list(prompt)
        for _ in range(new_tokens):
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    plain = [alone(prompt) for prompt in prompts]
    stops = [plain[0][6], plain[3][20]]
    answers = answer_greedily(model, prompts, stops, new_tokens, look_every=4)
    whole = 0
    for answer, wanted in zip(answers, plain, strict=True):
        end = next((i + 1 for i, token in enumerate(wanted) if token in stops), new_tokens)
        assert answer == wanted[: len(answer)]
        assert len(answer) == end or (len(answer) < end and goes_in_circles(np.array(answer)))
        whole += len(answer) == end
    assert whole >= 2
    assert len({len(answer) for answer in answers}) > 2


def test_an_answer_that_was_cut_teaches_no_end(tmp_path: Path, tiny_target_dir: Path) -> None:
    responder = Responder(str(tiny_target_dir), None, CHAT, "cpu", torch.float32)
    lines = [
        {"id": f"family-train-{i:05d}", "messages": [{"role": "user", "content": "hello " * i}]}
        for i in range(1, 9)
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_responses(
        prompts, tmp_path / "out", responder, new_tokens=6, batch=4, share=(0, 1), time_left=lambda: True
    )
    samples, counts = read_responses(tmp_path / "out", responder.tokenizer)
    ends = [sample.token_ids_T[sample.loss_mask_T][-1] in responder.stop_ids for sample in samples]
    assert samples and counts["cut_answers"] == len(ends) - sum(ends) > 0


def plan(folder: Path) -> DataSets:
    chance = np.random.default_rng(6)
    samples = [
        Sample(
            sample_id=f"family-{'held_out' if i < 3 else 'train'}-{i:05d}",
            token_ids_T=chance.integers(0, 90, 20).astype(np.int32),
            loss_mask_T=np.arange(20) > 5,
        )
        for i in range(9)
    ]
    capture = CaptureSpec(tap_layer_ids=(1, 4))
    create_datasets(folder, samples, SPEC, {"lossless": capture, "fp8": capture})
    return open_datasets(folder)


def test_shards_of_another_format_are_written_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = plan(tmp_path)
    first.training["fp8"].store.put_bytes("records/00000.json", b"{}")
    assert plan(tmp_path).training["lossless"].plan == first.training["lossless"].plan
    said = capsys.readouterr().out
    assert said.count("is written anew") == 1 and "no commit record" in said
    assert plan(tmp_path).training["fp8"].missing() == [0]
    assert not capsys.readouterr().out


def write_result(folder: Path, group: str, name: str, seed: int, tokens: int) -> None:
    """A drafter that earned `tokens` with ten calls, in a family that is trained on and in another one."""
    family = {"blocks": 10, "tokens": tokens, "acceptance_length": tokens / 10, "per_slot": [0.5] * 8}
    result = {
        "key": f"{group}--{name}--seed{seed}",
        "group": group,
        "name": name,
        "seed": seed,
        "steps": 1,
        "row_tokens": 1,
        "anchors": 1,
        "optimizer": "adamw",
        "block_size": 9,
        "parameters": 1,
        "curve": [],
        "costs": {"bits_per_value": 4.0, "bytes_per_token": 1.0, "relative_error": [0.1]},
        "simulated": {"arithmetic": family, "logic": family},
    }
    (folder / "results").mkdir(parents=True, exist_ok=True)
    (folder / "results" / f"{result['key']}.json").write_text(json.dumps(result))


def test_runs_on_other_data_are_compared_by_their_own_default(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for seed, tokens in enumerate((20, 30)):
        write_result(a, "codec", "tolerance=0.1", seed, tokens)
    write_result(a, "optimizer", "Muon 0.002", 0, 50)
    write_result(b, "codec", "tolerance=0.1", 0, 40)
    write_result(b, "optimizer", "Muon 0.002", 0, 40)
    assert "| optimizer | Muon 0.002 | 1 | 0.0 M | 1 x 9 | 5.00 | 5.00 |" in write_report(a)
    # 50 of 25 on average in one run, 40 of 40 in the other.
    assert "| optimizer | Muon 0.002 | 2 | 0.0 M | 1 x 9 | 1.50 ± 0.71 | 1.50 ± 0.71 |" in write_report(
        a, [b]
    )
    kept = json.loads((a / "quality.json").read_text())
    assert {entry["run"] for entry in kept} == {str(a), str(b)} and len(kept) == 5
    (b / "results" / "codec--tolerance=0.1--seed0.json").unlink()
    with pytest.raises(UserError, match=f"{b} has no result of the default"):
        write_report(a, [b])
