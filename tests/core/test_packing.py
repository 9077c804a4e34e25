"""Packing, against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_core.configuration import UserError
from dflash_core.packing import is_validation, pack_tokens, plan_epoch, rows_of_step
from dflash_core.records import Sample


def _sample(name: str, length: int, first: int = 0) -> Sample:
    return Sample(
        sample_id=name,
        token_ids_T=np.arange(first, first + length, dtype=np.int32),
        loss_mask_T=np.ones(length, bool),
    )


def test_row_layout_by_hand() -> None:
    packed = pack_tokens([_sample("a", 3, 10), _sample("b", 1, 20), _sample("c", 2, 30)], 8)
    assert packed.token_ids_C.tolist() == [10, 11, 12, 20, 30, 31, 0, 0]
    assert packed.document_C.tolist() == [0, 0, 0, 1, 2, 2, -1, -1]
    assert packed.position_C.tolist() == [0, 1, 2, 0, 0, 1, 0, 0]
    assert packed.loss_mask_C.tolist() == [True] * 6 + [False] * 2
    assert packed.starts_N.tolist() == [0, 3, 4, 6] and packed.num_tokens == 6


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(UserError, match="do not fit"):
        pack_tokens([_sample("a", 9)], 8)
    with pytest.raises(UserError, match="raise training"):
        plan_epoch(np.array([4, 9]), seed=0, epoch=0, row_tokens=8)


@pytest.mark.parametrize("groups", [False, True])
def test_every_sample_once_and_rows_full(groups: bool) -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 400, 3000)
    group = np.arange(3000) // 17 if groups else None
    rows = plan_epoch(lengths, seed=1, epoch=2, row_tokens=1024, group_S=group)
    assert sorted(np.concatenate(rows).tolist()) == list(range(3000))
    assert all(lengths[row].sum() <= 1024 for row in rows)
    assert lengths.sum() / (len(rows) * 1024) > 0.97
    again = plan_epoch(lengths, seed=1, epoch=2, row_tokens=1024, group_S=group)
    assert all(np.array_equal(a, b) for a, b in zip(rows, again, strict=True))
    other = plan_epoch(lengths, seed=1, epoch=3, row_tokens=1024, group_S=group)
    assert not np.array_equal(rows[0], other[0])


def test_only_the_last_row_of_an_epoch_may_be_nearly_empty() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 0.8, 4000), 3000).astype(int) + 20
    rows = plan_epoch(lengths, seed=0, epoch=0, row_tokens=4096)
    fill = np.array([lengths[row].sum() / 4096 for row in rows])
    assert len(rows) > 4 * 32
    assert (fill[:-1] > 0.5).all()
    assert len(rows) <= 1.02 * lengths.sum() / 4096


def test_groups_are_used_within_a_bounded_stretch() -> None:
    lengths = np.full(4000, 100)
    group = np.arange(4000) // 10
    rows = plan_epoch(lengths, seed=0, epoch=0, row_tokens=1000, group_S=group)
    first, last = {}, {}
    for i, row in enumerate(rows):
        for g in group[row]:
            first.setdefault(int(g), i)
            last[int(g)] = i
    assert max(last[g] - first[g] for g in first) <= 2 * 32 + 64


def test_empty_plan() -> None:
    assert plan_epoch(np.array([], int), seed=0, epoch=0, row_tokens=8) == []


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_share_the_rows_of_a_step(world: int) -> None:
    seen = []
    for step in range(3):
        shares = [rows_of_step(10, step, 4, rank, world) for rank in range(world)]
        assert len({len(s) for s in shares}) == 1
        rows = sorted(r for s in shares for r in s if r is not None)
        assert rows == list(range(step * 4, min(10, step * 4 + 4)))
        seen += rows
    assert seen == list(range(10))


def test_validation_split_is_stable_and_about_right() -> None:
    chosen = [is_validation(f"sample-{i}", 0.1) for i in range(5000)]
    assert 0.08 < np.mean(chosen) < 0.12
    assert not any(is_validation(f"sample-{i}", 0.0) for i in range(100))
    assert all(is_validation(f"sample-{i}", 0.5) for i in range(5000) if chosen[i])
