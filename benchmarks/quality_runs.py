"""Experiments of the quality run: a drafter each, trained on what a codec left, measured on unseen chats."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality_data import Chats, States

from dflash_core.acceptance import AcceptanceStats, first_difference, stats_of, teacher_forced_acceptance
from dflash_core.cached_target import CachedTarget
from dflash_core.distributed import World
from dflash_core.drafter import Drafter, DrafterConfig
from dflash_core.export import export_drafter, load_exported
from dflash_core.packing import pack_tokens, plan_epoch
from dflash_core.records import TargetSpec
from dflash_core.respond import Responder
from dflash_core.row_batch import RowBatch, prepare_row
from dflash_core.speculative import DrafterProposer, Generation, greedy_generate, speculative_generate
from dflash_core.training import Trainer, TrainingConfig, TrainingRow

CODECS = (
    "lossless",
    "fp8",
    "tolerance=0.03",
    "tolerance=0.1",
    "tolerance=0.2",
    "tolerance=0.3",
    "tolerance=0.5",
)
BASE = ("codec", "tolerance=0.1")
"""(group, name) of the experiment that every ablation changes in one point."""
DECODED = {("codec", "lossless"), BASE}
"""(group, name) of the experiments whose first seed also decodes for real."""
BASE_TRAINING: dict[str, Any] = {
    "row_tokens": 8192,
    "anchors_per_row": 1024,
    "epochs": 1000,
    "optimizer": {"learning_rate": 6e-4},
}
BASE_DRAFTER: dict[str, Any] = {
    "num_layers": 5,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "block_size": 16,
}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One drafter to train: everything that is not said is as in BASE_TRAINING and BASE_DRAFTER."""

    group: str
    """Experiments of one group are shown together."""
    name: str
    codec: str = "lossless"
    seed: int = 0
    training: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] = field(default_factory=dict)
    taps: tuple[int, ...] | None = None
    """Which of the captured taps to use, by place; None: all."""
    steps: float = 1.0
    """Share of the usual number of steps."""

    @property
    def key(self) -> str:
        """File name of the result."""
        return f"{self.group}--{self.name}--seed{self.seed}".replace("=", "_")


def experiments(seeds: int, groups: Sequence[str]) -> list[Experiment]:
    """All experiments in the order in which they are worth running: first seed first."""
    found = []
    for seed in range(seeds):
        found += [Experiment(group="codec", name=codec, codec=codec, seed=seed) for codec in CODECS]
        if seed < max(1, seeds - 1):
            found += _ablations(seed)
    return [experiment for experiment in found if experiment.group in groups]


def _ablations(seed: int) -> list[Experiment]:
    """Each differs from BASE in one point."""

    def one(group: str, name: str, **changes: Any) -> Experiment:
        return Experiment(group=group, name=name, codec="tolerance=0.1", seed=seed, **changes)

    sliding = {"layer_types": ("sliding_attention",) * 4 + ("full_attention",), "sliding_window": 128}
    block32 = [
        one("gamma-block32", f"gamma={g}", training={"loss": {"gamma": g}}, drafter={"block_size": 32})
        for g in (7.0, 10.0, 14.0)
    ]
    return [
        *block32,
        one("anchors", "anchors=256", training={"anchors_per_row": 256}),
        one("anchors", "anchors=512", training={"anchors_per_row": 512}),
        one("objective", "D-PACE", training={"loss": {"weighting": "dpace"}}),
        one("objective", "KL 0.5", training={"loss": {"kl_weight": 0.5}}),
        one("optimizer", "Muon", training={"optimizer": {"learning_rate": 6e-4, "name": "muon"}}),
        one("taps", "3 taps", taps=(0, 2, 4)),
        one("attention", "4 sliding (128), 1 full", drafter=sliding),
        one("layers", "3 layers", drafter={"num_layers": 3}),
    ]


GROUPS = tuple(dict.fromkeys(["codec", *(experiment.group for experiment in _ablations(0))]))


