"""From chats to the plan of a data set: read, tokenise, count what cannot be used, cut into shards."""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_core.chat import ChatEncoder
from dflash_core.configuration import UserError
from dflash_core.messages import ChatError
from dflash_core.records import CaptureSpec, Sample, TargetSpec
from dflash_core.target import describe_target, load_tokenizer, mask_token_id
from flows.config import ExtractConfig
from storage.chats import UnreadableRecord, input_fingerprint, read_chats
from storage.dataset import Dataset, DatasetError, DatasetSpec, create_dataset, open_dataset
from storage.dataset_spec import dataset_folder
from storage.objects import open_store

log = logging.getLogger(__name__)

EXAMPLES_SHOWN = 5
ENOUGH_TO_JUDGE = 1000
"""A stream is not refused for its share of bad records before it has given this many."""
ENCODING_THREADS = 8
AHEAD_PER_THREAD = 4
"""Records under way for each thread."""


@dataclass
class ChatTally:
    """What became of the chats that were read."""

    read: int = 0
    filtered: Counter[str] = field(default_factory=Counter)
    """Sound chats that give no sample, by reason."""
    bad: Counter[str] = field(default_factory=Counter)
    """Records that cannot be used, by reason."""
    examples: list[str] = field(default_factory=list)
    """The first bad records: place and reason."""

    @property
    def kept(self) -> int:
        """Chats that give a sample; those that were dropped for being there twice count too."""
        return self.read - self.bad.total() - self.filtered.total()

    def spoil(self, where: str, reason: str, detail: str, max_bad_fraction: float) -> None:
        """Count a bad record. Raises UserError as `check`, once there are enough to judge by."""
        self.bad[reason] += 1
        if len(self.examples) < EXAMPLES_SHOWN:
            self.examples.append(f"{where}: {detail}")
        if self.read >= ENOUGH_TO_JUDGE:
            self.check(max_bad_fraction)

    def check(self, max_bad_fraction: float) -> None:
        """Raise UserError when too large a share of the records is bad."""
        bad = self.bad.total()
        if bad > max_bad_fraction * self.read:
            raise UserError(
                f"{bad} of {self.read} chats cannot be used, more than max_bad_fraction {max_bad_fraction:g} "
                "allows. The first:\n  " + "\n  ".join(self.examples)
            )

    def sentence(self) -> str:
        """Say it in one line."""
        reasons = [f"{count} {reason}" for reason, count in (self.bad + self.filtered).most_common()]
        dropped = f"; dropped: {', '.join(reasons)}" if reasons else ""
        return f"{self.read} chats read, {self.kept} kept{dropped}"


def encode_chats(
    config: ExtractConfig,
    encoder: ChatEncoder,
    sources: Sequence[str],
    tally: ChatTally,
    mask_token_id: int | None,
) -> Iterator[Sample]:
    """Turn chats into samples, in their order. Raises UserError when too many records are bad.

    A chat that holds the mask token is bad: the drafter could not tell its text from what it is to fill in.
    """

    def encode(record: dict[str, Any]) -> Sample:
        if isinstance(record, UnreadableRecord):
            raise ChatError("unreadable", record.error)
        sample = encoder.encode(record)
        if mask_token_id is not None and (sample.token_ids_T == mask_token_id).any():
            raise ChatError("holds the mask token", f"token {mask_token_id}")
        return sample

    records = itertools.chain.from_iterable(map(read_chats, sources))
    for where, encoding in _in_order(encode, itertools.islice(records, config.limit)):
        tally.read += 1
        try:
            yield replace(encoding.result(), where=where)
        except ChatError as error:
            if error.unusable:
                tally.spoil(where, error.reason, str(error), config.max_bad_fraction)
            else:
                tally.filtered[error.reason] += 1
    tally.check(config.max_bad_fraction)
    if not tally.kept:
        raise UserError(f"no chat of {', '.join(sources)} gives a sample: {tally.sentence()}")


