"""What a run is asked to do: the configurations of both flows, read from YAML and checked at the door."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator, model_validator

from dflash_core.chat import ChatConfig
from dflash_core.configuration import Config, LocalPath, Text, UserError
from dflash_core.drafter import DrafterConfig, LayerType
from dflash_core.records import CaptureSpec, TargetSpec
from dflash_core.respond import GenerationSettings
from dflash_core.target import TargetConfig
from dflash_core.target_identity import TargetName
from dflash_core.training import TrainingConfig
from flows.respond import EndpointConfig
from flows.yaml_file import dump_yaml, read_as_json
from storage.codec import parse_codec
from storage.compile_session import CompileCacheConfig
from storage.object_store import StoreConfig, StoreError
from storage.objects import check_address
from storage.reader import ReaderConfig
from storage.writer import WriterConfig

AnyConfig = TypeVar("AnyConfig", bound=Config)
_SHOWN = 80
"""Characters of a wrong value that a message repeats at most."""
_PARTS = "Input should be names and values"
_WORDS = {"model_type": _PARTS, "dict_type": _PARTS, "tuple_type": "Input should be a list"}
"""What pydantic says in the words of JSON, in those of YAML."""


def _unquoted(device: object) -> object:
    """GPU numbers are text; YAML makes them integers unless they are quoted."""
    return str(device) if type(device) is int else device


def _one_device(device: str) -> str:
    if not re.fullmatch(r"cpu|[0-9]+", device):
        raise ValueError('no device: name a GPU by its number, such as "0", or "cpu"')
    return device


def _devices(slot: str) -> str:
    if not re.fullmatch(r"cpu|[0-9]+( *, *[0-9]+)*", slot):
        raise ValueError('no slot: name a GPU by its number, such as "0", a group such as "0,1", or "cpu"')
    return slot


def _each_once(slots: tuple[str, ...]) -> tuple[str, ...]:
    gpus = Counter(gpu.strip() for slot in slots if slot != "cpu" for gpu in slot.split(","))
    if twice := [gpu for gpu, times in gpus.items() if times > 1]:
        raise ValueError(f"GPU {', '.join(twice)} is named more than once; each serves one process")
    return slots


Device = Annotated[str, BeforeValidator(_unquoted), AfterValidator(_one_device)]
"""One GPU, or "cpu"."""
Slot = Annotated[str, BeforeValidator(_unquoted), AfterValidator(_devices)]
"""One GPU, several, or "cpu"."""


class WorkersConfig(Config):
    """The worker processes of one host: which devices, and when one is given up."""

    slots: Annotated[tuple[Slot, ...], AfterValidator(_each_once)] = ()
    """One worker each: GPU numbers ("0"), groups for a target that is spread over several ("0,1"), or "cpu".
    Empty: one for each visible GPU (one for all of them with `target.device_map`), or one on the CPU."""
    attempts: Annotated[int, Field(ge=1)] = 3
    """How often a shard is tried before it is set aside."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """A worker that starts is replaced when it has neither read files nor finished for this long."""
    silence_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """A worker that finishes no batch for this long is killed and replaced."""
    scratch: LocalPath | None = None
    """Folder for shards being written (one a worker); None: beside the store, or the temporary folder."""
    writer: WriterConfig = WriterConfig(threads=4, pending_bytes=1 << 30)
    """Resources of the side that compresses and writes."""
    connection: StoreConfig = StoreConfig()
    """How each worker speaks to the store of its data set, where that is S3."""


class ResponsesConfig(Config):
    """Let the target write the responses that the drafter will learn."""

    endpoint: EndpointConfig | None = None
    """A server that runs the target; None: with transformers, on the first worker's device (one GPU)."""
    generation: GenerationSettings = GenerationSettings()
    batch_size: Annotated[int, Field(ge=1)] = 32
    part_records: Annotated[int, Field(ge=1)] = 512
    """Chats of one output file; finished files are not done again."""
    output: Text
    """Folder for the chats with their new responses."""


