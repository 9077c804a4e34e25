"""Times flex attention, forward and backward, for lists of kernel options in the shapes of
`benchmarks/train_step.py`. Prints JSON lines.

python benchmarks/attention.py --setting 8B

Each set of options is compiled anew (some ten seconds). Options that a kernel refuses are reported as such.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from train_step import SETTINGS, milliseconds

from dflash_core.drafter import DrafterConfig
from dflash_core.packing import pack_tokens
from dflash_core.records import Sample
from dflash_core.row_batch import prepare_row

FORWARD: list[dict[str, Any]] = [
    {},
    {"PRESCALE_QK": True},
    {"USE_TMA": True},
    {"BLOCKS_ARE_CONTIGUOUS": False, "BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 2, "num_warps": 8},
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 4, "num_warps": 8},
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 3, "num_warps": 4},
    {"BLOCK_M": 128, "BLOCK_N": 128, "num_stages": 2, "num_warps": 8},
    {"BLOCK_M": 128, "BLOCK_N": 128, "num_stages": 3, "num_warps": 8},
    {"BLOCK_M": 64, "BLOCK_N": 128, "num_stages": 3, "num_warps": 4},
    {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 3, "num_warps": 4},
]
BACKWARD = [
    (64, 128, 128, 64, 2, 8),
    (64, 128, 128, 64, 1, 8),
    (64, 128, 128, 64, 3, 4),
    (64, 64, 64, 64, 2, 4),
    (64, 64, 64, 64, 3, 4),
    (64, 64, 128, 64, 3, 8),
    (64, 128, 64, 64, 3, 8),
    (32, 128, 128, 32, 3, 8),
    (32, 64, 64, 32, 4, 4),
    (128, 128, 128, 128, 1, 8),
    (128, 128, 128, 64, 2, 8),
]
"""BLOCK_M1, BLOCK_N1, BLOCK_M2, BLOCK_N2, stages, warps."""
BACKWARD_NAMES = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_stages", "num_warps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--setting", default="8B", choices=SETTINGS)
    parser.add_argument("--which", default="forward,backward")
    arguments = parser.parse_args()
    run = prepare(SETTINGS[arguments.setting])
    found: dict[str, Any] = {"setting": arguments.setting, "device": torch.cuda.get_device_name()}
    print(json.dumps(found), flush=True)
    tried: list[dict[str, Any]] = []
    if "backward" in arguments.which:
        options = [dict(zip(BACKWARD_NAMES, numbers, strict=True)) for numbers in BACKWARD]
        tried += [{f"bwd_{k}": v for k, v in each.items()} for each in options]
    if "forward" in arguments.which:
        tried = [{f"fwd_{k}": v for k, v in options.items()} for options in FORWARD] + tried
    for options_of_one in tried:
        print(json.dumps(run(options_of_one)), flush=True)


def prepare(setting: dict[str, Any]) -> Any:
    """Return a function that times a set of kernel options: milliseconds of forward and of backward."""
    config = DrafterConfig(**({"num_heads": 32, "num_kv_heads": 8, "num_layers": 5} | setting["drafter"]))
    length, row_tokens = setting["document_tokens"], setting["documents"] * setting["document_tokens"]
    zeros, ones = np.zeros(length, np.int32), np.ones(length, bool)
    samples = [
        Sample(sample_id=str(i), token_ids_T=zeros, loss_mask_T=ones) for i in range(setting["documents"])
    ]
    packed = pack_tokens(samples, row_tokens)
    batch = prepare_row(packed, config, anchors=setting["anchors"], seed=0, epoch=0, dense=False)
    mask = batch.to(torch.device("cuda")).attention_masks()[0]["full_attention"]
    assert isinstance(mask, BlockMask)
    queries = setting["anchors"] * config.block_size

    def states(heads: int, tokens: int) -> torch.Tensor:
        # As in the drafter: tokens outside, heads inside, seen transposed.
        shape = (tokens, heads, config.head_dim)
        base = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return base.transpose(0, 1).unsqueeze(0).requires_grad_()

    q, k, v = states(32, queries), states(8, row_tokens + queries), states(8, row_tokens + queries)
    pull = torch.randn_like(q)

    def run(options: dict[str, Any]) -> dict[str, Any]:
        torch.compiler.reset()
        attend = torch.compile(
            lambda q, k, v: flex_attention(
                q,
                k,
                v,
                block_mask=mask,
                enable_gqa=True,
                kernel_options=options or None,  # type: ignore[arg-type]
            ),
            dynamic=False,
            fullgraph=True,
        )
        try:
            forward = float(np.median(milliseconds(lambda: attend(q, k, v), 10, warm=3)))
            out = attend(q, k, v)
            backward = milliseconds(
                lambda: torch.autograd.grad(out, (q, k, v), pull, retain_graph=True), 10, warm=3
            )
        except Exception as error:  # noqa: BLE001  a refused option is a result
            return {"options": options, "refused": str(error)[:150]}
        return {
            "options": options,
            "forward_ms": round(forward, 3),
            "backward_ms": round(float(np.median(backward)), 3),
            "finite": bool(torch.isfinite(out).all()),
        }

    return run


if __name__ == "__main__":
    main()
