"""Data of the quality run: the target's responses, its hidden states in shards, what codecs leave of them."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality_prompts import family_of, is_held_out, read_prompts

from dflash_core.chat import ChatConfig, ChatEncoder
from dflash_core.configuration import UserError, fingerprint
from dflash_core.messages import ChatError
from dflash_core.records import LAST_HIDDEN, CapturedSample, CaptureSpec, Sample, TargetSpec
from dflash_core.respond import Responder, split_reasoning
from dflash_core.target import Target
from storage.calibration import Calibration
from storage.codec import parse_codec
from storage.dataset import Dataset, DatasetSpec, create_dataset, open_dataset, total_error
from storage.dataset_spec import dataset_folder
from storage.objects import open_store
from storage.reader import ReaderConfig, RowReader
from storage.writer import ShardAlreadyCommitted, ShardWriter, WriterConfig

CHAT = ChatConfig(max_length=1024)
HELD_OUT = "held-out"
"""Name of the data set of held-out chats, which is lossless."""
NAMES = "datasets.json"
"""File that names the data sets, once all are planned."""
READ_TOKENS = 1 << 15
"""Tokens that are decoded at a time while a data set is read."""
Clock = Callable[[], bool]
"""Whether there is time left."""


def write_responses(
    prompts: Path,
    folder: Path,
    responder: Responder,
    *,
    new_tokens: int,
    batch: int,
    share: tuple[int, int],
    time_left: Clock,
) -> None:
    """Let the target answer prompts greedily, one file a batch of prompts of similar length.

    `share` (i, n) takes every n-th batch; the order of the batches is random, so that a run that is cut
    short has short and long prompts alike.
    """
    if responder.hybrid:
        raise UserError("hybrid targets answer in groups of one length: let `dflash extract` do that")
    records = sorted(read_prompts(prompts), key=lambda r: len(r["messages"][0]["content"]))
    folder.mkdir(parents=True, exist_ok=True)
    starts = list(range(0, len(records), batch))
    random.Random(0).shuffle(starts)
    for start in starts[share[0] :: share[1]]:
        part = folder / f"part-{start:06d}.jsonl.gz"
        if part.exists() or not time_left():
            continue
        began, chunk = time.perf_counter(), records[start : start + batch]
        rows = [responder.encoder.prompt_ids(r["messages"], None) for r in chunk]
        answers = answer_greedily(responder.model, rows, responder.stop_ids, new_tokens)
        lines = []
        for record, ids in zip(chunk, answers, strict=True):
            stopped = ids[-1] in responder.stop_ids
            text = responder.tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=False)
            messages = [*record["messages"], split_reasoning(text, responder.encoder)]
            finish = "stop" if stopped else "length"
            lines.append(json.dumps({**record, "messages": messages, "finish_reason": finish}))
        scratch = part.with_suffix(".new")
        scratch.write_bytes(gzip.compress("\n".join(lines).encode()))
        scratch.rename(part)
        tokens = sum(map(len, answers))
        seconds = time.perf_counter() - began
        print(f"answered {len(chunk)} prompts, {tokens:,} tokens in {seconds:.0f} s", flush=True)


@torch.inference_mode()
def answer_greedily(
    model: Any, prompts: list[list[int]], stop_ids: list[int], new_tokens: int, *, look_every: int = 24
) -> list[list[int]]:
    """Greedy answers of a causal transformers model, the stop token included, at most `new_tokens` long.

    Rows leave the batch soon after they have ended, or begun to go in circles (what is written until then
    stays their answer). That is most of them long before the longest one ends.
    """
    from transformers import DynamicCache

    device, longest = model.device, max(map(len, prompts))
    padded = [[stop_ids[0]] * (longest - len(row)) + row for row in prompts]
    input_BT = torch.tensor(padded, device=device)
    mask_BT = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=device)
    position_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    stops = torch.tensor(stop_ids, device=device)
    written_BN = torch.empty(len(prompts), 0, dtype=torch.int64, device=device)
    ended_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    answers: list[list[int]] = [[] for _ in prompts]
    here, cache = list(range(len(prompts))), DynamicCache()
    for step in range(1, new_tokens + 1):
        output = model(
            input_ids=input_BT,
            attention_mask=mask_BT,
            position_ids=position_BT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        input_BT = output.logits[:, -1:].argmax(-1)
        written_BN = torch.cat([written_BN, input_BT], dim=1)
        ended_B |= torch.isin(input_BT[:, 0], stops)
        mask_BT = torch.nn.functional.pad(mask_BT, (0, 1), value=1)
        position_BT = position_BT[:, -1:] + 1
        if step % look_every and step < new_tokens:
            continue
        rows = [_until(ids, stop_ids) for ids in written_BN.tolist()]
        left = [
            i
            for i, (ids, ended) in enumerate(zip(rows, ended_B.tolist(), strict=True))
            if not ended and step < new_tokens and not goes_in_circles(np.array(ids))
        ]
        if len(left) == len(rows):
            continue
        for i in set(range(len(rows))).difference(left):
            answers[here[i]] = rows[i]
        if not left:
            break
        chosen = torch.tensor(left, device=device)
        here = [here[i] for i in left]
        cache.batch_select_indices(chosen)
        input_BT, mask_BT, position_BT, written_BN, ended_B = (
            t[chosen] for t in (input_BT, mask_BT, position_BT, written_BN, ended_B)
        )
    return answers


def _until(ids: list[int], stop_ids: list[int]) -> list[int]:
    """Up to the first stop token, that included."""
    return ids[: next((i for i, token in enumerate(ids) if token in stop_ids), len(ids) - 1) + 1]


def read_responses(folder: Path, tokenizer: Any) -> tuple[list[Sample], dict[str, int]]:
    """Encode the answered prompts, in an order that has nothing to do with their length.

    Answers that go in circles are left out: they are easy to draft, and nobody wants them. Also returns how
    many those were, and how many of the rest were cut at the length limit.
    """
    encoder = ChatEncoder(tokenizer, CHAT)
    samples, counts = [], {"circling_answers": 0, "cut_answers": 0}
    for part in sorted(folder.glob("part-*.jsonl.gz")):
        for line in gzip.decompress(part.read_bytes()).decode().splitlines():
            record = json.loads(line)
            with suppress(ChatError):
                sample = encoder.encode(record)
                if goes_in_circles(sample.token_ids_T[sample.loss_mask_T]):
                    counts["circling_answers"] += 1
                    continue
                samples.append(sample)
                counts["cut_answers"] += record["finish_reason"] == "length"
    samples.sort(key=lambda sample: hashlib.sha256(sample.sample_id.encode()).digest())
    return samples, counts


def goes_in_circles(token_ids_T: np.ndarray, *, length: int = 16, share: float = 0.25) -> bool:
    """Whether more than `share` of an answer's stretches of so many tokens stood in it before."""
    if len(token_ids_T) <= length:
        return False
    stretches = np.lib.stride_tricks.sliding_window_view(token_ids_T, length)
    return 1 - len({stretch.tobytes() for stretch in stretches}) / len(stretches) > share


