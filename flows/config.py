"""What a run is asked to do: the configurations of both flows, read from YAML and checked at the door."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, field_validator, model_validator

from dflash_core.chat import ChatConfig
from dflash_core.configuration import Config, UserError
from dflash_core.drafter import DrafterConfig, LayerType
from dflash_core.records import CaptureSpec, TargetSpec
from dflash_core.respond import GenerationSettings
from dflash_core.target import TargetConfig
from dflash_core.training import TrainingConfig
from flows.respond import EndpointConfig
from storage.codec import parse_codec
from storage.compile_session import CompileCacheConfig
from storage.object_store import StoreConfig
from storage.reader import ReaderConfig
from storage.writer import WriterConfig

AnyConfig = TypeVar("AnyConfig", bound=Config)
Device = Annotated[str, BeforeValidator(str)]
"""GPU numbers; YAML makes them integers unless they are quoted."""


class WorkersConfig(Config):
    """The worker processes of one host: which devices, and when one is given up."""

    slots: tuple[Device, ...] = ()
    """One worker each: GPU numbers ("0"), groups for a target that is spread over several ("0,1"), or "cpu".
    Empty: one for each visible GPU (one for all of them with `target.device_map`), or one on the CPU."""
    attempts: Annotated[int, Field(ge=1)] = 3
    """How often a shard is tried before it is set aside."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """A worker that starts is replaced when it has neither read files nor finished for this long."""
    silence_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """A worker that finishes no batch for this long is killed and replaced."""
    scratch: str | None = None
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
    output: str
    """Folder for the chats with their new responses."""


class ExtractConfig(Config):
    """From chats to a sealed data set of hidden states."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)] = "activations"
    """First part of the data set's folder; the rest is its fingerprint."""
    store: str
    """Where data sets live: a folder, file:///folder, or s3://bucket/prefix."""
    chats: Annotated[tuple[str, ...], Field(min_length=1)]
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
    shards_per_child: Annotated[int, Field(ge=0)] = 0
    """Split a plan larger than this into child flow runs of this many shards; 0: never."""
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

    block_size: Annotated[int, Field(ge=2)]
    """Slots of a block, the anchor's included."""
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

    prompts: Annotated[dict[str, str], Field(min_length=1)]
    """Family name -> chats (file, folder or data set); what precedes the last answer is the prompt."""
    prompts_per_family: Annotated[int, Field(ge=1)] = 16
    max_prompt_tokens: Annotated[int, Field(ge=1)] = 2048
    max_new_tokens: Annotated[int, Field(ge=2)] = 256
    minimum_acceptance_length: float | None = None
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

    dataset: str
    """The data set's folder: a path, file:///folder, or s3://bucket/prefix. A folder that holds exactly one
    data set will do."""
    target: str
    """Folder or hub name of the target, whose embedding and head the drafter borrows."""
    revision: str | None = None
    """Hub revision of the target."""
    output: str
    """Folder for checkpoints, metrics, the exported drafter and the report; a run continues what it finds."""
    drafter: DrafterShape
    """What to train."""
    training: TrainingConfig = TrainingConfig()
    """How to train it."""
    overfit: OverfitGate | None = None
    """Set to have one sample overfitted first, until whole blocks are accepted."""
    gpus: tuple[Device, ...] = ()
    """One rank each, e.g. 5, 6, 7. Empty: every visible GPU, or `cpu_ranks` ranks on the CPU."""
    cpu_ranks: Annotated[int, Field(ge=1)] = 1
    """Ranks where no GPU is used."""
    silence_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Ranks that say nothing for this long are ended; more than compilation takes."""
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
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no configuration at {path}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}): save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold names and values, but holds a {type(values).__name__}")
    return parse_config(kind, values, str(path))


def parse_config(kind: type[AnyConfig], values: dict[str, Any], where: str) -> AnyConfig:
    """Check values against a configuration; raises UserError with one line for each fault."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        faults = [
            f"  {'.'.join(map(str, fault['loc'])) or kind.__name__}: {_plain(fault, kind)}"
            for fault in error.errors()
        ]
        raise UserError(f"{where} is no valid {kind.__name__}:\n" + "\n".join(faults)) from error


def dump_config(config: Config) -> str:
    """Return a configuration as YAML, every default written out, in the order of its fields."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)


def _plain(fault: Any, kind: type[BaseModel]) -> str:
    if fault["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(fault["loc"][-1]), _names(kind), n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"unknown name; {hint}docs/configuration.md has all of them"
    if fault["type"] == "missing":
        return "missing"
    return f"{fault['msg'].removeprefix('Value error, ')} (got {fault['input']!r})"


def _names(kind: type[BaseModel]) -> set[str]:
    """Every name that may stand in a configuration of this kind, at any depth."""
    definitions = kind.model_json_schema()
    parts = [definitions, *definitions.get("$defs", {}).values()]
    return {name for part in parts for name in part.get("properties", {})}
