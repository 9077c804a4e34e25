"""The trainer on the CPU: padding, ranks, resuming, optimizers, and learning a sample by heart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from dflash_core.configuration import UserError
from dflash_core.distributed import World
from dflash_core.optimizer import OptimizerConfig, rate_factor
from dflash_core.training import NonFiniteError, Trainer
from tests.core.aot_eager import aot_eager
from tests.core.training_rows import CPU, gradients, make_row, random_samples, tiny_trainer
from tests.spawned_ranks import results_of_ranks

LENGTHS = [[20, 1, 25, 2], [64], [30, 30], [5, 6, 7, 8, 9, 10]]


def rows_for(trainer: Trainer, epoch: int = 0) -> list[Any]:
    return [
        make_row(random_samples(lengths, seed=i), trainer.drafter.config, epoch=epoch)
        for i, lengths in enumerate(LENGTHS)
    ]


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert a.keys() == b.keys() and a
    for name in a:
        if tolerance:
            torch.testing.assert_close(a[name], b[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert torch.equal(a[name], b[name]), name


def test_padding_anchors_and_padding_rows_change_nothing() -> None:
    trainer = tiny_trainer()
    samples = random_samples([20, 15])
    config = trainer.drafter.config
    plain = make_row(samples, config, row_tokens=35, anchors=40)
    padded = make_row(samples, config, row_tokens=64, anchors=50)
    empty = make_row([], config, row_tokens=64, anchors=50)
    assert plain.batch.num_blocks < 40 and empty.batch.count == 0
    loss, expected = gradients(trainer, [plain])
    for rows in ([padded], [padded, empty], [empty, padded]):
        other, found = gradients(trainer, rows)
        assert other == pytest.approx(loss, rel=1e-6)
        assert_same(found, expected, rtol=1e-4, atol=1e-6)


def test_an_empty_step_leaves_finite_weights() -> None:
    trainer = tiny_trainer()
    before = {n: p.detach().clone() for n, p in trainer.drafter.named_parameters()}
    trainer.step([make_row([], trainer.drafter.config)], 1)
    trainer.check_finite()
    assert_same(before, {n: p.detach() for n, p in trainer.drafter.named_parameters()})


def test_rows_of_other_samples_do_not_leak() -> None:
    trainer = tiny_trainer()
    config = trainer.drafter.config
    a, b = random_samples([20, 20], seed=1)
    together = make_row([a, b], config, anchors=40)
    _, expected = gradients(trainer, [make_row([a], config, anchors=40), make_row([b], config, anchors=40)])
    _, found = gradients(trainer, [together])
    assert_same(found, expected, rtol=1e-4, atol=1e-6)


def test_recomputed_layers_give_the_same_gradients() -> None:
    trainer, other = tiny_trainer(), tiny_trainer()
    other.drafter.checkpoint_layers()
    rows = rows_for(trainer)[:2]
    assert_same(gradients(trainer, rows)[1], gradients(other, rows)[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_there_is_one_graph_for_all_rows_whether_layers_are_recomputed_or_not(
    monkeypatch: pytest.MonkeyPatch, checkpoint_layers: bool
) -> None:
    monkeypatch.setattr(torch, "compile", aot_eager)
    torch.compiler.reset()
    counters.clear()
    trainer = tiny_trainer(compile=True, checkpoint_layers=checkpoint_layers)
    rows = [*rows_for(trainer), make_row([], trainer.drafter.config)]
    try:
        trainer.step(rows[:1], 1)
        assert counters["stats"]["unique_graphs"] == 5, "context, first, other and last layers, norm"
        trainer.validate(rows[:1])
        assert counters["stats"]["unique_graphs"] == 10, "and the same without gradients"
        torch.compiler.set_stance("fail_on_recompile")
        for _ in range(2):
            trainer.step(rows, len(rows))
            trainer.validate(rows)
        assert counters["stats"]["unique_graphs"] == 10
    finally:
        torch.compiler.set_stance("default")
        torch.compiler.reset()


def tensors_of(arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _rank(rank: int, size: int, port: int, results: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    trainer = tiny_trainer(world=World(rank=rank, size=size, device=CPU))
    rows = rows_for(trainer)
    if size == 3:
        rows = [*rows, make_row([], trainer.drafter.config), make_row([], trainer.drafter.config)]
    captured: dict[str, torch.Tensor] = {}
    original = trainer.optimizer.step

    def spy(step: int, weight_sum: torch.Tensor, halted: torch.Tensor) -> Any:
        for name, p in trainer.drafter.named_parameters():
            captured[name] = p.grad.detach().clone() / weight_sum
        return original(step, weight_sum, halted)

    trainer.optimizer.step = spy  # type: ignore[method-assign]
    mine = rows[rank::size]
    trainer.step(mine, len(mine))
    summary, norm = trainer.summary()
    weights = {n: p.detach().clone() for n, p in trainer.drafter.named_parameters()}
    arrays = [{n: v.numpy() for n, v in tensors.items()} for tensors in (captured, weights)]
    results.put((summary.loss, norm, *arrays, summary.blocks))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_equal_one_rank_with_all_rows(size: int) -> None:
    found = results_of_ranks(_rank, size)
    trainer = tiny_trainer()
    rows = rows_for(trainer)
    expected_loss, expected = gradients(trainer, rows)
    trainer.step(rows, len(rows))
    summary, expected_norm = trainer.summary()
    weights = {n: p.detach() for n, p in trainer.drafter.named_parameters()}
    for loss, norm, found_gradients, found_weights, blocks in found:
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4) and summary.blocks == blocks > 0
        assert_same(tensors_of(found_gradients), expected, rtol=1e-4, atol=1e-6)
        assert_same(tensors_of(found_weights), weights, rtol=1e-4, atol=1e-6)
        assert_same(tensors_of(found_weights), tensors_of(found[0][3]))


def test_accumulated_step_equals_adamw_on_the_mean_gradient() -> None:
    options = {"learning_rate": 1e-2, "warmup_fraction": 0.0, "clip_norm": 0.05, "weight_decay": 0.1}
    trainer = tiny_trainer(optimizer=options)
    rows = rows_for(trainer)
    _, mean = gradients(trainer, rows)
    norm = math.sqrt(sum(float(g.pow(2).sum()) for g in mean.values()))
    assert norm > 0.05
    copies = {n: torch.nn.Parameter(p.detach().clone()) for n, p in trainer.drafter.named_parameters()}
    groups = [
        {"params": [p for p in copies.values() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in copies.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for name, p in copies.items():
        p.grad = mean[name] * (0.05 / norm)
    plain.step()
    trainer.step(rows, len(rows))
    assert trainer.summary()[1] == pytest.approx(norm, rel=1e-4)
    assert_same(
        {n: p.detach() for n, p in trainer.drafter.named_parameters()},
        {n: p.detach() for n, p in copies.items()},
        rtol=1e-4,
        atol=1e-5,
    )


def test_muon_steps_equal_torchs_on_the_mean_gradients() -> None:
    """Two steps, so that the momentum counts, with the matrices in one plain optimizer."""
    options = {"name": "muon", "learning_rate": 1e-2, "warmup_fraction": 0.0, "schedule": "constant"}
    trainer = tiny_trainer(optimizer={**options, "clip_norm": 0.05, "weight_decay": 0.1})
    copies = {n: torch.nn.Parameter(p.detach().clone()) for n, p in trainer.drafter.named_parameters()}
    matrices = [p for p in copies.values() if p.ndim == 2]
    vectors = [p for p in copies.values() if p.ndim == 1]
    muon = torch.optim.Muon(
        matrices, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(vectors, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for rows in (rows_for(trainer), rows_for(trainer, epoch=1)[:2]):
        before = {n: p.detach().clone() for n, p in copies.items()}
        _, mean = gradients(trainer, rows)
        norm = math.sqrt(sum(float(g.pow(2).sum()) for g in mean.values()))
        assert norm > 0.05
        for name, p in copies.items():
            p.grad = mean[name] * (0.05 / norm)
        muon.step()
        adam.step()
        trainer.step(rows, len(rows))
        for name, p in trainer.drafter.named_parameters():
            wanted, found = copies[name].detach() - before[name], p.detach() - before[name]
            error = float((found - wanted).norm() / wanted.norm())
            assert error < 0.03, f"{name}: {error}"  # orthogonalised in bf16
            copies[name].data.copy_(p.detach())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_interrupted_and_resumed_equals_uninterrupted(optimizer: str, weighting: str) -> None:
    changes: dict[str, Any] = {
        "optimizer": {"name": optimizer, "learning_rate": 3e-3, "ema_decay": 0.9, "schedule": "wsd"},
        "loss": {"weighting": weighting, "gamma": 3.0, "chunk_slots": 7},
    }

    def run(trainer: Trainer, steps: range) -> None:
        for step in steps:
            rows = rows_for(trainer, epoch=step)[:2]
            trainer.step(rows, 2)

    whole = tiny_trainer(total_steps=6, **changes)
    run(whole, range(6))
    first = tiny_trainer(total_steps=6, **changes)
    run(first, range(3))
    saved = {name: value.clone() for name, value in first.state().items()}
    second = tiny_trainer(total_steps=6, **changes)
    second.load_state(saved, first.optimizer_step)
    run(second, range(3, 6))
    assert any(name.startswith("optimizer/ema/") for name in saved)
    assert_same(second.state(), whole.state())


def test_the_average_of_a_short_run_is_not_that_of_its_random_start() -> None:
    trainer = tiny_trainer(optimizer={"learning_rate": 3e-3, "ema_decay": 0.3})
    expected = trainer.drafter.fc.weight.detach().clone()
    for step, decay in enumerate([1 / 10, 2 / 11, 3 / 12, 0.3, 0.3]):
        trainer.step(rows_for(trainer, epoch=step)[:1], 1)
        expected = decay * expected + (1 - decay) * trainer.drafter.fc.weight.detach()
    with trainer.averaged_weights() as drafter:
        torch.testing.assert_close(drafter.fc.weight.detach(), expected)


def test_state_of_another_drafter_is_refused() -> None:
    trainer = tiny_trainer()
    state = trainer.state()
    with pytest.raises(UserError, match="not those of this drafter"):
        trainer.load_state({k: v for k, v in state.items() if "fc" not in k}, 1)
    with pytest.raises(UserError, match="cannot use"):
        trainer.load_state(state | {"optimizer/exp_avg/nothing": torch.zeros(1)}, 1)


@pytest.mark.parametrize("ema_decay", [None, 0.9])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_non_finite_step_is_named_and_changes_nothing(optimizer: str, ema_decay: float | None) -> None:
    options = {"name": optimizer, "ema_decay": ema_decay, "weight_decay": 0.1, "warmup_fraction": 0.0}
    trainer = tiny_trainer(optimizer=options)
    rows = rows_for(trainer)
    trainer.step(rows[:1], 1)
    before = {name: value.clone() for name, value in trainer.state().items()}
    rows[1].taps_CE[3, 2] = float("nan")
    trainer.step(rows[1:2], 1)
    trainer.step(rows[2:3], 1)
    with pytest.raises(NonFiniteError, match="optimizer step 1 ") as caught:
        trainer.summary()
    assert caught.value.optimizer_step == 1
    assert_same(before, trainer.state())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_first_step_that_is_not_finite_leaves_the_initial_weights(optimizer: str) -> None:
    trainer = tiny_trainer(optimizer={"name": optimizer})
    before = {n: p.detach().clone() for n, p in trainer.drafter.named_parameters()}
    row = rows_for(trainer)[0]
    row.taps_CE[3, 2] = float("inf")
    trainer.step([row], 1)
    assert_same(before, {n: p.detach() for n, p in trainer.drafter.named_parameters()})
    assert all(value.isfinite().all() for value in trainer.state().values())


def test_kl_needs_the_last_hidden_state() -> None:
    trainer = tiny_trainer(loss={"gamma": 3.0, "kl_weight": 0.5})
    row = rows_for(trainer)[0]
    trainer.step([row], 1)
    assert math.isfinite(trainer.summary()[0].loss)
    with pytest.raises(UserError, match="last hidden"):
        trainer.step([type(row)(batch=row.batch, taps_CE=row.taps_CE)], 1)


def test_schedules() -> None:
    cosine = OptimizerConfig(schedule="cosine", warmup_fraction=0.1, final_fraction=0.1)
    assert [rate_factor(cosine, s, 100) for s in (0, 9, 10)] == pytest.approx([0.1, 1.0, 1.0])
    assert rate_factor(cosine, 55, 100) == pytest.approx(0.55)
    assert rate_factor(cosine, 100, 100) == pytest.approx(0.1)
    wsd = OptimizerConfig(schedule="wsd", warmup_fraction=0.1, decay_fraction=0.2)
    assert [rate_factor(wsd, s, 100) for s in (9, 50, 80, 90)] == pytest.approx([1.0, 1.0, 1.0, 0.5])
    assert rate_factor(OptimizerConfig(schedule="constant", warmup_fraction=0.0), 99, 100) == 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"name": "adamw", "learning_rate": 5e-3, "warmup_fraction": 0.02}},
        {"optimizer": {"name": "muon", "learning_rate": 5e-3, "warmup_fraction": 0.02}},
    ],
    ids=["adamw", "muon"],
)
def test_one_sample_is_learnt_until_whole_blocks_are_accepted(changes: dict[str, Any]) -> None:
    trainer = tiny_trainer(total_steps=150, loss={"gamma": 3.0}, **changes)
    samples = random_samples([48], supervised=1.0)
    row = make_row(samples, trainer.drafter.config, row_tokens=48, anchors=47)
    for _ in range(150):
        trainer.step([row], 1)
    trainer.summary()
    summary = trainer.validate([row])
    assert summary.acceptance_length_whole == trainer.drafter.config.block_size
    assert summary.accuracy == 1.0
    assert summary.slot_acceptance == [1.0] * (trainer.drafter.config.block_size - 1)