class ExtractConfig(Config):
    """From chats to a sealed data set of hidden states."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)] = "activations"
    """First part of the data set's folder; the rest is its fingerprint."""
    store: Text
    """Where data sets live: a folder, file:///folder, or s3://bucket/prefix."""
    chats: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Files (.jsonl, .json, .parquet), folders, or Hugging Face data sets (name, name:split)."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Take only this many chats."""
    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = 0.01
    """The run fails when a larger share of the chats cannot be used at all."""
    duplicate_ids: Literal["error", "drop"] = "drop"
    """What to do with a chat that comes again, of the same id and tokens: "drop" keeps the first and says how
    many went, "error" ends the run. A chat without an id has its content for one. Another chat under a known
    id is left out with "drop", and counts as one that cannot be used (see `max_bad_fraction`)."""
    chat: ChatConfig = ChatConfig()
    """How chats become tokens."""
    target: TargetConfig
    """Whose hidden states, and which."""
    responses: ResponsesConfig | None = None
    """Set to have the responses of the chats replaced by the target's own."""
    codec: str = "tolerance=0.1"
    """How hidden states are stored: "lossless", "fp8", or "tolerance=E" (relative error about E)."""
    shard_tokens: Annotated[int, Field(ge=1)] = 65_536
    """Tokens of a shard, the unit of work and of repair."""
    row_group_bytes: Annotated[int, Field(ge=1)] = 64 << 20
    """Bytes of bf16 states (before encoding) of a row group at most, the unit of reading and shuffling."""
    parity_samples: Annotated[int, Field(ge=1)] = 4
    """Samples on which each worker compares captured states with a plain forward before it writes."""
    shards_per_child: Annotated[int, Field(ge=0)] = 300
    """Split an extraction of more shards than this into child flow runs of this many each; 0: never."""
    workers: WorkersConfig = WorkersConfig()
    """Where the work is done. Not part of the data set's identity."""
    cache: CompileCacheConfig | None = CompileCacheConfig()
    """Where the compile cache of the target is kept, if it is compiled; None: no such artifact is used."""

    @field_validator("codec")
    @classmethod
    def _codec_exists(cls, name: str) -> str:
        return parse_codec(name).name

    @model_validator(mode="after")
    def _one_gpu_answers(self) -> ExtractConfig:
        spread = self.target.device_map is not None or any("," in slot for slot in self.workers.slots)
        if self.responses and self.responses.endpoint is None and spread:
            raise ValueError(
                "responses are written on one GPU, which has no room for a target that is spread over "
                "several (target.device_map, or groups in workers.slots): name a server that runs it in "
                "responses.endpoint"
            )
        return self


class DrafterShape(Config):
    """What is free to choose of a drafter; the rest follows from the target of the data set."""

    block_size: Annotated[int, Field(ge=2, le=256)]
    """Slots of a block, the anchor's included: 256 at most, as no drafter guesses so far ahead. Published
    drafters have 8 to 16."""
    num_layers: Annotated[int, Field(ge=1)] = 5
    intermediate_size: Annotated[int, Field(ge=1)]
    """Width of the MLP."""
    num_heads: Annotated[int, Field(ge=1)]
    num_kv_heads: Annotated[int, Field(ge=1)]
    head_dim: Annotated[int, Field(ge=2)] = 128
    layer_types: tuple[LayerType, ...] | None = None
    """One entry a layer, "full_attention" or "sliding_attention"; None: all full."""
    sliding_window: Annotated[int, Field(ge=1)] | None = None
    """Tokens that a slot of a sliding layer sees."""
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    tap_layer_ids: tuple[int, ...] | None = None
    """Which of the data set's layers to read; None: all of them."""
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    """Token that fills the masked slots; None: the one that the data set names."""

    def for_target(self, target: TargetSpec, capture: CaptureSpec) -> DrafterConfig:
        """Return the whole configuration of a drafter for this target. Raises UserError."""
        mask_token_id = target.mask_token_id if self.mask_token_id is None else self.mask_token_id
        if mask_token_id is None:
            raise UserError(
                f"the target {target.name!r} has no default mask token: set drafter.mask_token_id to the id "
                "of a token that chats never hold"
            )
        taps = capture.tap_layer_ids if self.tap_layer_ids is None else self.tap_layer_ids
        if absent := sorted(set(taps) - set(capture.tap_layer_ids)):
            raise UserError(
                f"drafter.tap_layer_ids names layers {absent}, which the data set does not hold; it has "
                f"{list(capture.tap_layer_ids)}"
            )
        values = {
            **self.model_dump(),
            "hidden_size": target.hidden_size,
            "rope_theta": target.rope_theta,
            "vocab_size": target.vocab_size,
            "target_num_layers": target.num_layers,
            "tap_convention": capture.tap_convention,
            "tap_layer_ids": taps,
            "mask_token_id": mask_token_id,
        }
        return parse_config(DrafterConfig, values, "drafter")


class EvaluationStep(Config):
    """Real speculative decoding with the drafter at the end of training."""

    prompts: Annotated[dict[str, Text], Field(min_length=1)]
    """Family name -> chats (file, folder or data set); what precedes the last answer is the prompt."""
    prompts_per_family: Annotated[int, Field(ge=1)] = 16
    max_prompt_tokens: Annotated[int, Field(ge=1)] = 2048
    max_new_tokens: Annotated[int, Field(ge=2)] = 256
    minimum_acceptance_length: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """The run fails when any family stays below this."""
    require_lossless: bool = True
    """The run fails when a text differs from the plain target's by more than a floating-point tie."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Arithmetic of target and drafter."""


