"""Data of the quality run: the target's responses, its hidden states, and what a codec leaves of them."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from quality_prompts import read_prompts

from dflash_core.chat import ChatConfig, ChatEncoder
from dflash_core.configuration import fingerprint
from dflash_core.messages import ChatError
from dflash_core.records import LAST_HIDDEN, CapturedSample, CaptureSpec, Sample, TargetSpec, tap_column
from dflash_core.respond import GenerationSettings, Responder
from dflash_core.target import TargetConfig, batches, load_target
from storage.codec import Calibration, parse_codec
from storage.dataset import Dataset, DatasetSpec, create_dataset, total_error
from storage.objects import open_store
from storage.writer import ShardWriter, WriterConfig

CHAT = ChatConfig(max_length=1024)
Clock = Callable[[], bool]
"""Whether there is time left."""


def write_responses(
    prompts: Path, folder: Path, responder: Responder, *, new_tokens: int, batch: int, time_left: Clock
) -> bool:
    """Let the target answer all prompts greedily, one part file a batch; says whether all are done."""
    records = sorted(read_prompts(prompts), key=lambda r: len(r["messages"][0]["content"]))
    settings = GenerationSettings(max_new_tokens=new_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(records), batch):
        part = folder / f"part-{start // batch:05d}.jsonl.gz"
        if part.exists():
            continue
        if not time_left():
            return False
        began, chunk = time.perf_counter(), records[start : start + batch]
        answers = responder.respond([(r["messages"], None) for r in chunk], settings, batch_size=batch)
        lines = [
            json.dumps({**r, "messages": [*r["messages"], a.message], "finish": a.finish_reason})
            for r, a in zip(chunk, answers, strict=True)
        ]
        scratch = part.with_suffix(".new")
        scratch.write_bytes(gzip.compress("\n".join(lines).encode()))
        scratch.rename(part)
        tokens = sum(answer.num_tokens for answer in answers)
        seconds = time.perf_counter() - began
        print(
            f"responses: {start + len(chunk)} of {len(records)}, {tokens / seconds:,.0f} tokens/s", flush=True
        )
    return True


@dataclass(frozen=True, kw_only=True)
class Chats:
    """All encoded chats, and where each belongs."""

    samples: list[Sample]
    family: dict[str, str]
    held_out: set[str]
    cut: int
    """Responses that reached the length limit."""

    @property
    def trained(self) -> list[int]:
        """Indices of the samples to train on."""
        return [i for i, sample in enumerate(self.samples) if sample.sample_id not in self.held_out]

    @property
    def evaluated(self) -> list[int]:
        """Indices of the samples to measure on."""
        return [i for i, sample in enumerate(self.samples) if sample.sample_id in self.held_out]


def read_chats(folder: Path, tokenizer: Any) -> Chats:
    """Encode the answered prompts."""
    encoder = ChatEncoder(tokenizer, CHAT)
    samples, family, held_out, cut = [], {}, set(), 0
    for part in sorted(folder.glob("part-*.jsonl.gz")):
        for line in gzip.decompress(part.read_bytes()).decode().splitlines():
            record = json.loads(line)
            try:
                sample = encoder.encode(record)
            except ChatError:
                continue
            samples.append(sample)
            family[sample.sample_id] = record["family"]
            cut += record["finish"] == "length"
            if record["split"] == "held_out":
                held_out.add(sample.sample_id)
    return Chats(samples=samples, family=family, held_out=held_out, cut=cut)


@dataclass(frozen=True, kw_only=True)
class States:
    """Hidden states of all chats one behind the other on the device, in the order of `Chats.samples`."""

    taps_TE: torch.Tensor
    """bf16 [all tokens, L*D]."""
    last_TD: torch.Tensor | None
    """bf16 [all tokens, D], after the target's final norm; exact whatever the codec."""
    starts_S: np.ndarray
    """int64 [samples + 1]."""

    def of(self, sample: int) -> torch.Tensor:
        """Taps [T, L*D] of one sample (a view)."""
        return self.taps_TE[int(self.starts_S[sample]) : int(self.starts_S[sample + 1])]

    def rows(self, samples: Sequence[int]) -> np.ndarray:
        """int64: places of these samples' tokens, one sample behind the other."""
        return np.concatenate([np.arange(self.starts_S[i], self.starts_S[i + 1]) for i in samples])


def starts_of(samples: Sequence[Sample]) -> np.ndarray:
    """int64 [samples + 1]: first token of each sample, and the end of the last."""
    return np.concatenate([[0], np.cumsum([sample.num_tokens for sample in samples])]).astype(np.int64)


