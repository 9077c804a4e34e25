"""The compiled GPU path against the plain dense CPU path: loss, every gradient, no recompile, no
synchronisation.

python -m pytest tests/gpu/test_trainer_gpu.py

Trainers of one shape share their graphs, so the file compiles five sets: float32, bf16 and fp8, the first two
also checkpointed.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core.distributed import World
from dflash_core.fast_path import fused_attention_calls, require_fused_attention
from dflash_core.training import Trainer, TrainingRow
from storage.checkpoints import Checkpoints, Position
from storage.objects import open_store
from tests.core.training_rows import ALONE, gradients, make_row, random_samples, tiny_trainer

pytestmark = pytest.mark.gpu

ROW, ANCHORS = 512, 32
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "vocab_size": 9000,
    "block_size": 8,
    "mask_token_id": 8999,
    "layer_types": ("sliding_attention", "sliding_attention", "full_attention"),
    "sliding_window": 100,
}
ROWS = {
    "documents": [200, 1, 150, 2, 90],
    "one document of row length": [512],
    "padding anchors": [5, 12],
    "empty": [],
}


def trainer_on(device: str, dtype: str, **changes: Any) -> Trainer:
    world = World(rank=0, size=1, device=torch.device(device, 0)) if device == "cuda" else ALONE
    world = changes.pop("world", world)
    values: dict[str, Any] = {"loss": {"gamma": 3.0, "chunk_slots": 64}, "compile": device == "cuda"}
    shape = SHAPE | {"head_dim": changes.pop("head_dim", SHAPE["head_dim"])}
    return tiny_trainer(
        compute_dtype=dtype, drafter_changes=shape, std=0.05, world=world, **(values | changes)
    )


def row_on(device: str, trainer: Trainer, lengths: list[int]) -> TrainingRow:
    row = make_row(
        random_samples(lengths),
        trainer.drafter.config,
        row_tokens=ROW,
        anchors=ANCHORS,
        dense=device == "cpu",
    )
    dtype = trainer.drafter.compute_dtype
    assert row.last_hidden_CD is not None
    return TrainingRow(
        batch=row.batch.to(torch.device(device)),
        taps_CE=row.taps_CE.to(device, dtype),
        last_hidden_CD=row.last_hidden_CD.to(device, dtype),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"checkpoint_layers": True},
        {"loss": {"weighting": "dpace", "chunk_slots": 64}},
        {"loss": {"gamma": 3.0, "chunk_slots": 64, "kl_weight": 0.5}},
    ],
    ids=["plain", "checkpointed", "dpace", "kl"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_and_every_gradient_equal_the_dense_path(dtype: str, changes: dict[str, Any]) -> None:
    torch.set_float32_matmul_precision("highest")
    if dtype == "float32":
        # Without tensor cores products are unrolled into multiplications: narrow heads compile much faster.
        changes = changes | {"head_dim": 16}
    reference, compiled = trainer_on("cpu", "float32", **changes), trainer_on("cuda", dtype, **changes)
    tolerance = 2e-3 if dtype == "float32" else 4e-2
    for name, lengths in ROWS.items():
        loss, expected = gradients(reference, [row_on("cpu", reference, lengths)])
        found_loss, found = gradients(compiled, [row_on("cuda", compiled, lengths)])
        assert found_loss == pytest.approx(loss, rel=tolerance / 4, abs=1e-6), name
        assert found.keys() == expected.keys()
        scale = max(float(g.norm()) for g in expected.values())
        for parameter, gradient in expected.items():
            error = float((found[parameter].cpu() - gradient).norm())
            allowed = tolerance * float(gradient.norm()) + 1e-4 * scale
            assert error <= allowed, f"{name}, {parameter}: {error} of {float(gradient.norm())}"


def test_fp8_layers_are_near() -> None:
    reference = trainer_on("cpu", "float32")
    compiled = trainer_on("cuda", "bfloat16", layer_products="fp8")
    lengths = ROWS["documents"]
    loss, expected = gradients(reference, [row_on("cpu", reference, lengths)])
    found_loss, found = gradients(compiled, [row_on("cuda", compiled, lengths)])
    assert found_loss == pytest.approx(loss, rel=0.02)
    for parameter, gradient in expected.items():
        error = float((found[parameter].cpu() - gradient).norm() / gradient.norm())
        assert error < 0.2, f"{parameter}: {error}"


@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_one_graph_for_every_row_and_no_synchronisation_in_a_step(checkpoint_layers: bool) -> None:
    torch.compiler.reset()  # graphs of other tests must not serve as second ones here
    common = {"learning_rate": 1e-3, "ema_decay": 0.9}
    trainers = [
        trainer_on(
            "cuda", "bfloat16", checkpoint_layers=checkpoint_layers, optimizer={"name": name, **common}
        )
        for name in ("adamw", "muon")
    ]
    rows = [row_on("cuda", trainers[0], lengths) for lengths in ROWS.values()]
    try:
        for trainer in trainers:
            trainer.step(rows[:1], 1)
            trainer.step(rows[:2], 2)
            trainer.validate(rows[:1])
            torch.compiler.set_stance("fail_on_recompile")  # the second one uses the first one's graphs
        for trainer, repeat in itertools.product(trainers, range(3)):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            trainer.step(rows, len(rows))
            torch.cuda.set_sync_debug_mode("default")
            trainer.validate(rows)
            assert trainer.optimizer_step == repeat + 3
        for trainer in trainers:
            trainer.summary()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.compiler.set_stance("default")


def test_attention_is_fused_in_every_layer() -> None:
    trainer = trainer_on("cuda", "bfloat16")
    row = row_on("cuda", trainer, ROWS["documents"])
    trainer.step([row], 1)
    layers = trainer.drafter.config.num_layers
    forward, backward = fused_attention_calls(lambda: trainer.step([row], 1))
    require_fused_attention(forward, backward, layers=layers)
    assert forward == layers, "each layer's is computed once"


def test_overfits_on_the_gpu() -> None:
    trainer = trainer_on("cuda", "bfloat16", optimizer={"learning_rate": 3e-3, "warmup_fraction": 0.0})
    row = row_on("cuda", trainer, [60])
    for _ in range(200):
        trainer.step([row], 1)
    summary = trainer.validate([row])
    assert summary.acceptance_length_whole > 0.95 * trainer.drafter.config.block_size


@pytest.mark.parametrize("ema_decay", [None, 0.9])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_non_finite_taps_halt_without_a_change(optimizer: str, ema_decay: float | None) -> None:
    options = {"name": optimizer, "ema_decay": ema_decay, "weight_decay": 0.1, "warmup_fraction": 0.0}
    trainer = trainer_on("cuda", "bfloat16", optimizer=options)
    row = row_on("cuda", trainer, ROWS["documents"])
    trainer.step([row], 1)
    before = {name: value.clone() for name, value in trainer.state().items()}
    broken = row.taps_CE.clone()
    broken[7, 3] = float("inf")
    trainer.step([replace(row, taps_CE=broken)], 1)
    trainer.step([row], 1)
    with pytest.raises(RuntimeError, match="optimizer step 1 "):
        trainer.summary()
    after = trainer.state()
    assert before.keys() == after.keys()
    for name, value in after.items():
        assert torch.equal(before[name], value), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_goes_on_as_the_whole_one(optimizer: str) -> None:
    changes: dict[str, Any] = {"optimizer": {"name": optimizer, "learning_rate": 3e-3, "ema_decay": 0.9}}

    def losses(trainer: Trainer, steps: range) -> list[float]:
        rows = [row_on("cuda", trainer, lengths) for lengths in ROWS.values()]
        found = []
        for step in steps:
            trainer.step([rows[step % 3]], 1)
            found.append(trainer.summary()[0].loss)
        return found

    whole = losses(trainer_on("cuda", "bfloat16", **changes), range(8))
    first = trainer_on("cuda", "bfloat16", **changes)
    losses(first, range(4))
    second = trainer_on("cuda", "bfloat16", **changes)
    second.load_state({name: value.cpu() for name, value in first.state().items()}, first.optimizer_step)
    assert losses(second, range(4, 8)) == pytest.approx(whole[4:], rel=1e-2)
    assert whole[4] < 0.95 * whole[1]  # the same row: without the state it would start anew


def test_a_checkpoint_holds_the_state_of_its_step_though_training_goes_on(tmp_path: Path) -> None:
    trainer = trainer_on("cuda", "bfloat16")
    row = row_on("cuda", trainer, ROWS["documents"])
    checkpoints = Checkpoints(open_store(tmp_path), {}, keep=2)
    for step in (1, 2):
        trainer.step([row], 1)
        expected = {name: value.clone() for name, value in trainer.state().items()}
        position = Position(optimizer_step=step, epoch=0, step_in_epoch=step)
        if checkpoints._stream is not None:
            with torch.cuda.stream(checkpoints._stream):
                torch.cuda._sleep(1_000_000_000)  # half a second: the copies come late
        trainer.hold(checkpoints.save(position, trainer.state(), {}))
        trainer.step([row], 1)
        checkpoints.wait()
        found = checkpoints.load(checkpoints.record(step))
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert torch.equal(value, expected[name].cpu()), name
        assert not torch.equal(trainer.drafter.fc.weight, expected["model/fc.weight"])
    checkpoints.close()


def test_kernel_equals_plain_torch() -> None:
    from dflash_core.loss import _score_plainly
    from dflash_core.loss_kernel import cross_entropy_in_place, mixed_loss_in_place

    torch.manual_seed(0)
    for vocabulary in (1000, 8192, 151936):
        logits = (4 * torch.randn(33, vocabulary, device="cuda")).bfloat16()
        labels = torch.randint(0, vocabulary, (33,), device="cuda")
        logits[3, labels[3]] = 60.0
        plain, fused = logits.clone(), logits.clone()
        loss, ce, correct, _ = _score_plainly(plain, labels, None, 0.0, True)
        found_ce, found_correct, scale = cross_entropy_in_place(fused, labels, True)
        torch.testing.assert_close(found_ce, ce, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(loss, ce)
        ties = (logits == logits.max(-1, keepdim=True).values).sum(-1) > 1
        assert torch.equal(found_correct[~ties], correct[~ties])
        error = (fused.float() * scale[:, None] - plain.float()).norm() / plain.float().norm()
        assert error < 5e-3
        teacher = (4 * torch.randn(33, vocabulary, device="cuda")).bfloat16()
        plain, fused = logits.clone(), logits.clone()
        loss, ce, correct, _ = _score_plainly(plain, labels, teacher, 0.3, True)
        found, found_ce, found_correct = mixed_loss_in_place(fused, teacher, labels, 0.3, True)
        torch.testing.assert_close(found, loss, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found_ce, ce, rtol=1e-4, atol=1e-4)
        assert torch.equal(found_correct[~ties], correct[~ties])
        assert (fused.float() - plain.float()).norm() / plain.float().norm() < 5e-3


def test_adamw_kernel_equals_torchs() -> None:
    from dflash_core.optimizer_kernel import adamw_step

    torch.manual_seed(0)
    ours, theirs = (
        [torch.nn.Parameter(torch.randn(300, 77, device="cuda", generator=g)) for _ in range(2)]
        for g in (torch.Generator("cuda").manual_seed(s) for s in (0, 0))
    )
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    a, b = torch.optim.AdamW(ours, **options), torch.optim.AdamW(theirs, **options)
    scale = torch.tensor(7.0, device="cuda")
    for step in range(1, 6):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad / 7
        adamw_step(a, step, scale, torch.zeros((), device="cuda"))
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(a.state[p][name].cpu(), b.state[q][name].cpu())
    before = ours[0].detach().clone()
    adamw_step(a, 6, scale, torch.ones((), device="cuda"))
    assert torch.equal(before, ours[0])