class OverfitGate(Config):
    """The cheapest proof that taps, rotation, masks and labels fit together: a sample learnt by heart."""

    max_steps: Annotated[int, Field(ge=1)] = 600
    """Optimizer steps on that one sample."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak rate of those steps."""
    least_share: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Share of the block size that acceptance must reach on it, or the run fails."""


class TrainConfig(Config):
    """From a sealed data set to an exported, evaluated drafter."""

    dataset: Text
    """The data set's folder: a path, file:///folder, or s3://bucket/prefix. A folder that holds exactly one
    data set will do."""
    target: TargetName
    """Folder or hub name of the target, whose embedding and head the drafter borrows."""
    revision: Text | None = None
    """Hub revision of the target."""
    output: Text
    """Folder for checkpoints, metrics, the exported drafter and the report; a run continues what it finds."""
    drafter: DrafterShape
    """What to train."""
    training: TrainingConfig = TrainingConfig()
    """How to train it."""
    overfit: OverfitGate | None = None
    """Set to have one sample overfitted first, until whole blocks are accepted."""
    gpus: Annotated[tuple[Device, ...], AfterValidator(_each_once)] = ()
    """One rank each, e.g. 5, 6, 7. Empty: every visible GPU, or `cpu_ranks` ranks on the CPU."""
    cpu_ranks: Annotated[int, Field(ge=1)] = 1
    """Ranks where no GPU is used."""
    silence_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Ranks that say nothing for this long are ended; more than compilation takes."""
    stop_timeout_s: Annotated[int, Field(ge=1)] = 600
    """How long ranks that are told to stop may take to end their step and write the last checkpoint."""
    cache: CompileCacheConfig | None = CompileCacheConfig()
    """Where the compile cache is kept; None: no such artifact is used."""
    reader: ReaderConfig = ReaderConfig()
    """Resources with which each rank reads the data set; may change when a run is continued."""
    connection: StoreConfig = StoreConfig()
    """How each rank speaks to the stores of data set and checkpoints, where these are S3; may change too."""
    evaluation: EvaluationStep | None = None
    """Set to measure the acceptance length of the exported drafter."""


def load_config(kind: type[AnyConfig], path: str | Path) -> AnyConfig:
    """Read a YAML file; raises UserError that names the file and every missing, unknown or wrong field."""
    text = read_as_json(Path(path))
    values = json.loads(text)
    if values is None:
        raise UserError(f"{path} is empty: docs/configuration.md has the names that it may hold")
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold names and values, but holds a {type(values).__name__}")
    _check_command(kind, values, path)
    try:
        # Strict JSON lets lists be tuples, text be paths and whole numbers be fractions, and nothing else.
        config = kind.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise _in_words(error, kind, str(path)) from error
    _check_addresses(config, path)
    return config


def parse_config(kind: type[AnyConfig], values: dict[str, Any], where: str) -> AnyConfig:
    """Check values against a configuration; raises UserError with one line for each fault."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _in_words(error, kind, where) from error


def dump_config(config: Config) -> str:
    """Return a configuration as YAML, every default written out, in the order of its fields."""
    return dump_yaml(config.model_dump(mode="json"))


def _check_addresses(config: Config, path: str | Path) -> None:
    """Raise UserError for addresses of stores that `open_store` would refuse.

    No field does: Prefect logs what a field refuses, and there may be credentials in it.
    """
    for place in ("store", "dataset", "output", "cache.uri"):
        value: Any = config
        for name in place.split("."):
            value = getattr(value, name, None)
        if isinstance(value, str):
            try:
                check_address(value)
            except StoreError as error:
                raise UserError(f"{path}: {place}: {error}") from None


def _check_command(kind: type[Config], values: dict[str, Any], path: str | Path) -> None:
    """Raise UserError when a file is the whole configuration of another command."""
    from flows.configuration_reference import COMMANDS

    if values.keys() <= kind.model_fields.keys():
        return
    for command, other in COMMANDS:
        needed = {name for name, field in other.model_fields.items() if field.is_required()}
        if needed <= values.keys() <= other.model_fields.keys():
            wanted = next(name for name, own in COMMANDS if own is kind)
            raise UserError(f"{path} is a configuration for `{command}`; here one for `{wanted}` is needed")


def _in_words(error: ValidationError, kind: type[Config], where: str) -> UserError:
    faults = [
        f"  {'.'.join(map(str, fault['loc'])) or kind.__name__}: {_plain(fault, kind)}"
        for fault in error.errors()
    ]
    return UserError(f"{where} is no valid {kind.__name__}:\n" + "\n".join(faults))


def _plain(fault: Any, kind: type[Config]) -> str:
    if fault["type"] == "extra_forbidden":
        *place, name = fault["loc"]
        near = difflib.get_close_matches(str(name), _names(kind, place), n=1, cutoff=0.75)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"unknown name; {hint}docs/configuration.md has all of them"
    if fault["type"] == "missing":
        return "missing"
    given = fault["input"]
    words = _WORDS.get(fault["type"], fault["msg"].removeprefix("Value error, "))
    if fault["type"] == "string_type" and isinstance(given, int | float):
        words += "; quotes make it one"
    whole_part = isinstance(given, dict) or len(repr(given)) > _SHOWN
    return words if whole_part else f"{words} (got {given!r})"


def _names(kind: type[Config], place: Sequence[str | int]) -> list[str]:
    """Return the names that may stand in this part of a configuration."""
    from flows.configuration_reference import configs_in

    for step in place:
        if isinstance(step, str):
            kind = configs_in(kind.model_fields[step].annotation)[0]
    return list(kind.model_fields)