def capture(
    path: str, samples: list[Sample], device: torch.device, *, mask_token: str, taps: int, last_hidden: bool
) -> tuple[States, TargetSpec, CaptureSpec]:
    """Run the target over all chats and keep its states on the device."""
    config = TargetConfig(
        path=path,
        num_taps=taps,
        mask_token=mask_token,
        last_hidden="after_final_norm" if last_hidden else "no",
        batch_tokens=1 << 16,
    )
    target = load_target(config, device)
    starts_S = starts_of(samples)
    place = {sample.sample_id: int(starts_S[i]) for i, sample in enumerate(samples)}
    width, total = target.spec.hidden_size, int(starts_S[-1])
    taps_TE = torch.empty(total, taps * width, dtype=torch.bfloat16, device=device)
    last_TD = torch.empty(total, width, dtype=torch.bfloat16, device=device) if last_hidden else None
    names = [tap_column(i) for i in target.capture_spec.tap_layer_ids]
    for batch in batches(samples, config.batch_tokens):
        for captured in target.capture(batch):
            start = place[captured.sample.sample_id]
            span = slice(start, start + captured.sample.num_tokens)
            taps_TE[span] = torch.cat([captured.states[name] for name in names], dim=-1)
            if last_TD is not None:
                last_TD[span] = captured.states[LAST_HIDDEN]
    plain = target.capture_spec.model_copy(update={"last_hidden": "no"})
    return States(taps_TE=taps_TE, last_TD=last_TD, starts_S=starts_S), target.spec, plain


def through_shards(
    codec: str,
    states: States,
    samples: list[Sample],
    target: TargetSpec,
    capture_spec: CaptureSpec,
    folder: Path,
    threads: int,
) -> tuple[States, dict[str, Any]]:
    """Write all states with `codec` into real shards and read them back; what comes out, and costs."""
    spec = DatasetSpec(
        target=target,
        capture=capture_spec,
        codec=codec,
        input_sha256=fingerprint([sample.sample_id for sample in samples]),
        shard_tokens=1 << 18,
    )
    store = open_store(str(folder))
    dataset = create_dataset(store, "quality", spec, samples)
    place = {sample.sample_id: i for i, sample in enumerate(samples)}

    def captured(sample: Sample) -> CapturedSample:
        pieces = states.of(place[sample.sample_id]).chunk(len(dataset.columns), dim=-1)
        return CapturedSample(sample=sample, states=dict(zip(dataset.columns, pieces, strict=True)))

    began = time.perf_counter()
    if parse_codec(codec).needs_scales:
        calibration = Calibration()
        for sample in dataset.calibration_samples():
            calibration.add(captured(sample).states)
        dataset.publish_scales(calibration.scales())
    for shard in dataset.missing():
        with ShardWriter(dataset, shard, config=WriterConfig(threads=threads)) as writer:
            for sample in dataset.samples(shard):
                writer.add(captured(sample))
            writer.close()
    dataset.seal()
    written = time.perf_counter()
    taps_TE = _read_back(dataset, states, place, threads)
    info = _costs(dataset, written - began, time.perf_counter() - written)
    return States(taps_TE=taps_TE, last_TD=states.last_TD, starts_S=states.starts_S), info


def _read_back(dataset: Dataset, states: States, place: dict[str, int], threads: int) -> torch.Tensor:
    """Decode every cell of every shard file into place."""
    codec, device = parse_codec(dataset.spec.codec), states.taps_TE.device
    scales = {name: scale.to(device) for name, scale in (dataset.scales() or {}).items()}
    out_TE = torch.empty_like(states.taps_TE)
    columns = dict(zip(dataset.columns, out_TE.chunk(len(dataset.columns), dim=-1), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        for name, start, stop, symbols in pool_map(pool, codec.from_bytes, _cells(dataset, states, place)):
            codec.decode_on_device(symbols.to(device), scales.get(name), columns[name][start:stop])
    return out_TE


def _cells(dataset: Dataset, states: States, place: dict[str, int]) -> Iterator[tuple[str, int, int, bytes]]:
    """(column, first and last place, cell) of all shards."""
    for record in dataset.records().values():
        with dataset.store.open(record.object) as file:
            for batch in pq.ParquetFile(file).iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    start = int(states.starts_S[place[row["sample_id"]]]) + row["first_token"]
                    stop = start + len(row["token_ids"]) // 4
                    for name in dataset.columns:
                        yield name, start, stop, row[name]


def pool_map(pool: ThreadPoolExecutor, work: Callable[[Any], Any], items: Iterator[tuple[Any, ...]]) -> Any:
    """Do `work` in threads on the last part of each item; items come in order, that part replaced."""
    waiting: list[tuple[tuple[Any, ...], Any]] = []
    for *rest, last in items:
        waiting.append((tuple(rest), pool.submit(work, last)))
        if len(waiting) >= 512:
            head, future = waiting.pop(0)
            yield (*head, future.result())
    for head, future in waiting:
        yield (*head, future.result())


def _costs(dataset: Dataset, write_seconds: float, read_seconds: float) -> dict[str, Any]:
    records = list(dataset.records().values())
    tokens = sum(record.tokens for record in records)
    size = sum(sum(record.column_bytes.values()) for record in records)
    sums = [total_error(records, name) for name in dataset.columns]
    values = tokens * dataset.spec.target.hidden_size * len(dataset.columns)
    return {
        "codec": dataset.spec.codec,
        "bits_per_value": 8 * size / values,
        "bytes_per_token": size / tokens,
        "relative_error": [s.relative_error for s in sums],
        "energy_error": [s.energy_error for s in sums],
        "write_seconds": write_seconds,
        "read_seconds": read_seconds,
        "tokens": tokens,
    }
