"""Experiments of the quality run: a drafter each, trained on what a codec left, measured on unseen chats."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality_data import Chats, Clock, families

from dflash_core.acceptance import AcceptanceStats, first_difference, simulate, stats_of
from dflash_core.blocks import eligible_anchors
from dflash_core.cached_target import CachedTarget
from dflash_core.distributed import World
from dflash_core.drafter import Drafter, DrafterConfig
from dflash_core.export import load_exported
from dflash_core.loss import LossConfig, head_loss, leading_matches, spread
from dflash_core.packing import pack_tokens, plan_epoch
from dflash_core.records import Sample, TargetSpec
from dflash_core.respond import Responder
from dflash_core.row_batch import RowBatch, prepare_row
from dflash_core.speculative import DrafterProposer, Generation, greedy_generate, speculative_generate
from dflash_core.training import Trainer, TrainingConfig, TrainingRow

BASE_CODEC = "tolerance=0.1"
COARSE = "tolerance=0.5"
CODECS = (
    BASE_CODEC,
    "lossless",
    "tolerance=0.3",
    COARSE,
    "fp8",
    "tolerance=0.03",
    "tolerance=0.2",
)
"""In the order in which their shards are written and their drafters trained."""
TEACHERS = (BASE_CODEC, "lossless")
"""Codecs with which the target's last hidden state is stored too."""
BASE = ("codec", BASE_CODEC)
"""(group, name) of the experiment that every ablation changes in one point."""
DECODED = (("longer", BASE_CODEC), ("combined", BASE_CODEC), BASE, ("codec", "lossless"))
"""(group, name) of the experiments whose first seed also decodes for real."""
LONGER = 4
"""How many times as many steps the experiments of the group `longer` have."""
TAPS = 5
BASE_TRAINING: dict[str, Any] = {"epochs": 1000}
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
    codec: str = BASE_CODEC
    seed: int = 0
    round: int = 0
    """Experiments of an earlier round are run first."""
    training: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] = field(default_factory=dict)
    taps: tuple[int, ...] | None = None
    """Which of the captured taps to use, by place; None: all."""
    exact_tap: int | None = None
    """Place of a tap that is read without loss, whatever the codec."""
    exact_loudest: float = 0.0
    """Share of the tokens, the loudest ones, that are read without loss."""
    longer: int = 1
    """Factor of the steps."""

    @property
    def key(self) -> str:
        """File name of the result."""
        return f"{self.group}--{self.name}--seed{self.seed}".replace("=", "_").replace(" ", "_")

    @property
    def last_hidden(self) -> bool:
        """Whether training needs the target's last hidden state."""
        return "kl_weight" in self.training.get("loss", {})

    @property
    def partly_exact(self) -> bool:
        """Whether some of what it reads comes from the lossless data set."""
        return self.exact_tap is not None or self.exact_loudest > 0

    @property
    def codecs(self) -> tuple[str, ...]:
        """Codecs of the data sets that are read for it."""
        return (self.codec, "lossless") if self.partly_exact else (self.codec,)

    @property
    def data(self) -> tuple[Any, ...]:
        """What must be read for it; experiments with equal `data` can share it."""
        return self.codec, self.last_hidden, self.exact_tap, self.exact_loudest

    @property
    def shapes(self) -> str:
        """Experiments with equal `shapes` run the same compiled graphs."""
        sizes = {k: v for k, v in self.drafter.items() if k != "sliding_window"}
        taps = TAPS if self.taps is None else len(self.taps)
        products = self.training.get("layer_products")
        return f"{sizes} {self.training.get('anchors_per_row')} {taps} {products}"


def experiments(seeds: int, groups: Sequence[str], anchors: int) -> list[Experiment]:
    """All experiments in the order in which they are worth running.

    `anchors`: blocks of a step where the experiment does not say otherwise.
    """
    # All seeds of the codecs at first: a process takes those of the data that it has read.
    rounds = [
        [
            Experiment(group="codec", name=codec, codec=codec, seed=seed)
            for seed in range(seeds)
            for codec in CODECS
        ]
    ]
    # What says where a codec breaks has one seed before the recipes get several.
    rounds += [_finer(0), _strong("longer", 0)]
    for seed in range(seeds):
        rounds += [_strong("combined", seed), _ablations(seed, anchors)]
    for seed in range(1, seeds):
        rounds += [_finer(seed), _strong("longer", seed)]
    return [replace(e, round=i) for i, some in enumerate(rounds) for e in some if e.group in groups]