class Rows:
    """Packed rows of all steps of one run, prepared ahead in threads; the same for every codec."""

    def __init__(
        self, chats: Chats, drafter: DrafterConfig, training: TrainingConfig, steps: int, device: torch.device
    ) -> None:
        self._chats, self._drafter, self._training = chats, drafter, training
        self._steps, self._device = steps, device

    def __iter__(self) -> Iterator[tuple[RowBatch, list[int]]]:
        """(row on the device, samples in it), one a step."""
        with ThreadPoolExecutor(6) as pool:
            waiting: list[Future[tuple[RowBatch, list[int]]]] = []
            for epoch, samples in self._plan():
                waiting.append(pool.submit(self._prepare, epoch, samples))
                if len(waiting) > 24:
                    yield self._moved(*waiting.pop(0).result())
            for future in waiting:
                yield self._moved(*future.result())

    def _plan(self) -> Iterator[tuple[int, list[int]]]:
        trained = np.array(self._chats.trained)
        lengths = np.array([self._chats.samples[i].num_tokens for i in trained])
        left, epoch = self._steps, 0
        while left > 0:
            plan = plan_epoch(
                lengths, seed=self._training.seed, epoch=epoch, row_tokens=self._training.row_tokens
            )
            for row in plan[:left]:
                yield epoch, trained[row].tolist()
            left -= len(plan)
            epoch += 1

    def _prepare(self, epoch: int, samples: list[int]) -> tuple[RowBatch, list[int]]:
        packed = pack_tokens([self._chats.samples[i] for i in samples], self._training.row_tokens)
        row = prepare_row(
            packed,
            self._drafter,
            anchors=self._training.anchors_per_row,
            seed=self._training.seed,
            epoch=epoch,
            dense=self._device.type == "cpu",
        )
        return (row.pin() if self._device.type == "cuda" else row), samples

    def _moved(self, row: RowBatch, samples: list[int]) -> tuple[RowBatch, list[int]]:
        return row.to(self._device), samples


def training_row(
    states: States, row: RowBatch, samples: list[int], taps: Sequence[int] | None
) -> TrainingRow:
    """Gather the row's hidden states from those of all chats."""
    device = states.taps_TE.device
    places = torch.from_numpy(states.rows(samples)).to(device)
    empty = len(row.position_C) - len(places)
    taps_CE = torch.nn.functional.pad(choose_taps(states, states.taps_TE[places], taps), (0, 0, 0, empty))
    last_CD = None
    if states.last_TD is not None:
        last_CD = torch.nn.functional.pad(states.last_TD[places], (0, 0, 0, empty))
    return TrainingRow(batch=row, taps_CE=taps_CE, last_hidden_CD=last_CD)


def choose_taps(states: States, taps_TE: torch.Tensor, taps: Sequence[int] | None) -> torch.Tensor:
    """The columns of some taps only."""
    if taps is None:
        return taps_TE
    width = states.last_TD.shape[1] if states.last_TD is not None else taps_TE.shape[1] // 5
    return torch.cat([taps_TE[:, i * width : (i + 1) * width] for i in taps], dim=-1)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all experiments share."""

    chats: Chats
    exact: States
    """States as the target gave them: what a served drafter sees."""
    target: TargetSpec
    tap_layer_ids: tuple[int, ...]
    embedding_VD: torch.Tensor
    head_VD: torch.Tensor
    steps: int
    training: dict[str, Any]
    """Changes to BASE_TRAINING that hold for all experiments."""
    device: torch.device


def drafter_config(bench: Bench, experiment: Experiment) -> DrafterConfig:
    """The drafter's shape."""
    ids = bench.tap_layer_ids
    return DrafterConfig(
        **{
            **BASE_DRAFTER,
            "hidden_size": bench.target.hidden_size,
            "intermediate_size": 8 * bench.target.hidden_size // 3,
            "rope_theta": bench.target.rope_theta,
            "vocab_size": bench.target.vocab_size,
            "mask_token_id": bench.target.mask_token_id,
            "tap_layer_ids": ids if experiment.taps is None else tuple(ids[i] for i in experiment.taps),
            "target_num_layers": bench.target.num_layers,
            **experiment.drafter,
        }
    )


