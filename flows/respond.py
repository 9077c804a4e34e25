"""Regenerates the responses of chats with the target: here, or through an OpenAI-compatible endpoint."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from dflash_core.chat import ChatConfig
from dflash_core.configuration import Config, Text, UserError, fingerprint
from dflash_core.messages import ChatError, normalise, own_id
from dflash_core.respond import GenerationSettings, Responder
from dflash_core.target_identity import TargetName
from flows.answer import Answer, EndpointConfig, LocalAnswers, endpoint_answers
from flows.conversation import Conversation, answer_turns
from flows.machine import made_folder, named_device
from storage.chats import UnreadableRecord, input_fingerprint, read_chats

__all__ = ["EndpointConfig", "RespondConfig", "RespondReport", "respond"]

_SETTINGS = "_settings.json"
_SHOWN_PROBLEMS = 5
_ENOUGH_RECORDS = 1000
"""Before so many records were seen, a run is not stopped half-way for its bad ones."""


class RespondConfig(Config):
    """One run of `dflash respond`."""

    inputs: tuple[Text, ...] = Field(min_length=1)
    """Files, folders or data set names (see storage.chats.read_chats)."""
    output: Text
    """Folder of part-00000.jsonl ...; finished parts are not done again."""
    target: TargetName | None = None
    """Folder or hub name: answer with transformers on this machine. Give this or `endpoint`."""
    revision: Text | None = None
    """Hub revision of `target`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Arithmetic of a local target."""
    endpoint: EndpointConfig | None = None
    """Server that answers (vLLM, SGLang and others)."""
    chat: ChatConfig = ChatConfig()
    """Thinking mode and template variables; must be those of the extraction and of serving."""
    generation: GenerationSettings = GenerationSettings()
    """Length, temperature, seed."""
    batch_size: int = Field(default=32, ge=1)
    """Prompts answered together by a local target."""
    part_records: int = Field(default=512, ge=1)
    """Records of an output file: what is lost at most when a run is interrupted."""
    limit: int | None = None
    """Stop after this many records. When it is raised, only the part that it cut short is done again."""
    max_bad_fraction: float = Field(default=0.01, ge=0, le=1)
    """The run fails when more than this fraction of the records is unusable."""
    device: str = "auto"
    """"auto", "cpu", "cuda", "cuda:1" ... of a local target."""

    @model_validator(mode="after")
    def _one_source(self) -> RespondConfig:
        if (self.target is None) == (self.endpoint is None):
            given = "neither is" if self.target is None else "both are"
            raise ValueError(
                f"give either target (a folder or hub name) or endpoint (a server): {given} given"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class RespondReport:
    """What a run did, and what it found of earlier runs."""

    parts: list[str]
    """Output files, in order."""
    written: int
    """Records in them that this run wrote."""
    resumed: int
    """Records in them that earlier runs had written."""
    bad: dict[str, int]
    """Records without an output, by reason, those of earlier runs included."""
    tokens: int
    """Tokens that the target wrote in this run."""
    seconds: float


def respond(
    config: RespondConfig, progress: Callable[[int, int | None], None] | None = None
) -> RespondReport:
    """Write one record a chat, with every response by the target; resumes where an earlier run ended.

    `progress(records done, records in all if known)` is called as it goes. Raise UserError when the output
    folder cannot be made or belongs to other settings (another run may take it before the first answer is
    written), or too many records are unusable.
    """
    start = time.monotonic()
    folder = made_folder(config.output)
    claimed = _claim(folder, config)
    answer: Answer | None = None
    parts, seen, resumed, tokens = [], 0, 0, 0
    for number, chunk in enumerate(_chunks(config)):
        part = _part_path(folder, number)
        if _covered(part, number) >= len(chunk):
            resumed += _count_lines(part)
        else:
            told = (lambda done, base=seen: progress(base + done, config.limit)) if progress else None
            answer = answer or _open_answer(config, told)
            tokens += _write_part(part, chunk, answer, config, number, claimed, told)
        parts.append(str(part))
        seen += len(chunk)
        if progress is not None:
            progress(seen, config.limit)
        _check_problems(folder, len(parts), max(seen, _ENOUGH_RECORDS), config.max_bad_fraction)
    if not seen:
        raise UserError(f"inputs {list(config.inputs)} hold no records")
    _check_problems(folder, len(parts), seen, config.max_bad_fraction)
    return RespondReport(
        parts=parts,
        written=sum(_count_lines(Path(part)) for part in parts) - resumed,
        resumed=resumed,
        bad=dict(Counter(problem["reason"] for problem in _problems(folder, len(parts)))),
        tokens=tokens,
        seconds=time.monotonic() - start,
    )


def _open_answer(config: RespondConfig, told: Callable[[int], None] | None) -> Answer:
    if config.endpoint is not None:
        return endpoint_answers(config.endpoint, config.chat, config.generation)
    assert config.target is not None
    device = named_device(config.device)
    dtype, alive = getattr(torch, config.dtype), partial(told, 0) if told else None
    responder = Responder(config.target, config.revision, config.chat, device, dtype, alive)
    return LocalAnswers(responder, config.generation, config.batch_size)


def _chunks(config: RespondConfig) -> Iterator[list[tuple[dict[str, Any], str]]]:
    records = itertools.chain.from_iterable(read_chats(source) for source in config.inputs)
    limited = itertools.islice(records, config.limit)
    while chunk := list(itertools.islice(limited, config.part_records)):
        yield chunk


def _write_part(
    part: Path,
    chunk: list[tuple[dict[str, Any], str]],
    answer: Answer,
    config: RespondConfig,
    number: int,
    claimed: str,
    told: Callable[[int], None] | None,
) -> int:
    """Answer one chunk and write it at once; return the tokens that the target wrote.

    Raises UserError when the folder is no longer bound to what this run claimed it for.
    """
    conversations, problems = [], []
    for record, where in chunk:
        try:
            conversations.append(_conversation(record, where))
        except ChatError as error:
            problems.append(_problem(where, error))
    # Every part draws from a seed of its own, so that a resumed run writes what an unbroken one would.
    tokens = answer_turns(conversations, answer, config.generation.seed + number, told)
    lines = []
    for conversation in conversations:
        if conversation.error is not None:
            problems.append(_problem(conversation.where, conversation.error))
        else:
            lines.append(json.dumps(conversation.record(), ensure_ascii=False))
    problem_lines = [json.dumps(problem, ensure_ascii=False) for problem in problems]
    if _settings(part.parent)["fingerprint"] != claimed:
        raise UserError(
            f"another run with other settings took {part.parent} before this one had an answer there; "
            "choose another output folder for one of them"
        )
    part.unlink(missing_ok=True)  # one that covers less must never stand beside the problems of this one
    _write_whole(_problems_path(part.parent, number), problem_lines)
    _write_whole(part, lines)
    return tokens


def _conversation(record: dict[str, Any], where: str) -> Conversation:
    if isinstance(record, UnreadableRecord):
        raise ChatError("unreadable", record.error)
    messages, tools = normalise(record, to_answer=True)
    return Conversation(own_id(record), where, messages, tools)


def _problem(where: str, error: ChatError) -> dict[str, Any]:
    return {"where": where, "reason": error.reason, "detail": error.detail, "unusable": error.unusable}


def _part_path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.jsonl"


def _problems_path(folder: Path, number: int) -> Path:
    """Readers of the folder leave out names that begin with an underscore."""
    return folder / f"_problems-{number:05d}.jsonl"


def _covered(part: Path, number: int) -> int:
    """Records that a part was made of, each a line of its own or of its problems'; 0 where there is none.

    A part that an earlier run's `limit` cut short covers fewer than it would now, and is written anew.
    """
    if not part.exists():
        return 0
    return _count_lines(part) + _count_lines(_problems_path(part.parent, number))


def _problems(folder: Path, num_parts: int) -> list[dict[str, Any]]:
    texts = [_problems_path(folder, number).read_text("utf-8") for number in range(num_parts)]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def _check_problems(folder: Path, num_parts: int, seen: int, max_bad_fraction: float) -> None:
    unusable = [problem for problem in _problems(folder, num_parts) if problem["unusable"]]
    if len(unusable) > max_bad_fraction * seen:
        shown = "\n".join(f"  {p['where']}: {p['reason']}: {p['detail']}" for p in unusable[:_SHOWN_PROBLEMS])
        raise UserError(
            f"{len(unusable)} of {seen} records cannot be used, more than max_bad_fraction "
            f"({max_bad_fraction:g}) allows:\n{shown}\nMend the input, or raise max_bad_fraction"
        )


def _settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / _SETTINGS).read_text("utf-8"))


def _claim(folder: Path, config: RespondConfig) -> str:
    """Bind the folder to what decides its content, so that a changed run cannot continue it.

    One that holds no answer yet is bound anew, even while another run is at its first: a run looks again
    before it writes. Returns the fingerprint that it must find.
    """
    settings = config.model_dump(mode="json", exclude={"output", "max_bad_fraction", "device", "limit"})
    if config.endpoint is not None:
        settings["endpoint"] = config.endpoint.model
    identity = {"settings": settings, "inputs": input_fingerprint(config.inputs)}
    claimed = fingerprint(identity)
    path = folder / _SETTINGS
    if path.exists():
        before = _settings(folder)
        if before["fingerprint"] == claimed:
            return claimed
        parts = list(folder.glob("part-*"))
        if any(part.stat().st_size for part in parts):
            changed = [key for key in settings if before["settings"].get(key) != settings[key]]
            what = ", ".join(changed) or "the content of the inputs"
            raise UserError(
                f"{folder} was begun with other settings (changed: {what}); "
                "choose another output folder, or delete this one to start over"
            )
        for part in parts:
            part.unlink()
    _write_whole(path, [json.dumps({"fingerprint": claimed, **identity}, indent=2, ensure_ascii=False)])
    return claimed


def _write_whole(path: Path, lines: list[str]) -> None:
    """Write a file so that it is there as a whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)
