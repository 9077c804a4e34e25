"""`dflash evaluate`: drafter, target and prompts in; acceptance as JSON and plot out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from dflash_core.acceptance import first_difference, stats_of
from dflash_core.cached_target import CachedTarget
from dflash_core.chat import ChatConfig, ChatEncoder
from dflash_core.configuration import Config, Seed, Text, UserError, expand_home
from dflash_core.export import load_exported
from dflash_core.messages import ChatError, normalise
from dflash_core.respond import Responder
from dflash_core.speculative import (
    BlockProposer,
    DraftChoice,
    DrafterProposer,
    Generation,
    greedy_generate,
    speculative_generate,
)
from dflash_core.target_identity import TargetName, load_tokenizer, target_spec
from flows.acceptance_report import FamilyResult, make_report, write_report
from flows.machine import made_folder, named_device
from storage.chats import UnreadableRecord, read_chats

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Progress = Callable[[int, int | None], None]


class EvaluateConfig(Config):
    """What to measure, on what, and what is good enough."""

    target: TargetName
    """Folder or hub name of the target."""
    revision: str | None = None
    """Hub revision of the target."""
    drafter: Path
    """Exported drafter folder."""
    prompts: dict[str, Text] = Field(min_length=1)
    """Family name -> chats (file, folder or data set); what precedes the last answer is the prompt."""
    output: Path
    """Folder that gets acceptance.json and acceptance.png; those of an earlier run are replaced."""
    chat: ChatConfig = ChatConfig()
    """Template settings; must be those that the drafter was trained and will be served with."""
    prompts_per_family: int = Field(default=16, ge=1)
    """The first so many usable chats of each family."""
    max_prompt_tokens: int = Field(default=2048, ge=1)
    """Longer prompts are passed over, and counted."""
    max_new_tokens: int = Field(default=256, ge=2)
    temperature: float = Field(default=0.0, ge=0)
    """0 decodes greedily and compares with the plain target; above 0 there is nothing to compare."""
    drafts: DraftChoice = "argmax"
    """With a temperature: propose the drafter's argmax, or a sample."""
    minimum_acceptance_length: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    """The run fails when any family stays below this."""
    require_lossless: bool = True
    """The run fails when a text differs from the plain target's by more than a floating-point tie."""
    tie_tolerance: float | None = Field(default=None, ge=0)
    """Two logits that differ by less than this share count as a tie. None: 0 for float32 on the CPU (texts
    must be
    equal), 0.0001 for float32 on a GPU, 0.02 for bfloat16 (whose steps are 0.4 to 0.8 per cent)."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1" ...; "auto" is the first GPU, or the CPU."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Arithmetic of target and drafter."""
    seed: Seed = 0
    """Of sampling."""


