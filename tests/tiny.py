"""Tiny random targets with a real tokenizer and chat template, written as transformers folders."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 320
"""Rows of the embedding: 256 bytes, 3 special tokens, the rest unused padding."""
MASK_TOKEN_ID = 319
"""An unused row of the padded embedding."""
NUM_LAYERS, WIDTH = 6, 64


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer: any text is representable, one token a byte, ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHATML
    return fast


def tiny_model(
    model_type: str = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """A random causal language model of 6 layers and width 64; `model_type`: qwen2, qwen3 or llama."""
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": WIDTH,
        "intermediate_size": 128,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "bos_token_id": None,
        "initializer_range": 0.2,
    }
    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[model_type]
    if model_type == "qwen3":
        shape["head_dim"] = 16
    torch.manual_seed(seed)
    return model_class(config_class(**shape)).to(dtype).eval()


def write_tiny_target(
    folder: Path, model_type: str = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Save `tiny_model` and `tiny_tokenizer` into `folder`, as `from_pretrained` reads them."""
    tiny_model(model_type, seed=seed, dtype=dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