def train(bench: Bench, states: States, experiment: Experiment) -> tuple[Drafter, dict[str, Any]]:
    """Train one drafter on `states`; the drafter, and the curve of what training measured."""
    steps = max(1, round(bench.steps * experiment.steps))
    common = {**BASE_TRAINING, **bench.training, "max_steps": steps, "seed": experiment.seed}
    training = TrainingConfig(**{**common, **experiment.training})
    config = drafter_config(bench, experiment)
    drafter = Drafter(config, compute_dtype=training.dtype)
    drafter.init_weights(experiment.seed)
    drafter.to(bench.device)
    if bench.device.type == "cuda":
        drafter.compile_regions()
    world = World(rank=0, size=1, device=bench.device)
    trainer = Trainer(drafter, bench.embedding_VD, bench.head_VD, training, total_steps=steps, world=world)
    curve: list[dict[str, float]] = []
    began = time.perf_counter()
    for step, (row, samples) in enumerate(Rows(bench.chats, config, training, steps, bench.device), start=1):
        trainer.step([training_row(states, row, samples, experiment.taps)], 1)
        if step % max(1, steps // 20) == 0 or step == steps:
            summary, _ = trainer.summary()
            curve.append(
                {"step": step, "loss": summary.loss, "acceptance_length": summary.acceptance_length_whole}
            )
    return drafter.eval(), {"steps": steps, "seconds": time.perf_counter() - began, "curve": curve}


@torch.inference_mode()
def simulated(bench: Bench, drafter: Drafter, taps: Sequence[int] | None) -> dict[str, AcceptanceStats]:
    """Acceptance on the held-out chats of each family: leading match with what the target wrote greedily."""
    found: dict[str, AcceptanceStats] = {}
    for i in bench.chats.evaluated:
        sample = bench.chats.samples[i]
        stats = teacher_forced_acceptance(
            drafter,
            choose_taps(bench.exact, bench.exact.of(i), taps),
            torch.from_numpy(sample.token_ids_T).to(bench.device),
            torch.from_numpy(sample.loss_mask_T).to(bench.device),
            bench.embedding_VD,
            bench.head_VD,
            anchors_per_forward=256,
        )
        family = bench.chats.family[sample.sample_id]
        found[family] = found[family] + stats if family in found else stats
    return found


class Decoding:
    """Real speculative decoding on held-out prompts; the plain target decodes them once for all drafters."""

    def __init__(self, bench: Bench, responder: Responder, per_family: int, new_tokens: int) -> None:
        self._bench, self._responder = bench, responder
        self._stop, self._new_tokens = frozenset(responder.stop_ids), new_tokens
        self._prompts: dict[str, list[list[int]]] = defaultdict(list)
        for i in bench.chats.evaluated:
            sample = bench.chats.samples[i]
            prompts = self._prompts[bench.chats.family[sample.sample_id]]
            if len(prompts) < per_family:
                prompts.append(sample.token_ids_T[: int(np.argmax(sample.loss_mask_T))].tolist())
        self._plain: dict[str, list[Generation]] = {}

    def measure(self, drafter: Drafter, folder: Path) -> dict[str, Any]:
        """Export the drafter, load it as a server would, decode; per family and together."""
        export_drafter(drafter, folder, self._bench.target)
        served = load_exported(folder, device=self._bench.device, dtype=self._bench.head_VD.dtype)
        report: dict[str, Any] = {}
        with CachedTarget(self._responder.model, served.config.tap_layer_ids) as target:
            proposer = DrafterProposer(served, target)
            limits: dict[str, Any] = {"max_new_tokens": self._new_tokens, "stop_ids": self._stop}
            warm = next(iter(self._prompts.values()))[0]
            speculative_generate(target, proposer, warm, max_new_tokens=8)
            for family, prompts in self._prompts.items():
                if family not in self._plain:
                    greedy_generate(target, prompts[0], max_new_tokens=4)
                    self._plain[family] = [greedy_generate(target, p, **limits) for p in prompts]
                drafted = [speculative_generate(target, proposer, p, **limits) for p in prompts]
                report[family] = self._compare(family, drafted, served.config.block_size)
        return report

    def _compare(self, family: str, drafted: list[Generation], block_size: int) -> dict[str, Any]:
        plain = self._plain[family]
        differences = [first_difference(p, d, tolerance=0.02) for p, d in zip(plain, drafted, strict=True)]
        wrong = [d for d in differences if d is not None]
        return {
            **stats_of(drafted, block_size).report(),
            "prompts": len(drafted),
            "equal_texts": len(drafted) - len(wrong),
            "ties": sum(d.tie for d in wrong),
            "lossless": all(d.tie for d in wrong),
            "plain_seconds": sum(p.decode_seconds for p in plain),
            "speculative_seconds": sum(d.decode_seconds for d in drafted),
            "plain_tokens": sum(len(p.token_ids) for p in plain),
            "speculative_tokens": sum(len(d.token_ids) for d in drafted),
            "differences": [
                {
                    "position": d.position,
                    "tie": d.tie,
                    "greedy": str(d.greedy_top_two),
                    "block": str(d.speculative_top_two),
                }
                for d in wrong
            ],
        }