def evaluate(config: EvaluateConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Measure real speculative decoding on every family; write acceptance.json and acceptance.png.

    `progress` is told (prompts done, prompts in all; None while the target is read). Returns the report,
    which the caller shows and then gives to `check_gates`. Raises UserError, before the target is loaded,
    when drafter and target do not belong together, a family has no usable prompt, or device or output cannot
    be had.
    """
    started = time.perf_counter()
    device = named_device(config.device)
    dtype = _DTYPES[config.dtype]
    output = made_folder(config.output)
    spec = target_spec(config.target, config.revision, None)
    encoder = ChatEncoder(load_tokenizer(config.target, config.revision), config.chat)
    families = {name: read_prompts(name, source, encoder, config) for name, source in config.prompts.items()}
    total = sum(len(prompts) for prompts, _ in families.values())
    drafter = load_exported(Path(expand_home(str(config.drafter))), target=spec, device=device, dtype=dtype)
    alive = partial(progress, 0, None) if progress is not None else None
    responder = Responder(config.target, config.revision, config.chat, device, dtype, alive)
    results: dict[str, FamilyResult] = {}
    done = 0
    with CachedTarget(responder.model, drafter.config.tap_layer_ids) as target:
        proposer = DrafterProposer(drafter, target)
        _warm_up(target, proposer, next(iter(families.values()))[0][0], config)
        for name, (prompts, passed_over) in families.items():
            before = done

            def told(count: int, before: int = before) -> None:
                if progress is not None:
                    progress(before + count, total)

            measured = measure(target, proposer, prompts, config, responder.stop_ids, told)
            results[name] = replace(measured, passed_over=dict(passed_over.most_common()))
            done += len(prompts)
    settings = {
        **config.model_dump(
            mode="json", include={"target", "drafter", "temperature", "max_new_tokens", "dtype"}
        ),
        "device": str(device),
        "seconds": time.perf_counter() - started,
    }
    greedy = config.temperature == 0
    report = make_report(results, drafter.config.block_size, greedy=greedy, settings=settings)
    write_report(report, output)
    return report


def read_prompts(
    family: str, source: str, encoder: ChatEncoder, config: EvaluateConfig
) -> tuple[list[list[int]], Counter[str]]:
    """Token ids of the first `prompts_per_family` usable prompts; by reason, how many chats before the last
    of them were passed over. Raises UserError when no prompt is usable.
    """
    prompts: list[list[int]] = []
    passed_over: Counter[str] = Counter()
    first: dict[str, str] = {}
    for record, where in read_chats(source):
        try:
            prompts.append(_prompt(record, encoder, config.max_prompt_tokens))
        except ChatError as error:
            passed_over[error.reason] += 1
            first.setdefault(error.reason, f"{where}: {error.detail}")
        if len(prompts) == config.prompts_per_family:
            break
    if not prompts:
        why = "; ".join(
            f"{count} {reason} (the first is {first[reason]})" for reason, count in passed_over.most_common()
        )
        raise UserError(
            f"prompts: {family!r} names {source}, which has no usable prompt: {why or 'it holds no chats'}"
        )
    return prompts, passed_over


def _prompt(record: dict[str, Any], encoder: ChatEncoder, longest: int) -> list[int]:
    """What precedes the last answer. Raises ChatError."""
    if isinstance(record, UnreadableRecord):
        raise ChatError("unreadable", record.error)
    messages, tools = normalise(record, to_answer=True)
    roles = [message["role"] for message in messages]
    last = len(roles) - 1 - roles[::-1].index("assistant")
    if "user" not in roles[:last]:
        raise ChatError("without a user turn", f"before the last answer are {roles[:last]}")
    ids = encoder.prompt_ids(messages[:last], tools)
    if len(ids) > longest:
        raise ChatError("too long", f"{len(ids)} tokens, more than max_prompt_tokens {longest}")
    return ids


def measure(
    target: CachedTarget,
    proposer: BlockProposer,
    prompts: Sequence[list[int]],
    config: EvaluateConfig,
    stop_ids: Sequence[int],
    progress: Callable[[int], None] | None = None,
) -> FamilyResult:
    """Decode each prompt with drafted blocks and, when greedy, without; compare texts and add up."""
    tolerance = _tolerance(config, target.device)
    chance = torch.Generator(device=target.device).manual_seed(config.seed)
    drafted: list[Generation] = []
    plain_seconds = 0.0
    differences = []
    limits = {"max_new_tokens": config.max_new_tokens, "stop_ids": frozenset(stop_ids)}
    for number, prompt in enumerate(prompts):
        drafted.append(
            speculative_generate(
                target,
                proposer,
                prompt,
                temperature=config.temperature,
                drafts=config.drafts,
                generator=chance,
                **limits,  # type: ignore[arg-type]
            )
        )
        if config.temperature == 0:
            plain = greedy_generate(target, prompt, **limits)  # type: ignore[arg-type]
            plain_seconds += plain.decode_seconds
            difference = first_difference(plain, drafted[-1], tolerance=tolerance)
            differences += [(number, difference)] if difference is not None else []
        if progress is not None:
            progress(number + 1)
    return FamilyResult(
        stats=stats_of(drafted, proposer.block_size),
        prompts=len(prompts),
        new_tokens=sum(len(generation.token_ids) for generation in drafted),
        plain_seconds=plain_seconds,
        speculative_seconds=sum(generation.decode_seconds for generation in drafted),
        differences=differences,
    )


def _warm_up(
    target: CachedTarget, proposer: BlockProposer, prompt: list[int], config: EvaluateConfig
) -> None:
    """The first kernels of a process are slow; keep them out of the times."""
    few = min(8, config.max_new_tokens)
    greedy_generate(target, prompt, max_new_tokens=few)
    speculative_generate(target, proposer, prompt, max_new_tokens=few)


def _tolerance(config: EvaluateConfig, device: torch.device) -> float:
    if config.tie_tolerance is not None:
        return config.tie_tolerance
    if config.dtype == "bfloat16":
        return 0.02
    return 0.0 if device.type == "cpu" else 1e-4