@dataclass(frozen=True, kw_only=True)
class DataSets:
    """The held-out chats without loss, and the training chats with each codec."""

    held_out: Dataset
    training: dict[str, Dataset]

    @property
    def all(self) -> tuple[Dataset, ...]:
        """Held-out chats first."""
        return (self.held_out, *self.training.values())


def create_datasets(
    folder: Path, samples: Sequence[Sample], target: TargetSpec, captures: dict[str, CaptureSpec]
) -> None:
    """Plan all data sets and note their names; `captures` says for each codec what is stored with it."""
    store = open_store(str(folder))
    held_out = [sample for sample in samples if is_held_out(sample.sample_id)]
    training = [sample for sample in samples if not is_held_out(sample.sample_id)]

    def create(name: str, codec: str, capture: CaptureSpec, chats: list[Sample]) -> Dataset:
        spec = DatasetSpec(
            target=target,
            capture=capture,
            codec=codec,
            input_sha256=fingerprint([sample.sample_id for sample in chats]),
            shard_tokens=1 << 17,  # more than the calibration takes: the first shard alone decides the scales
        )
        try:
            dataset = create_dataset(store, name, spec, chats)
            check_readable(dataset)
        except UserError as error:
            path = folder / dataset_folder(name, spec)
            print(f"{path} is written anew, this version cannot read what is there: {error}", flush=True)
            shutil.rmtree(path)
            dataset = create_dataset(store, name, spec, chats)
        return dataset

    plain = next(iter(captures.values())).model_copy(update={"last_hidden": "no"})
    datasets = DataSets(
        held_out=create(HELD_OUT, "lossless", plain, held_out),
        training={codec: create("training", codec, capture, training) for codec, capture in captures.items()},
    )
    scratch = folder / f".{NAMES}"
    scratch.write_text(json.dumps([dataset.uri for dataset in datasets.all]))
    scratch.rename(folder / NAMES)