def _in_order(
    encode: Callable[[dict[str, Any]], Sample], records: Iterable[tuple[dict[str, Any], str]]
) -> Iterator[tuple[str, Future[Sample]]]:
    """Have records encoded some ahead; yields where each is from and what becomes of it, in their order.

    Threads will do: most of the time goes to the tokenizer, which lets others run meanwhile.
    """
    threads = min(ENCODING_THREADS, os.cpu_count() or 1)
    under_way: deque[tuple[str, Future[Sample]]] = deque()
    with ThreadPoolExecutor(threads, "encode") as pool:
        for record, where in records:
            under_way.append((where, pool.submit(encode, record)))
            if len(under_way) > AHEAD_PER_THREAD * threads:
                yield under_way.popleft()
        yield from under_way


def plan_dataset(config: ExtractConfig) -> Dataset:
    """Open the data set that the configuration describes, or plan it from the chats.

    A data set that is planned already is opened without reading more of the chats than their fingerprint.
    Raises UserError.
    """
    sources = (config.responses.output,) if config.responses else config.chats
    target, capture = describe_target(config.target)
    _warn_without_mask_token(config, target)
    _warn_of_the_last_layer(target, capture)
    spec = DatasetSpec(
        target=target,
        capture=capture,
        codec=config.codec,
        input_sha256=input_fingerprint(sources),
        chat={**config.chat.model_dump(mode="json"), "limit": config.limit},
        duplicate_ids=config.duplicate_ids,
        shard_tokens=config.shard_tokens,
        row_group_bytes=config.row_group_bytes,
    )
    store = open_store(config.store)
    folder = dataset_folder(config.name, spec)
    try:
        dataset = open_dataset(f"{store.uri}/{folder}", spec)
    except DatasetError:
        tally = ChatTally()
        encoder = ChatEncoder(load_tokenizer(config.target.path, config.target.revision), config.chat)
        samples = encode_chats(config, encoder, sources, tally, target.mask_token_id)

        def clash(sample: Sample, first: str) -> None:
            detail = (
                f"{sample.sample_id!r} is the id of another chat too, {first}: give each chat an id of its "
                "own, or none; a larger max_bad_fraction leaves the second out"
            )
            tally.spoil(sample.where, "id of another chat", detail, config.max_bad_fraction)

        dataset = create_dataset(store, config.name, spec, samples, clash=clash)
        log.info("%s", tally.sentence())
    plan = dataset.plan
    if plan.duplicates_dropped:
        log.warning("%d chats had the id of an earlier one and were dropped", plan.duplicates_dropped)
    log.info(
        "data set %s: %d samples, %d tokens (%d supervised) in %d shards",
        *(dataset.uri, plan.samples, plan.tokens, plan.supervised, len(plan.shards)),
    )
    return dataset


def _warn_of_the_last_layer(target: TargetSpec, capture: CaptureSpec) -> None:
    """Drafters need not read all that is stored, so this is allowed; who learns of it at training is late."""
    last = target.num_layers - 1
    if last in capture.tap_layer_ids:
        log.warning(
            "layer %d is the target's last: its output is stored, but no drafter is trained to read it, "
            "because not all serving engines could run it; leave it out of target.tap_layer_ids, or name the "
            "others in drafter.tap_layer_ids later",
            last,
        )


def _warn_without_mask_token(config: ExtractConfig, target: TargetSpec) -> None:
    """A drafter can name its own, so the data set is of use; but no chat was checked for that token then."""
    if target.mask_token_id is not None:
        return
    tokenizer = load_tokenizer(config.target.path, config.target.revision)
    try:
        mask_token_id(None, target, tokenizer)
    except UserError as error:
        log.warning(
            "%s. Without it training is refused until drafter.mask_token_id names one, and chats that hold "
            "that token are not found; set later, target.mask_token makes another data set",
            error,
        )
