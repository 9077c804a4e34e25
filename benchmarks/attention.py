"""Looks for the kernel options of flex attention that are fastest, forward and backward, in the shapes of
`benchmarks/train_step.py`. Prints JSON lines.

python benchmarks/attention.py --setting 8B --workers 6
CUDA_VISIBLE_DEVICES=1 python benchmarks/attention.py --setting 27B --workers 6

Each set of options is compiled anew, in several processes at a time; they take turns at the card to be timed.
At the end the best are timed again alone, and together. What the default gives is the reference for their
output and gradients ("error": the largest relative difference). Training leaves the choice to torch: a winner
would become the `kernel_options` of `dflash_core.draft_layers.attend`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch._functorch.config
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from train_step import SETTINGS, milliseconds

from dflash_core.drafter import DrafterConfig
from dflash_core.packing import pack_tokens
from dflash_core.records import Sample
from dflash_core.row_batch import prepare_row

FORWARD_NAMES = ("fwd_BLOCK_M", "fwd_BLOCK_N", "fwd_num_stages", "fwd_num_warps")
FORWARD = [
    (128, 64, 2, 8),
    (128, 64, 4, 8),
    (128, 64, 3, 4),
    (128, 64, 2, 4),
    (128, 128, 1, 8),
    (128, 128, 2, 8),
    (128, 128, 3, 8),
    (128, 32, 4, 4),
    (128, 32, 3, 8),
    (64, 128, 2, 4),
    (64, 128, 3, 4),
    (64, 64, 3, 4),
    (64, 64, 4, 4),
]
BACKWARD_NAMES = tuple(
    f"bwd_{n}" for n in ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_stages", "num_warps")
)
BACKWARD = [
    (64, 128, 128, 64, 2, 8),
    (64, 128, 128, 64, 1, 8),
    (64, 128, 128, 64, 4, 8),
    (64, 128, 128, 64, 2, 4),
    (64, 64, 64, 64, 2, 4),
    (64, 64, 64, 64, 3, 4),
    (64, 64, 64, 64, 1, 4),
    (64, 128, 64, 64, 3, 8),
    (64, 64, 128, 64, 3, 8),
    (128, 128, 128, 128, 1, 8),
    (128, 128, 128, 128, 2, 8),
    (32, 128, 128, 32, 3, 8),
    (32, 64, 64, 32, 3, 4),
]
OTHER: list[dict[str, Any]] = [{"PRESCALE_QK": True}, {"fwd_USE_TMA": True}, {"bwd_USE_TMA": True}]

Run = Callable[[dict[str, Any]], dict[str, Any]]


def candidates() -> list[dict[str, Any]]:
    """Sets of options; forward and backward do not touch each other, so each set tries one of both."""
    forward = [dict(zip(FORWARD_NAMES, numbers, strict=True)) for numbers in FORWARD]
    backward = [dict(zip(BACKWARD_NAMES, numbers, strict=True)) for numbers in BACKWARD]
    return [a | b for a, b in zip(forward, backward, strict=True)] + OTHER


def only(way: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of one way, "fwd_" or "bwd_", and those that go for both."""
    other = "bwd_" if way == "fwd_" else "fwd_"
    return {name: value for name, value in options.items() if not name.startswith(other)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--setting", default="8B", choices=SETTINGS)
    parser.add_argument("--workers", type=int, default=6, help="processes that compile side by side")
    parser.add_argument("--limit-s", type=float, default=150.0, help="most seconds of the search")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        run = prepare(SETTINGS[arguments.setting])
        run({})
        for options in candidates()[arguments.child :: arguments.workers]:
            found = run(options)
            # Which of the two kernels was refused?
            alone = [only("fwd_", options), only("bwd_", options)] if "refused" in found else []
            for each in map(run, alone) if alone and all(alone) else [found]:
                tell(each)
        return
    tell({"setting": arguments.setting, "device": torch.cuda.get_device_name()})
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
        os.environ.setdefault("TRITON_CACHE_DIR", f"{folder}/triton")
        os.environ["DFLASH_TURNS"] = f"{folder}/turns"
        found = search(arguments)
        compare(prepare(SETTINGS[arguments.setting]), found)


def search(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Try all candidates in several processes; what they found until the limit, printed as it comes."""
    command = [sys.executable, __file__, "--setting", arguments.setting, "--workers", str(arguments.workers)]
    # A graph here has two or three kernels: threads of its own would only cost each process their start.
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    processes = [
        subprocess.Popen([*command, "--child", str(i)], stdout=subprocess.PIPE, text=True, env=environment)
        for i in range(arguments.workers)
    ]
    found: list[dict[str, Any]] = []

    def read(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            found.append(json.loads(line))
            tell(found[-1])

    threads = [threading.Thread(target=read, args=(process,), daemon=True) for process in processes]
    for thread in threads:
        thread.start()
    timer = threading.Timer(arguments.limit_s, lambda: [process.kill() for process in processes])
    timer.start()
    for process in processes:
        process.wait()
    timer.cancel()
    for thread in threads:
        thread.join()
    return found


def compare(run: Run, found: list[dict[str, Any]]) -> None:
    """Time the default, the best forward, the best backward and both, with the card to themselves."""
    default = run({})
    tell(default | {"name": "default"})
    good = [each for each in found if each.get("error", 1.0) < 0.02]
    best: dict[str, Any] = {}
    for way, prefix in (("forward", "fwd_"), ("backward", "bwd_")):
        chosen = min(good, key=lambda each, way=way: each[f"{way}_ms"], default=default)
        options = only(prefix, chosen["options"])
        measured = run(options)
        tell(measured | {"name": f"best {way}"})
        if measured[f"{way}_ms"] < default[f"{way}_ms"]:
            best |= options
    both = run(best)
    saved = sum(default[name] - both[name] for name in ("forward_ms", "backward_ms"))
    tell(both | {"name": "best", "saved_ms_a_layer": round(saved, 3)})


def tell(found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def prepare(setting: dict[str, Any]) -> Run:
    """Return a function that times a set of kernel options: milliseconds of forward and of backward.

    The first call gives the reference that errors of later ones are measured against.
    """
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
        return base.transpose(0, 1).unsqueeze(0)

    q, k, v = states(32, queries), states(8, row_tokens + queries), states(8, row_tokens + queries)
    q.mul_(config.head_dim**-0.5)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    pull = torch.randn_like(q)
    reference: list[torch.Tensor] = []

    torch._functorch.config.donated_buffer = False  # the backward is run again and again

    def run(options: dict[str, Any]) -> dict[str, Any]:
        torch.compiler.reset()
        attend = torch.compile(
            lambda q, k, v: flex_attention(
                q,
                k,
                v,
                block_mask=mask,
                scale=1.0,  # as in the drafter, whose queries come scaled
                enable_gqa=True,
                kernel_options=options or None,  # type: ignore[arg-type]
            ),
            dynamic=False,
            fullgraph=True,
        )
        try:
            out = attend(q, k, v)
            results = [out.detach(), *torch.autograd.grad(out, (q, k, v), pull)]
        except Exception as error:  # noqa: BLE001  a refused option is a result
            return {"options": options, "refused": str(error)[:150]}
        if not reference:
            reference.extend(results)
        with Turn():
            forward = milliseconds(lambda: attend(q, k, v), 15, warm=3)
            out = attend(q, k, v)
            backward = milliseconds(
                lambda: torch.autograd.grad(out, (q, k, v), pull, retain_graph=True), 15, warm=3
            )
        return {
            "options": options,
            "forward_ms": round(float(np.median(forward)), 3),
            "backward_ms": round(float(np.median(backward)), 3),
            "error": round(max(map(difference, results, reference)), 5),
        }

    return run


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference by the norm of what is expected; 9 for what is not finite."""
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    return error if np.isfinite(error) else 9.0


class Turn:
    """While this is open no other process of the search times anything on the card."""

    def __enter__(self) -> None:
        self._file = Path(os.environ["DFLASH_TURNS"]).open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        self._file.close()


if __name__ == "__main__":
    main()