def check_readable(dataset: Dataset) -> None:
    """Raise UserError unless what is written so far can be read; of a whole data set one chat is decoded."""
    dataset.records()
    if dataset.sealed:
        row, tokens = np.array([0]), int(dataset.index.tokens_N[0])
        with RowReader(dataset, dataset.columns, [row], row_tokens=tokens, device="cpu") as reader:
            next(iter(reader))


def open_datasets(folder: Path) -> DataSets:
    """The data sets that `create_datasets` planned last in this folder."""
    held_out, *training = map(open_dataset, json.loads((folder / NAMES).read_text()))
    return DataSets(held_out=held_out, training={dataset.spec.codec: dataset for dataset in training})


def write_shards(
    datasets: DataSets, target: Target, *, share: tuple[int, int], threads: int, time_left: Clock
) -> None:
    """Run the target once over the chats of every n-th shard, then write these shards with each codec.

    The states stay on the device in between. Who writes the first shard also publishes the scales.
    """
    if all(dataset.sealed for dataset in datasets.all):
        return
    first = next(iter(datasets.training.values()))  # all have the same shards
    held: dict[str, CapturedSample] = {}
    for dataset in (datasets.held_out, first):
        samples = [s for i in _shards(dataset, share) for s in dataset.samples(i)]
        for batch in target.batches(samples):
            for captured in target.capture(batch):
                states = {name: state.clone() for name, state in captured.states.items()}
                held[captured.sample.sample_id] = CapturedSample(sample=captured.sample, states=states)
    print(f"captured {sum(c.sample.num_tokens for c in held.values()):,} tokens", flush=True)
    for dataset in datasets.all:
        began = time.perf_counter()
        if parse_codec(dataset.spec.codec).needs_scales:
            _publish_scales(dataset, held, share)
        for shard in _shards(dataset, share):
            if not time_left():
                return
            with suppress(ShardAlreadyCommitted):
                _write_shard(dataset, shard, held, threads)
        if not dataset.missing():
            dataset.seal()
            name, seconds = f"{dataset.name} {dataset.spec.codec}", time.perf_counter() - began
            print(f"sealed {name} ({seconds:.0f} s): {json.dumps(costs(dataset))}", flush=True)


def _shards(dataset: Dataset, share: tuple[int, int]) -> list[int]:
    return [planned.shard for planned in dataset.plan.shards][share[0] :: share[1]]


def _publish_scales(dataset: Dataset, held: dict[str, CapturedSample], share: tuple[int, int]) -> None:
    if share[0] == 0:
        calibration = Calibration()
        for sample in dataset.calibration_samples():
            states = held[sample.sample_id].states
            calibration.add({name: states[name] for name in dataset.columns})
        dataset.publish_scales(calibration.scales())
    while dataset.scales() is None:
        time.sleep(0.2)


def _write_shard(dataset: Dataset, shard: int, held: dict[str, CapturedSample], threads: int) -> None:
    with ShardWriter(dataset, shard, config=WriterConfig(threads=threads)) as writer:
        for sample in dataset.samples(shard):
            states = held[sample.sample_id].states
            chosen = {name: states[name] for name in dataset.columns}
            writer.add(CapturedSample(sample=sample, states=chosen))
        writer.close()


def costs(dataset: Dataset) -> dict[str, Any]:
    """What the codec of a complete data set costs in bytes and in error, over its taps."""
    records = list(dataset.records().values())
    taps = [name for name in dataset.columns if name != LAST_HIDDEN]
    tokens = sum(record.tokens for record in records)
    size = sum(record.column_bytes[name] for record in records for name in taps)
    sums = [total_error(records, name) for name in taps]
    return {
        "codec": dataset.spec.codec,
        "bits_per_value": 8 * size / (tokens * dataset.spec.target.hidden_size * len(taps)),
        "bytes_per_token": size / tokens,
        "bits_per_value_of_taps": [
            8 * sum(r.column_bytes[name] for r in records) / (tokens * dataset.spec.target.hidden_size)
            for name in taps
        ],
        "relative_error": [s.relative_error for s in sums],
        "energy_error": [s.energy_error for s in sums],
        "tokens": tokens,
    }


