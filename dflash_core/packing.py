"""Packed rows of fixed length: which samples share a row, in which order, and the token arrays of a row.

Everything is a pure function of lengths, seed and epoch: all ranks compute the same plan without talking, and
a position in the data is (epoch, rows consumed) whatever the number of ranks.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_core.configuration import UserError
from dflash_core.records import Sample

OPEN_ROWS = 64
"""Rows that may be unfinished at a time while packing."""
FULL = 0.9
"""A row that is filled less at the end of a pool waits for the samples of the next one."""
POOL_ROWS = 32
"""Shuffling pool in rows' worth of tokens: bounds how many row groups are in use at once."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedTokens:
    """Tokens of one packed row; position C-1 downwards may be padding (document -1)."""

    token_ids_C: np.ndarray
    """int32 [C], 0 in padding."""
    loss_mask_C: np.ndarray
    """bool [C], False in padding."""
    document_C: np.ndarray
    """int32 [C]: index of the document in the row, -1 in padding."""
    position_C: np.ndarray
    """int32 [C]: position inside the document, 0 in padding."""
    starts_N: np.ndarray
    """int64 [documents + 1]: first row index of each document, and the end of the last."""
    sample_ids: tuple[str, ...]
    """One a document, in row order."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.starts_N[-1])


def pack_tokens(samples: Sequence[Sample], row_tokens: int) -> PackedTokens:
    """Lay samples one behind the other into a row of `row_tokens`; no sample at all gives a row of padding.

    Raises UserError when they do not fit.
    """
    lengths = [sample.num_tokens for sample in samples]
    starts_N = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    used = int(starts_N[-1])
    if used > row_tokens:
        raise UserError(
            f"{len(samples)} samples with {used} tokens do not fit in a row of {row_tokens} tokens"
        )
    token_ids_C = np.zeros(row_tokens, np.int32)
    loss_mask_C = np.zeros(row_tokens, bool)
    document_C = np.full(row_tokens, -1, np.int32)
    position_C = np.zeros(row_tokens, np.int32)
    for i, sample in enumerate(samples):
        span = slice(int(starts_N[i]), int(starts_N[i + 1]))
        token_ids_C[span] = sample.token_ids_T
        loss_mask_C[span] = sample.loss_mask_T
        document_C[span] = i
        position_C[span] = np.arange(lengths[i])
    return PackedTokens(
        token_ids_C=token_ids_C,
        loss_mask_C=loss_mask_C,
        document_C=document_C,
        position_C=position_C,
        starts_N=starts_N,
        sample_ids=tuple(sample.sample_id for sample in samples),
    )


def plan_epoch(
    lengths_S: np.ndarray,
    *,
    seed: int,
    epoch: int,
    row_tokens: int,
    group_S: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Assign every sample to one row of an epoch; returns the rows in training order, each int64 sample
    indices.

    `lengths_S` [S] are tokens a sample. `group_S` [S] names the unit of storage (row group) that holds a
    sample: groups are shuffled and read whole, samples are shuffled within a pool of about POOL_ROWS rows, so
    a reader touches few groups at a time. Without it every sample is a group of its own. Rows are filled
    best-fit; what a pool leaves over for a row of its own goes into the next pool, so that no step but an
    epoch's last learns from a nearly empty row. Raises UserError for a sample longer than a row.
    """
    lengths_S = np.asarray(lengths_S, np.int64)
    if lengths_S.size == 0:
        return []
    longest = int(lengths_S.argmax())
    if lengths_S[longest] > row_tokens:
        raise UserError(
            f"sample number {longest} has {int(lengths_S[longest])} tokens, more than a row of {row_tokens}; "
            "raise training.row_tokens or extract with a lower maximum length"
        )
    generator = np.random.default_rng([seed, epoch, 0x9AC4])
    rows: list[np.ndarray] = []
    for pool in _pools(lengths_S, group_S, generator, POOL_ROWS * row_tokens):
        if rows and lengths_S[rows[-1]].sum() < FULL * row_tokens:
            pool = np.concatenate([rows.pop(), pool])
        rows.extend(_best_fit(pool, lengths_S, row_tokens))
    return rows


def _pools(
    lengths_S: np.ndarray, group_S: np.ndarray | None, generator: np.random.Generator, pool_tokens: int
) -> list[np.ndarray]:
    """Shuffle groups, cut their sequence into pools of at least `pool_tokens`, shuffle the samples of each
    pool.
    """
    if group_S is None:
        order_S = generator.permutation(len(lengths_S))
    else:
        _, group_S = np.unique(np.asarray(group_S), return_inverse=True)
        rank_of_group = generator.permutation(int(group_S.max()) + 1)
        order_S = np.argsort(rank_of_group[group_S], kind="stable")
    ends = np.cumsum(lengths_S[order_S])
    pools, start = [], 0
    while start < len(order_S):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + pool_tokens, side="left")) + 1
        if (
            len(order_S) - stop < stop - start
            and int(ends[-1]) - int(ends[min(stop, len(ends)) - 1]) < pool_tokens
        ):
            stop = len(order_S)
        pools.append(generator.permutation(order_S[start:stop]))
        start = stop
    return pools


def _best_fit(pool: np.ndarray, lengths_S: np.ndarray, row_tokens: int) -> list[np.ndarray]:
    """Put each sample into the fullest open row that still has room; rows leave in the order in which they
    were opened.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []
    for sample in pool:
        need = int(lengths_S[sample])
        at = bisect_left(open_rows, (need, -1))
        if at < len(open_rows):
            room, row = open_rows.pop(at)
            rows[row].append(int(sample))
        else:
            room, row = row_tokens, len(rows)
            rows.append([int(sample)])
        if room - need > 0:
            insort(open_rows, (room - need, row))
            if len(open_rows) > OPEN_ROWS:
                open_rows.pop(0)
    return [np.asarray(row, np.int64) for row in rows]


def is_validation(sample_id: str, fraction: float) -> bool:
    """Say whether a sample belongs to the validation split: by hash of its name, so it never moves between
    splits.
    """
    digest = hashlib.sha256(sample_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


def rows_of_step(
    num_rows: int, step_in_epoch: int, rows_per_step: int, rank: int, world: int
) -> list[int | None]:
    """Return the plan rows that one rank takes in one optimizer step: round-robin, None where there is no
    row.

    Every rank gets the same number of entries, so that all take part in each collective.
    """
    first = step_in_epoch * rows_per_step
    micro_steps = -(-rows_per_step // world)
    mine: list[int | None] = []
    for micro in range(micro_steps):
        offset = micro * world + rank
        row = first + offset
        mine.append(row if offset < rows_per_step and row < num_rows else None)
    return mine
