"""Names a target and what is taken from it, from its files alone: fingerprints, tap ids, mask token.

transformers takes seconds to import, so that happens where it is needed, here and in the other files of the
target: the ranks of training do without it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from dflash_core.configuration import UserError, expand_home, fingerprint
from dflash_core.records import TargetSpec


def _named(target: str) -> str:
    if not target:
        raise ValueError("no target is named; give a folder, or a model of the hub")
    return expand_home(target)


TargetName = Annotated[str, AfterValidator(_named)]
"""Folder of a target ("~" is one's home), or its name on the hub."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_SAMPLES_PER_FILE, _SAMPLE_BYTES = 64, 4096

# Unused rows of the padded embedding that released drafters fill their masked slots with, by the number of
# rows of the embedding: (model types, id). Other targets have no default.
_MASK_TOKEN_IDS = {
    151936: (("qwen3", "qwen3_moe"), 151669),
    248320: (("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), 248070),
}


def default_tap_ids(num_layers: int, num_taps: int = 5) -> tuple[int, ...]:
    """Layers tapped by the rule of the DFlash paper: id_i = round(1 + i (N-4)/(n-1)); n = 1: N // 2.

    Raise UserError when the target has too few layers for that many different taps.
    """
    if num_taps == 1:
        return (num_layers // 2,)
    ids = tuple(round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps))
    if num_taps < 1 or len(set(ids)) != num_taps or not 0 <= ids[0] <= ids[-1] < num_layers:
        raise UserError(
            f"a target of {num_layers} layers has no {num_taps} default taps; "
            "give fewer with num_taps, or name them with tap_layer_ids"
        )
    return ids


def check_tap_ids(ids: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Return `ids` when they are ascending, different and existing layers. Raise UserError otherwise."""
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= num_layers:
        raise UserError(
            f"tap_layer_ids {list(ids)} must be different, ascending and from 0 to {num_layers - 1} "
            "(id i is the output of decoder layer i, counted from 0)"
        )
    return ids


def load_text_config(path: str, revision: str | None) -> tuple[Any, Any]:
    """Return (config, text config) of a target; they are the same object unless it is multimodal.

    Raise UserError when there is no readable configuration.
    """
    from transformers import AutoConfig

    folder = Path(path).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"the target's folder {path} holds no config.json: name one that transformers saved")
    if not folder.is_dir() and (path.startswith(("/", ".", "~")) or path.count("/") > 1):
        raise UserError(f"the target's folder {path} does not exist (`make demo` makes that of the demo)")
    try:
        config = AutoConfig.from_pretrained(path, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        where = "" if folder.is_dir() else "no folder of that name is here, and as a name on the hub: "
        raise UserError(f"cannot read the target's configuration from {path!r}: {where}{error}") from None
    return config, config.get_text_config()


def load_tokenizer(path: str, revision: str | None) -> Any:
    """Load the target's fast tokenizer. Raise UserError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read the target's tokenizer from {path!r}: {error}") from None
    if not tokenizer.is_fast:
        raise UserError(f"{path!r} has no fast tokenizer (tokenizer.json); offsets of tokens are needed")
    return tokenizer


def target_spec(path: str, revision: str | None, mask_token: int | str | None) -> TargetSpec:
    """Identity of the target. Reads configuration and tokenizer files, and samples of the weights."""
    config, text = load_text_config(path, revision)
    commit = getattr(config, "_commit_hash", None)
    folder = Path(path)
    digests = {
        "weights_sha256": folder_digest(folder) if folder.is_dir() else fingerprint(["hub", path, commit]),
        "tokenizer_sha256": _tokenizer_digest(path, revision),
    }
    name = folder.resolve().name if folder.is_dir() else path
    spec = target_shape(name, text).model_copy(update=digests)
    if mask_token is None:
        return spec
    chosen = mask_token_id(mask_token, spec, load_tokenizer(path, revision))
    return spec.model_copy(update={"mask_token_id": chosen})


def other_form_hint(recorded: TargetSpec, here: TargetSpec) -> str:
    """Return what to say where only the weights of two targets differ: they may be one target in two forms.

    It begins with "; " and is empty where more differs, or they have one name.
    """
    free = {"name": here.name, "mask_token_id": here.mask_token_id, "weights_sha256": here.weights_sha256}
    if recorded.name == here.name or recorded.model_copy(update=free) != here:
        return ""
    return (
        "; a hub name counts by its commit and a folder by its files, so the same weights in both forms are "
        f"two targets: if these are the same, give the target as it was given then, {recorded.name!r}"
    )


def target_shape(name: str, text: Any) -> TargetSpec:
    """What the text configuration alone says of a target; the fingerprints are empty."""
    return TargetSpec(
        name=name,
        weights_sha256="",
        tokenizer_sha256="",
        model_type=text.model_type,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        rope_theta=_rope_theta(text),
        mask_token_id=default_mask_token_id(text.model_type, text.vocab_size),
    )


def default_mask_token_id(model_type: str, vocab_size: int) -> int | None:
    """Mask token id of released drafters for this family (151669, 248070), None for other targets."""
    families, token = _MASK_TOKEN_IDS.get(vocab_size, ((), None))
    return token if model_type in families else None


def mask_token_id(token: int | str | None, spec: TargetSpec, tokenizer: Any) -> int:
    """Resolve the mask token: `token` as an id or as text, else the default in `spec`. Raise UserError."""
    known, rows = len(tokenizer), spec.vocab_size
    if token is None:
        if spec.mask_token_id is not None:
            return spec.mask_token_id
        free = (
            f"ids {known} to {rows - 1} are unused rows of its embedding"
            if known < rows
            else ("its embedding has no unused rows, so name a special token that never occurs in chats")
        )
        raise UserError(
            f"{spec.name} ({spec.model_type}, {rows} embedding rows) has no default mask token; "
            f"set target.mask_token to a token's text or id: {free}"
        )
    chosen: int | None = tokenizer.get_vocab().get(token) if isinstance(token, str) else token
    if chosen is None:
        raise UserError(f"mask_token {token!r} is not a single token of {spec.name}'s tokenizer")
    if not 0 <= chosen < rows:
        raise UserError(f"mask_token {token} is outside the {rows} embedding rows of {spec.name}")
    return chosen


def folder_digest(folder: Path) -> str:
    """sha256 over config.json and, for each weight file, its name, size, safetensors header and samples.

    64 samples of 4 KiB at fixed places of each file: quick for tens of gigabytes, and any retrained,
    re-quantised or truncated weights differ. Raise UserError when the folder has no weights.
    """
    digest = hashlib.sha256()
    digest.update((folder / "config.json").read_bytes())
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    if not files:
        raise UserError(f"{folder} holds no weights (*.safetensors)")
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else 0
            digest.update(file.read(min(header, size)))
            for i in range(_SAMPLES_PER_FILE):
                file.seek(max(0, (size - _SAMPLE_BYTES) * i // (_SAMPLES_PER_FILE - 1)))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _tokenizer_digest(path: str, revision: str | None) -> str:
    from transformers.utils import cached_file

    digests = {}
    for name in _TOKENIZER_FILES:
        found = cached_file(
            path,
            name,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is not None:
            digests[name] = hashlib.sha256(Path(found).read_bytes()).hexdigest()
    if not digests:
        raise UserError(f"{path!r} holds no tokenizer files")
    return fingerprint(digests)


def _rope_theta(text: Any) -> float:
    parameters = getattr(text, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    theta = parameters.get("rope_theta", getattr(text, "rope_theta", None))
    if theta is None:
        raise UserError(f"the configuration of model type {text.model_type!r} names no rope_theta")
    return float(theta)