def _ablations(seed: int, anchors: int) -> list[Experiment]:
    """Each differs from BASE in one point; the exact teacher comes with exact states."""

    def one(group: str, name: str, **changes: Any) -> Experiment:
        return Experiment(group=group, name=name, seed=seed, **changes)

    sliding = {"layer_types": ("sliding_attention",) * 4 + ("full_attention",), "sliding_window": 128}
    # Half as many blocks of twice the size: as many slots a step as everywhere.
    block32 = {"anchors_per_row": anchors // 2}
    return [
        *(
            one(
                "gamma-block32",
                f"gamma={gamma}",
                training={**block32, "loss": {"gamma": float(gamma)}},
                drafter={"block_size": 32},
            )
            for gamma in (7, 10, 14)
        ),
        one("objective", "D-PACE", training={"loss": {"weighting": "dpace"}}),
        one("objective", "KL 0.5", training={"loss": {"kl_weight": 0.5}}),
        one("objective", "KL 0.5 lossless", codec="lossless", training={"loss": {"kl_weight": 0.5}}),
        *(
            one(
                "optimizer", f"{said} {rate:g}", training={"optimizer": {"learning_rate": rate, "name": name}}
            )
            for said, name, rate in (
                ("Muon", "muon", 6e-4),
                ("Muon", "muon", 2e-3),
                ("AdamW", "adamw", 1.5e-3),
            )
        ),
        one("taps", "3 taps", taps=(0, 2, 4)),
        one("attention", "4 sliding (128) + 1 full", drafter=sliding),
        one("products", "fp8", training={"layer_products": "fp8"}),
        *(
            one("anchors", f"anchors={a}", training={"anchors_per_row": a})
            for a in (anchors // 4, anchors // 2, anchors * 2)
        ),
    ]


def _strong(group: str, seed: int) -> list[Experiment]:
    """Drafters that learn more, with exact, ordinary and coarse states: do these need finer ones?"""
    recipe = {"optimizer": {"name": "muon", "learning_rate": 2e-3}, "loss": {"weighting": "dpace"}}
    return [
        Experiment(
            group=group,
            name=codec,
            codec=codec,
            seed=seed,
            training=recipe,
            longer=LONGER if group == "longer" else 1,
        )
        for codec in CODECS[:3]
    ]


def _finer(seed: int) -> list[Experiment]:
    """What suffers from coarse steps: all is coarse but one tap, or but the loudest tokens."""
    return [
        *(
            Experiment(group="finer", name=f"tap {i} exact", codec=COARSE, seed=seed, exact_tap=i)
            for i in range(TAPS)
        ),
        Experiment(
            group="finer", name="loudest 1 percent exact", codec=COARSE, seed=seed, exact_loudest=0.01
        ),
    ]


_SHOWN = [*_ablations(0, 1024), *_strong("combined", 0), *_strong("longer", 0), *_finer(0)]
GROUPS = tuple(dict.fromkeys(["codec", *(e.group for e in _SHOWN)]))
ORDER = {(e.group, e.name): i for i, e in enumerate(_SHOWN)}
"""Place of (group, name) among what is shown beside the default; other numbers of anchors have none."""


class TimeOver(RuntimeError):
    """The deadline came before the drafter was trained."""


class Rows:
    """Packed rows of all steps of one run, prepared ahead in threads; the same for every codec."""

    def __init__(
        self,
        samples: list[Sample],
        drafter: DrafterConfig,
        training: TrainingConfig,
        steps: int,
        device: torch.device,
    ) -> None:
        self._samples, self._drafter, self._training = samples, drafter, training
        self._steps, self._device = steps, device

    def __iter__(self) -> Iterator[tuple[RowBatch, np.ndarray]]:
        """(row on the device, samples in it), one a step."""
        with ThreadPoolExecutor(4) as pool:
            waiting: list[Future[tuple[RowBatch, np.ndarray]]] = []
            try:
                for epoch, samples in self._plan():
                    waiting.append(pool.submit(self._prepare, epoch, samples))
                    if len(waiting) > 16:
                        yield self._moved(*waiting.pop(0).result())
                for future in waiting:
                    yield self._moved(*future.result())
            finally:
                pool.shutdown(cancel_futures=True)

    def _plan(self) -> Iterator[tuple[int, np.ndarray]]:
        lengths = np.array([sample.num_tokens for sample in self._samples])
        left, epoch, row_tokens = self._steps, 0, self._training.row_tokens
        while left > 0:
            plan = plan_epoch(lengths, seed=self._training.seed, epoch=epoch, row_tokens=row_tokens)
            for row in plan[:left]:
                yield epoch, row
            left -= len(plan)
            epoch += 1

    def _prepare(self, epoch: int, samples: np.ndarray) -> tuple[RowBatch, np.ndarray]:
        packed = pack_tokens([self._samples[i] for i in samples], self._training.row_tokens)
        row = prepare_row(
            packed,
            self._drafter,
            anchors=self._training.anchors_per_row,
            seed=self._training.seed,
            epoch=epoch,
            dense=self._device.type == "cpu",
        )
        return (row.pin() if self._device.type == "cuda" else row), samples

    def _moved(self, row: RowBatch, samples: np.ndarray) -> tuple[RowBatch, np.ndarray]:
        return row.to(self._device), samples


def training_row(chats: Chats, row: RowBatch, samples: np.ndarray, taps: Sequence[int] | None) -> TrainingRow:
    """Gather the row's hidden states from those of all chats."""
    places = torch.from_numpy(chats.rows(samples.tolist()))
    if chats.taps_TE.is_cuda:
        places = places.pin_memory()
    places = places.to(chats.taps_TE.device, non_blocking=True)
    empty = len(row.position_C) - len(places)
    taps_CE = torch.nn.functional.pad(choose_taps(chats.taps_TE[places], taps), (0, 0, 0, empty))
    last_CD = None
    if chats.last_TD is not None:
        last_CD = torch.nn.functional.pad(chats.last_TD[places], (0, 0, 0, empty))
    return TrainingRow(batch=row, taps_CE=taps_CE, last_hidden_CD=last_CD)


def choose_taps(taps_TE: torch.Tensor, taps: Sequence[int] | None) -> torch.Tensor:
    """The columns of some taps only."""
    if taps is None:
        return taps_TE
    pieces = taps_TE.chunk(TAPS, dim=-1)
    return torch.cat([pieces[i] for i in taps], dim=-1)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all experiments share."""

    held_out: Chats
    """With exact states: what a served drafter sees."""
    target: TargetSpec
    tap_layer_ids: tuple[int, ...]
    embedding_VD: torch.Tensor
    head_VD: torch.Tensor
    steps: int
    """Of an experiment that is not `longer`."""
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


def train(
    bench: Bench, chats: Chats, experiment: Experiment, time_left: Clock
) -> tuple[Drafter, dict[str, Any]]:
    """Train one drafter on `chats`; the drafter, and the curve of what training measured.

    Raise TimeOver when the deadline comes first.
    """
    steps = bench.steps * experiment.longer
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
    rows = Rows(chats.samples, config, training, steps, bench.device)
    for step, (row, samples) in enumerate(rows, start=1):
        if not time_left():
            raise TimeOver(f"after {step - 1} of {steps} steps")
        trainer.step([training_row(chats, row, samples, experiment.taps)], 1)
        if step % max(1, steps // 20) == 0 or step in (1, steps):
            summary, _ = trainer.summary()
            curve.append(
                {
                    "step": step,
                    "loss": summary.loss,
                    "acceptance_length": summary.acceptance_length_whole,
                    "seconds": time.perf_counter() - began,
                }
            )
    return drafter.eval(), {
        "steps": steps,
        "row_tokens": training.row_tokens,
        "anchors": training.anchors_per_row,
        "optimizer": f"{training.optimizer.name} {training.optimizer.learning_rate:g}",
        "seconds": time.perf_counter() - began,
        "curve": curve,
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredRow:
    """A packed row of held-out chats in which every supervised token is an anchor."""

    batch: RowBatch
    samples: np.ndarray
    """int64: the chats that lie in it, or parts of them."""
    token_B: np.ndarray
    """int64 [blocks]: place of each block's anchor among the tokens of all chats; -1 where a later part of
    the chat measures it."""


def measured_rows(
    chats: Chats, drafter: DrafterConfig, *, row_tokens: int, anchors: int, device: torch.device
) -> list[MeasuredRow]:
    """Pack all chats into rows of training's shape, each with as many tokens to draft after as it has blocks.

    So measuring runs the graphs that training has compiled. A chat with more such tokens than a row has
    blocks lies in several rows.
    """
    parts: list[_Part] = []
    for i, sample in enumerate(chats.samples):
        parts += _parts(i, sample, anchors, drafter.block_size)
    rows: list[list[_Part]] = []
    room: list[list[int]] = []
    for part in sorted(parts, key=lambda part: -part.eligible):
        need = (part.eligible, part.sample.num_tokens)
        fits = (i for i, free in enumerate(room) if free[0] >= need[0] and free[1] >= need[1])
        if (at := next(fits, None)) is None:
            at = len(rows)
            rows.append([])
            room.append([anchors, row_tokens])
        rows[at].append(part)
        room[at] = [room[at][0] - need[0], room[at][1] - need[1]]
    return [_measured_row(chats, row, drafter, row_tokens, anchors, device) for row in rows]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """A chat of which some tokens are supervised."""

    number: int
    sample: Sample
    eligible: int
    """Tokens that are followed by a supervised one, both in this part."""
    kept: int
    """The first of them, which are measured here."""


def _parts(number: int, sample: Sample, anchors: int, block_size: int) -> list[_Part]:
    mask_T = sample.loss_mask_T
    eligible = np.flatnonzero(mask_T[:-1] & mask_T[1:])
    if len(eligible) <= anchors:
        return [_Part(number=number, sample=sample, eligible=len(eligible), kept=len(eligible))]
    # The blocks at the end of a part look past it, so the mask reaches further than the tokens that are kept.
    size, parts = anchors - block_size + 2, []
    for start in range(0, len(eligible), size):
        mine = eligible[start : start + size]
        reach_T = np.zeros_like(mask_T)
        reach_T[mine[0] : mine[-1] + block_size] = mask_T[mine[0] : mine[-1] + block_size]
        parts.append(
            _Part(
                number=number,
                sample=replace(sample, loss_mask_T=reach_T),
                eligible=int((reach_T[:-1] & reach_T[1:]).sum()),
                kept=len(mine),
            )
        )
    return parts


def _measured_row(
    chats: Chats,
    parts: list[_Part],
    drafter: DrafterConfig,
    row_tokens: int,
    anchors: int,
    device: torch.device,
) -> MeasuredRow:
    packed = pack_tokens([part.sample for part in parts], row_tokens)
    dense = device.type == "cpu"
    batch = prepare_row(packed, drafter, anchors=anchors, seed=0, epoch=0, dense=dense)
    places = chats.rows([part.number for part in parts])
    token_B = places[np.flatnonzero(eligible_anchors(packed))]
    ends = np.cumsum([part.eligible for part in parts])
    for part, end in zip(parts, ends, strict=True):
        token_B[end - part.eligible + part.kept : end] = -1
    return MeasuredRow(
        batch=batch.to(device), samples=np.array([part.number for part in parts]), token_B=token_B
    )


def simulated(
    bench: Bench, drafter: Drafter, taps: Sequence[int] | None, anchors: int
) -> dict[str, AcceptanceStats]:
    """Acceptance on the held-out chats of each family: leading match with what the target wrote greedily.

    As `teacher_forced_acceptance`, many chats at a time, in rows of `anchors` blocks.
    """
    chats, row_tokens = bench.held_out, bench.training["row_tokens"]
    rows = measured_rows(chats, drafter.config, row_tokens=row_tokens, anchors=anchors, device=bench.device)
    # Gradients stay enabled: without them everything would be compiled once more.
    counted = [_leading(bench, drafter, training_row(chats, r.batch, r.samples, taps)) for r in rows]
    matches_T = np.full(int(chats.starts_S[-1]), -1, dtype=np.int64)
    for row, matches_A in zip(rows, counted, strict=True):
        kept = row.token_B >= 0
        matches_T[row.token_B[kept]] = matches_A.cpu().numpy()[: len(kept)][kept]
    found: dict[str, AcceptanceStats] = {}
    for i, (sample, family) in enumerate(zip(chats.samples, families(chats.samples), strict=True)):
        own_T = matches_T[int(chats.starts_S[i]) : int(chats.starts_S[i + 1])]
        stats = simulate(own_T, sample.loss_mask_T, drafter.config.block_size)
        found[family] = found[family] + stats if family in found else stats
    return found


def _leading(bench: Bench, drafter: Drafter, row: TrainingRow) -> torch.Tensor:
    """Leading matches of each block, int64 [A]."""
    batch = row.batch
    rows_RD = torch.nn.functional.embedding(batch.input_ids_R, bench.embedding_VD)
    masks = batch.attention_masks()
    hidden_PD = drafter.forward_blocks(row.taps_CE, batch.position_C, rows_RD, batch.position_Q, *masks)
    inputs = batch.head_inputs
    losses = head_loss(hidden_PD.detach(), bench.head_VD, inputs, LossConfig().chunk_slots)
    anchors, slots = batch.scored_AK.shape
    correct_AK = spread(losses.correct_N, batch.rank_P, (anchors, slots)) > 0
    return leading_matches(correct_AK, batch.scored_AK)


class Decoding:
    """Real speculative decoding on held-out prompts, beside the plain target's.

    Both decode a prompt in turn, `passes` times; the quickest of each counts: the host disturbs it least.
    """

    def __init__(
        self, samples: list[Sample], responder: Responder, per_family: int, new_tokens: int, passes: int
    ) -> None:
        self._responder, self._passes = responder, passes
        self._stop, self._new_tokens = frozenset(responder.stop_ids), new_tokens
        self._prompts: dict[str, list[list[int]]] = defaultdict(list)
        for sample, family in zip(samples, families(samples), strict=True):
            if len(self._prompts[family]) < per_family:
                prompt = sample.token_ids_T[: int(np.argmax(sample.loss_mask_T))]
                self._prompts[family].append(prompt.tolist())

    def measure(self, folder: Path, time_left: Clock) -> dict[str, Any]:
        """Load an exported drafter as a server would, decode; a report a family, as far as there is time."""
        model = self._responder.model
        served = load_exported(folder, device=self._responder.device, dtype=model.dtype)
        report: dict[str, Any] = {}
        with CachedTarget(model, served.config.tap_layer_ids) as target:
            proposer = DrafterProposer(served, target)
            limits: dict[str, Any] = {"max_new_tokens": self._new_tokens, "stop_ids": self._stop}
            warm = next(iter(self._prompts.values()))[0]
            greedy_generate(target, warm, max_new_tokens=16)
            speculative_generate(target, proposer, warm, max_new_tokens=16)
            for family, prompts in self._prompts.items():
                if not time_left():
                    break
                plain: list[Generation] = []
                drafted: list[Generation] = []
                for prompt in prompts:
                    pairs = [
                        (
                            greedy_generate(target, prompt, **limits),
                            speculative_generate(target, proposer, prompt, **limits),
                        )
                        for _ in range(self._passes)
                    ]
                    plain.append(min((p for p, _ in pairs), key=lambda g: g.decode_seconds))
                    drafted.append(min((d for _, d in pairs), key=lambda g: g.decode_seconds))
                report[family] = self._compare(plain, drafted, served.config.block_size)
                print(f"decoded {family}: {report[family]['acceptance_length']:.2f}", flush=True)
        return report

    @staticmethod
    def _compare(plain: list[Generation], drafted: list[Generation], block_size: int) -> dict[str, Any]:
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
                    "greedy": str(d.greedy_candidates),
                    "block": str(d.speculative_candidates),
                }
                for d in wrong
            ],
        }
