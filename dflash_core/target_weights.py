"""Reads single tensors of a target from its safetensors files, without building the model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from transformers.utils import cached_file

from dflash_core.configuration import UserError
from dflash_core.target_identity import load_text_config

_EMBEDDING_ENDINGS = (
    "language_model.embed_tokens.weight",
    "model.embed_tokens.weight",
    "embed_tokens.weight",
)
_HEAD_ENDINGS = ("lm_head.weight",)


def load_embedding_and_head(path: str, revision: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the target's embedding [V, D] and head [V, D] as bf16 on the CPU, and nothing else.

    With tied embeddings both are the same tensor. Raise UserError when the files do not hold them.
    """
    config, text = load_text_config(path, revision)
    embedding_VD = _read(path, revision, _EMBEDDING_ENDINGS)
    if embedding_VD is None:
        raise UserError(f"{path!r} holds no embedding (a tensor named like {_EMBEDDING_ENDINGS[1]!r})")
    shape = (text.vocab_size, text.hidden_size)
    if tuple(embedding_VD.shape) != shape:
        raise UserError(f"the embedding of {path!r} is {list(embedding_VD.shape)}, config.json says {shape}")
    tied = bool(getattr(config, "tie_word_embeddings", False) or getattr(text, "tie_word_embeddings", False))
    head_VD = None if tied else _read(path, revision, _HEAD_ENDINGS)
    if head_VD is None and not tied:
        raise UserError(f"{path!r} holds no lm_head.weight and its config does not tie it to the embedding")
    return embedding_VD, embedding_VD if head_VD is None else head_VD


def _read(path: str, revision: str | None, endings: tuple[str, ...]) -> torch.Tensor | None:
    for ending in endings:
        for file, names in _tensor_names(path, revision):
            for name in names:
                # "mtp." is the multi-token head of newer Qwen checkpoints, with tensors of the same names.
                if ("." + name).endswith("." + ending) and not name.startswith("mtp."):
                    with safe_open(file, framework="pt") as tensors:
                        return tensors.get_tensor(name).to(torch.bfloat16)
    return None


def _tensor_names(path: str, revision: str | None) -> list[tuple[str, list[str]]]:
    """(file, tensor names); of a sharded checkpoint only the files that hold an embedding or a head."""
    index = _file(path, "model.safetensors.index.json", revision)
    if index is None:
        single = _file(path, "model.safetensors", revision)
        if single is None:
            raise UserError(f"{path!r} holds no model.safetensors")
        with safe_open(single, framework="pt") as tensors:
            return [(single, list(tensors.keys()))]
    by_file: dict[str, list[str]] = {}
    for name, file in json.loads(Path(index).read_text())["weight_map"].items():
        if name.endswith((*_EMBEDDING_ENDINGS, *_HEAD_ENDINGS)):
            by_file.setdefault(file, []).append(name)
    found = []
    for file, names in sorted(by_file.items()):
        local = _file(path, file, revision)
        if local is None:
            raise UserError(f"{path!r} names {file} in its index but does not hold it")
        found.append((local, names))
    return found


def _file(path: str, name: str, revision: str | None) -> str | None:
    return cached_file(
        path,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
