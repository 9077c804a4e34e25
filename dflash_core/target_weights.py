"""Reads single tensors of a target from its safetensors files, without building the model.

Finding them imports transformers, which takes seconds; reading what was found does not.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from dflash_core.configuration import Config, UserError
from dflash_core.target_identity import load_text_config

_EMBEDDING_ENDINGS = (
    "language_model.embed_tokens.weight",
    "model.embed_tokens.weight",
    "embed_tokens.weight",
)
_HEAD_ENDINGS = ("lm_head.weight",)


class TensorPlace(Config):
    """Where a tensor lies on this machine."""

    file: str
    name: str

    def read(self) -> torch.Tensor:
        """Read it as bf16 on the CPU."""
        with safe_open(self.file, framework="pt") as tensors:
            return tensors.get_tensor(self.name).to(torch.bfloat16)

    def shape(self) -> list[int]:
        """Look its shape up."""
        with safe_open(self.file, framework="pt") as tensors:
            return list(tensors.get_slice(self.name).get_shape())


class BorrowedWeights(Config):
    """Where what a drafter borrows from its target lies on this machine."""

    embedding: TensorPlace
    head: TensorPlace | None
    """None: tied to the embedding."""

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Read embedding [V, D] and head [V, D] as bf16 on the CPU: one tensor twice where they are equal."""
        embedding_VD = self.embedding.read()
        head_VD = self.head.read() if self.head else embedding_VD
        return embedding_VD, embedding_VD if torch.equal(head_VD, embedding_VD) else head_VD


def find_embedding_and_head(path: str, revision: str | None = None) -> BorrowedWeights:
    """Find the target's embedding and head, fetching their files where the target is a name on the hub.

    Raise UserError when the files do not hold them.
    """
    config, text = load_text_config(path, revision)
    embedding = _find(path, revision, _EMBEDDING_ENDINGS)
    if embedding is None:
        raise UserError(f"{path!r} holds no embedding (a tensor named like {_EMBEDDING_ENDINGS[1]!r})")
    shape = [text.vocab_size, text.hidden_size]
    if embedding.shape() != shape:
        raise UserError(f"the embedding of {path!r} is {embedding.shape()}, config.json says {shape}")
    # A head of its own counts, whatever the configuration says; transformers loads it too.
    head = _find(path, revision, _HEAD_ENDINGS)
    tied = bool(getattr(config, "tie_word_embeddings", False) or getattr(text, "tie_word_embeddings", False))
    if head is not None and head.shape() != shape:
        if not tied:
            raise UserError(f"the head of {path!r} is {head.shape()}, config.json says {shape}")
        head = None  # of another part of the model
    if head is None and not tied:
        raise UserError(f"{path!r} holds no lm_head.weight and its config does not tie it to the embedding")
    return BorrowedWeights(embedding=embedding, head=head)


def load_embedding_and_head(path: str, revision: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Find and read the target's embedding and head. Raise UserError when the files do not hold them."""
    return find_embedding_and_head(path, revision).read()


def _find(path: str, revision: str | None, endings: tuple[str, ...]) -> TensorPlace | None:
    for ending in endings:
        for file, names in _tensor_names(path, revision):
            for name in names:
                # "mtp." is the multi-token head of newer Qwen checkpoints, with tensors of the same names.
                if ("." + name).endswith("." + ending) and not name.startswith("mtp."):
                    return TensorPlace(file=file, name=name)
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
    from transformers.utils import cached_file

    return cached_file(
        path,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
