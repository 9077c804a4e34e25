"""From chats to the plan of a data set: read, tokenise, count what cannot be used, cut into shards."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dflash_core.chat import ChatEncoder
from dflash_core.configuration import UserError
from dflash_core.messages import ChatError
from dflash_core.records import Sample
from dflash_core.target import describe_target, load_tokenizer
from flows.config import ExtractConfig
from storage.chats import UnreadableRecord, input_fingerprint, read_chats
from storage.dataset import Dataset, DatasetError, DatasetSpec, create_dataset, open_dataset
from storage.objects import open_store

log = logging.getLogger(__name__)

EXAMPLES_SHOWN = 5
ENOUGH_TO_JUDGE = 1000
"""A stream is not refused for its share of bad records before it has given this many."""


@dataclass
class ChatTally:
    """What became of the chats that were read."""

    read: int = 0
    kept: int = 0
    filtered: Counter[str] = field(default_factory=Counter)
    """Sound chats that give no sample, by reason."""
    bad: Counter[str] = field(default_factory=Counter)
    """Records that cannot be used, by reason."""
    examples: list[str] = field(default_factory=list)
    """The first bad records: place and reason."""

    def spoil(self, where: str, reason: str, detail: str) -> None:
        """Count a bad record."""
        self.bad[reason] += 1
        if len(self.examples) < EXAMPLES_SHOWN:
            self.examples.append(f"{where}: {detail}")

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
    """Turn chats into samples one by one. Raises UserError when too many records are bad.

    A chat that holds the mask token is bad: the drafter could not tell its text from what it is to fill in.
    """
    for source in sources:
        for record, where in read_chats(source):
            if tally.read == config.limit:
                break
            tally.read += 1
            try:
                if isinstance(record, UnreadableRecord):
                    raise ChatError("unreadable", record.error)
                sample = encoder.encode(record)
                if mask_token_id is not None and (sample.token_ids_T == mask_token_id).any():
                    raise ChatError("holds the mask token", f"token {mask_token_id}")
                yield sample
                tally.kept += 1
            except ChatError as error:
                if error.unusable:
                    tally.spoil(where, error.reason, str(error))
                    if tally.read >= ENOUGH_TO_JUDGE:
                        tally.check(config.max_bad_fraction)
                else:
                    tally.filtered[error.reason] += 1
    tally.check(config.max_bad_fraction)


def plan_dataset(config: ExtractConfig) -> Dataset:
    """Open the data set that the configuration describes, or plan it from the chats.

    A data set that is planned already is opened without reading more of the chats than their fingerprint.
    Raises UserError.
    """
    sources = (config.responses.output,) if config.responses else config.chats
    target, capture = describe_target(config.target)
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
    folder = f"{config.name}-{spec.fingerprint[:12]}"
    try:
        dataset = open_dataset(f"{store.uri}/{folder}", spec)
    except DatasetError:
        tally = ChatTally()
        encoder = ChatEncoder(load_tokenizer(config.target.path, config.target.revision), config.chat)
        samples = encode_chats(config, encoder, sources, tally, target.mask_token_id)
        dataset = create_dataset(store, config.name, spec, samples)
        log.info("%s", tally.sentence())
    plan = dataset.plan
    if plan.duplicates_dropped:
        log.warning("%d chats had the id of an earlier one and were dropped", plan.duplicates_dropped)
    log.info(
        "data set %s: %d samples, %d tokens (%d supervised) in %d shards",
        *(dataset.uri, plan.samples, plan.tokens, plan.supervised, len(plan.shards)),
    )
    return dataset