@dataclass(frozen=True, kw_only=True)
class Chats:
    """Chats and their hidden states, one chat behind the other on the device."""

    samples: list[Sample]
    taps_TE: torch.Tensor
    """bf16 [all tokens, L*D]."""
    last_TD: torch.Tensor | None
    """bf16 [all tokens, D], after the target's final norm."""
    starts_S: np.ndarray
    """int64 [samples + 1]."""

    def of(self, sample: int) -> torch.Tensor:
        """Taps [T, L*D] of one sample (a view)."""
        return self.taps_TE[int(self.starts_S[sample]) : int(self.starts_S[sample + 1])]

    def rows(self, samples: Sequence[int]) -> np.ndarray:
        """int64: places of these samples' tokens, one sample behind the other."""
        return np.concatenate([np.arange(self.starts_S[i], self.starts_S[i + 1]) for i in samples])


def chats_with(samples: list[Sample], values: int, width: int | None, device: torch.device) -> Chats:
    """Room for the states of chats: `values` of taps a token, and `width` of the last hidden state if any."""
    starts_S = np.concatenate([[0], np.cumsum([sample.num_tokens for sample in samples])]).astype(np.int64)
    total = int(starts_S[-1])
    return Chats(
        samples=samples,
        taps_TE=torch.empty(total, values, dtype=torch.bfloat16, device=device),
        last_TD=None if width is None else torch.empty(total, width, dtype=torch.bfloat16, device=device),
        starts_S=starts_S,
    )


def read_chats(
    dataset: Dataset,
    device: torch.device,
    threads: int,
    *,
    last_hidden: bool = False,
    taps: Sequence[int] | None = None,
) -> Chats:
    """Read a whole data set into memory on the device; `taps` chooses some by place.

    The arithmetic runs on the CPU: chats as short and states as narrow as these make many small kernels,
    which take their turn behind those of every other process that trains on this GPU.
    """
    samples = [sample for planned in dataset.plan.shards for sample in dataset.samples(planned.shard)]
    width = dataset.spec.target.hidden_size
    names = [name for name in dataset.columns if name != LAST_HIDDEN]
    names = names if taps is None else [names[i] for i in taps]
    chats = chats_with(samples, len(names) * width, width if last_hidden else None, device)
    columns = [*names, LAST_HIDDEN] if last_hidden else names
    row_tokens = max(READ_TOKENS, max(sample.num_tokens for sample in samples))
    rows = _rows_in_order(chats.starts_S, row_tokens)
    config = ReaderConfig(threads=threads)
    at, taps_width = 0, chats.taps_TE.shape[1]
    with RowReader(dataset, columns, rows, row_tokens=row_tokens, device="cpu", config=config) as reader:
        for packed, states_CE in reader:
            states_TE = states_CE[: packed.num_tokens].to(device)
            chats.taps_TE[at : at + packed.num_tokens] = states_TE[:, :taps_width]
            if chats.last_TD is not None:
                chats.last_TD[at : at + packed.num_tokens] = states_TE[:, taps_width:]
            at += packed.num_tokens
    return chats


def _rows_in_order(starts_S: np.ndarray, row_tokens: int) -> list[np.ndarray]:
    """Pack samples, one behind the other from `starts_S`, into rows without changing their order."""
    rows, first = [], 0
    while first < len(starts_S) - 1:
        last = int(np.searchsorted(starts_S, starts_S[first] + row_tokens, side="right")) - 1
        rows.append(np.arange(first, last))
        first = last
    return rows


def put_exact(chats: Chats, lossless: Dataset, threads: int, *, tap: int | None, loudest: float) -> None:
    """Replace one tap, or the `loudest` share of all tokens, by what the lossless data set holds.

    A token is as loud as its loudest tap, measured against that tap's mean energy.
    """
    device = chats.taps_TE.device
    count = len(lossless.spec.capture.tap_layer_ids)
    pieces = chats.taps_TE.chunk(count, dim=-1)
    if tap is not None:
        pieces[tap].copy_(read_chats(lossless, device, threads, taps=(tap,)).taps_TE)
    if loudest:
        energies = [piece.float().square().mean(-1) for piece in pieces]
        loudness_T = torch.stack([energy / energy.mean() for energy in energies]).amax(0)
        loud = loudness_T.topk(max(1, round(loudest * len(loudness_T)))).indices
        for i, piece in enumerate(pieces):
            piece[loud] = read_chats(lossless, device, threads, taps=(i,)).taps_TE[loud]


def families(samples: Sequence[Sample]) -> list[str]:
    """Family of each sample."""
    return [family_of(sample.sample_id) for sample in samples]
