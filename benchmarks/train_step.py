"""Times one training step on a GPU in the two settings that public trainers were measured in, and prints
JSON.

python benchmarks/train_step.py --settings 27B,8B --steps 10

Each setting runs in processes of its own: first with an empty compile cache (cold), then with the cache that
this left (warm). "27B": width 5120, MLP 17408, vocabulary 248320, blocks of 32, 1008 anchors, 49152 context
tokens (24 documents of 2048). "8B": 4096 / 12288 / 151936, blocks of 16, 2048 anchors, 12288 context tokens
(4 documents of 3072). Five draft layers, five taps, random data, every token supervised; forward, backward,
clipping and fused AdamW, as `dflash_core.training` runs them. FLOPs: 6 x body x queries + 6 x (fc + context
keys/values) x context tokens + 4 x head x queries (attention is not counted).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.nn.functional as F

import dflash_core.draft_layers as layers_room
from dflash_core.compile_watch import Watch
from dflash_core.distributed import World, join_world, leave_world
from dflash_core.drafter import Drafter, DrafterConfig
from dflash_core.loss import head_loss
from dflash_core.metrics import row_flops
from dflash_core.packing import pack_tokens
from dflash_core.records import Sample
from dflash_core.row_batch import prepare_row
from dflash_core.training import Trainer, TrainingConfig, TrainingRow

SETTINGS: dict[str, dict[str, Any]] = {
    "27B": {
        "documents": 24,
        "document_tokens": 2048,
        "anchors": 1008,
        "drafter": {
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "vocab_size": 248320,
            "block_size": 32,
            "mask_token_id": 248070,
            "rope_theta": 1e7,
            "tap_layer_ids": (1, 16, 31, 46, 61),
            "target_num_layers": 64,
        },
    },
    "8B": {
        "documents": 4,
        "document_tokens": 3072,
        "anchors": 2048,
        "drafter": {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "vocab_size": 151936,
            "block_size": 16,
            "mask_token_id": 151669,
            "rope_theta": 1e6,
            "tap_layer_ids": (1, 9, 17, 25, 33),
            "target_num_layers": 36,
        },
    },
    "tiny": {
        "documents": 2,
        "document_tokens": 128,
        "anchors": 32,
        "drafter": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "vocab_size": 512,
            "block_size": 8,
            "mask_token_id": 511,
            "rope_theta": 1e6,
            "tap_layer_ids": (1, 3),
            "target_num_layers": 6,
            "head_dim": 16,
            "num_heads": 8,
            "num_kv_heads": 2,
        },
    },
}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpoint": {"checkpoint": True},
    "autotune": {"options": {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}},
    "fp8": {"training": {"layer_products": "fp8"}},
    "flex-tma": {"flex": {"USE_TMA": True}},
}
"""Ways to compile the regions; "plain" is what training does."""

KERNEL_GROUPS = {
    "attention": ("flex_attention", "sdpa", "fmha"),
    "cross_entropy": ("_exponentiate", "_gather_scaled"),
    "optimizer": ("_adamw", "FusedAdam", "fused_adam", "multi_tensor"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "triton_tem_fused_mm"),
    "copies": ("Memcpy", "Memset"),
}


def build(
    setting: dict[str, Any], chunk_slots: int, variant: dict[str, Any], world: World
) -> tuple[Trainer, TrainingRow, dict[str, Any]]:
    """A trainer with random weights and one packed row on the device."""
    device = world.device
    cuda = device.type == "cuda"
    config = DrafterConfig(**({"num_heads": 32, "num_kv_heads": 8, "num_layers": 5} | setting["drafter"]))
    row_tokens = setting["documents"] * setting["document_tokens"]
    training = TrainingConfig(
        row_tokens=row_tokens,
        anchors_per_row=setting["anchors"],
        loss={"gamma": 10.0, "chunk_slots": chunk_slots},  # type: ignore[arg-type]
        **variant.get("training", {}),
    )
    with torch.device(device):
        drafter = Drafter(config)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for p in drafter.parameters():
            if p.ndim == 2:
                p.normal_(0.0, 0.02, generator=generator)
    checkpoint = variant.get("checkpoint", False)
    if cuda:
        drafter.compile_regions(checkpoint_layers=checkpoint, options=variant.get("options"))
    elif checkpoint:
        drafter.checkpoint_layers()
    shape = (config.vocab_size, config.hidden_size)
    embedding, head = (
        torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02, generator=generator)
        for _ in range(2)
    )
    trainer = Trainer(drafter, embedding, head, training, total_steps=1000, world=world)
    draw = np.random.default_rng(0)
    samples = [
        Sample(
            sample_id=f"document-{i}",
            token_ids_T=draw.integers(0, config.vocab_size, setting["document_tokens"]).astype(np.int32),
            loss_mask_T=np.ones(setting["document_tokens"], bool),
        )
        for i in range(setting["documents"])
    ]
    packed = pack_tokens(samples, row_tokens)
    prepare = partial(prepare_row, packed, config, anchors=setting["anchors"], seed=0, dense=not cuda)
    started = time.perf_counter()
    batch = prepare(epoch=0)
    loader_ms = 1000 * (time.perf_counter() - started)
    width = len(config.tap_layer_ids) * config.hidden_size
    taps = torch.empty(row_tokens, width, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    facts = {
        "scored_slots": batch.count,
        "blocks": batch.num_blocks,
        "queries": setting["anchors"] * config.block_size,
        "context_tokens": row_tokens,
        "flops": row_flops(config, row_tokens, setting["anchors"] * config.block_size),
        "loader_ms_per_row": round(loader_ms, 1),
    }
    return trainer, TrainingRow(batch=batch.to(device), taps_CE=taps), facts


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(work: Callable[[], Any], repeats: int, warm: int = 1) -> list[float]:
    """Time of each repeat, from events on the device, not from the host."""
    for _ in range(warm):
        work()
    synchronise()
    if not torch.cuda.is_available():
        found = []
        for _ in range(repeats):
            started = time.perf_counter()
            work()
            found.append(1000 * (time.perf_counter() - started))
        return found
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    synchronise()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def ceiling_tflops() -> float:
    """bf16 product of two 8192 x 8192 matrices, for two seconds or so."""
    if not torch.cuda.is_available():
        return float("nan")
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    times = milliseconds(lambda: torch.mm(a, b, out=out), 600, warm=20)
    return 2 * n**3 / float(np.median(times[300:])) / 1e9


def part_times(trainer: Trainer, row: TrainingRow, repeats: int) -> dict[str, float]:
    """Milliseconds of the parts of a step, one after the other, median of `repeats`."""
    drafter, batch = trainer.drafter, row.batch
    found: dict[str, list[float]] = defaultdict(list)
    if not torch.cuda.is_available():
        return {}
    for _ in range(repeats):
        marks: list[tuple[str, torch.cuda.Event]] = []

        def mark(name: str, marks: list[tuple[str, torch.cuda.Event]] = marks) -> None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append((name, event))

        mark("start")
        context = drafter.context(row.taps_CE, batch.position_C)
        mark("context_forward")
        rows_RD = F.embedding(batch.input_ids_R, trainer._embedding_VD)
        hidden = drafter.block_slots(context, rows_RD, batch.position_Q, *batch.attention_masks())
        mark("layers_forward")
        losses = head_loss(hidden, trainer._head_VD, batch.head_inputs, trainer.config.loss.chunk_slots)
        weights_N = trainer._weights(losses, batch)
        mark("head_forward_and_gradient")
        trainer._tally.add(losses, weights_N, batch)
        mark("metrics")
        (losses.loss_N * weights_N).sum().backward()
        mark("backward_of_layers_and_context")
        trainer.optimizer.step(trainer.optimizer_step, weights_N.sum(), trainer._halted)
        mark("optimizer")
        synchronise()
        for (_, before), (name, after) in itertools.pairwise(marks):
            found[name].append(before.elapsed_time(after))
    return {name: round(float(np.median(times)), 2) for name, times in found.items()}


def kernel_times(work: Callable[[], None], top: int) -> dict[str, Any]:
    """Milliseconds on the device by group of kernels and the longest kernels, over one call of `work`."""
    if not torch.cuda.is_available():
        return {}
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        work()
        synchronise()
    groups: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        annotation = event.name.startswith(("Optimizer", "## Call"))
        if event.device_type != torch.autograd.DeviceType.CUDA or annotation:
            continue
        kernels[event.name].append(event.device_time / 1000)
    for name, times in kernels.items():
        group = next(
            (g for g, parts in KERNEL_GROUPS.items() if any(p in name for p in parts)), "fused elementwise"
        )
        groups[group] += sum(times)
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:top]
    outside = [
        {"op": e.key, "shapes": str(e.input_shapes)[:90], "ms": round(e.self_device_time_total / 1000, 2)}
        for e in profile.key_averages(group_by_input_shape=True)
        if e.key.startswith("aten::") and e.key not in ("aten::mm", "aten::addmm")
    ]
    return {
        "uncompiled_ops": sorted(outside, key=lambda op: -op["ms"])[:12],
        "groups_ms": {name: round(ms, 2) for name, ms in sorted(groups.items(), key=lambda g: -g[1])},
        "kernels": [
            {"name": name[:110], "calls": len(times), "ms": round(sum(times), 2)} for name, times in longest
        ],
    }


def measure(
    trainer: Trainer, row: TrainingRow, facts: dict[str, Any], steps: int, ceiling: float
) -> dict[str, Any]:
    """Step time and rates of a warmed trainer."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    times = milliseconds(lambda: trainer.step([row], 1), steps, warm=2)
    step_ms = float(np.median(times))
    tflops = facts["flops"] / step_ms / 1e9
    memory = torch.cuda if torch.cuda.is_available() else None
    return {
        "step_ms": round(step_ms, 2),
        "step_ms_min_max": [round(min(times), 2), round(max(times), 2)],
        "context_tokens_per_s": round(facts["context_tokens"] / step_ms * 1000),
        "draft_tokens_per_s": round(facts["queries"] / step_ms * 1000),
        "tflops": round(tflops, 1),
        "share_of_ceiling": round(tflops / ceiling, 4),
        "peak_gib": round(memory.max_memory_allocated() / 2**30, 2) if memory else None,
        "reserved_gib": round(memory.max_memory_reserved() / 2**30, 2) if memory else None,
    }


def child(arguments: argparse.Namespace) -> dict[str, Any]:
    """One process: build, first step, and what was asked for."""
    variant = VARIANTS[arguments.variant]
    if "flex" in variant:
        tuned = partial(layers_room.flex_attention, kernel_options=variant["flex"])
        layers_room.flex_attention = tuned  # type: ignore[assignment]
    setting = SETTINGS[arguments.setting]
    chunks = [int(c) for c in arguments.chunks.split(",")]
    world = join_world()
    watch = Watch.from_environment().start()
    trainer, row, facts = build(setting, chunks[0], variant, world)
    synchronise()
    started = time.perf_counter()
    trainer.step([row], 1)
    synchronise()
    first = time.perf_counter() - started
    if world.size > 1:
        rates = measure(trainer, row, facts, arguments.steps, arguments.ceiling or float("nan"))
        profile = kernel_times(lambda: trainer.step([row], 1), 10)
        leave_world(world)
        return {"rank": world.rank, "first_step_s": round(first, 2), **rates, "profile": profile}
    if arguments.only_first:
        return {"first_step_s": round(first, 2), "compile": _compiled(watch)}
    ceiling = arguments.ceiling or ceiling_tflops()
    found: dict[str, Any] = {
        "facts": facts,
        "first_step_s": round(first, 2),
        "ceiling_tflops": round(ceiling, 1),
    }
    watch.forbid("error")
    for chunk in chunks:
        loss = trainer.config.loss.model_copy(update={"chunk_slots": chunk})
        trainer.config = trainer.config.model_copy(update={"loss": loss})
        found.setdefault("by_chunk_slots", {})[chunk] = measure(trainer, row, facts, arguments.steps, ceiling)
    summary, norm = trainer.summary()
    found["loss"], found["gradient_norm"] = round(summary.loss, 4), round(norm, 5)
    found["parts_ms"] = part_times(trainer, row, 3)
    found["profile"] = kernel_times(lambda: trainer.step([row], 1), arguments.top)
    found["compile"] = _compiled(watch)
    if arguments.variant == "plain" and torch.cuda.is_available():
        found["cross_entropy_kernel_ms"] = kernel_shapes(setting["drafter"]["vocab_size"])
    return found


def kernel_shapes(vocabulary: int) -> dict[str, float]:
    """Milliseconds of the cross entropy kernel over 4096 slots, by block and warps."""
    from dflash_core.loss_kernel import cross_entropy_in_place

    logits = torch.randn(4096, vocabulary, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, vocabulary, (4096,), device="cuda")
    found = {}
    for block in (2048, 4096, 8192, 16384):
        for warps in (4, 8, 16, 32):
            if not 8 <= block // (32 * warps) <= 64:
                continue
            run = partial(cross_entropy_in_place, logits, labels, True, block=block, warps=warps)
            found[f"{block}x{warps}"] = round(float(np.median(milliseconds(run, 5, warm=2))), 3)
    return found


def _compiled(watch: Watch) -> dict[str, Any]:
    report = watch.report()
    return {
        "graphs": report.caches.graphs,
        "events": report.events,
        "recompiles": list(report.recompile_reasons),
        "aot_hits": report.caches.aot_hits,
        "aot_misses": report.caches.aot_misses,
    }


def run_child(
    arguments: argparse.Namespace, setting: str, cache: str, *extra: str, ranks: int = 1
) -> dict[str, Any]:
    """Run one measurement in a fresh process (or `ranks` of them, each with a row of its own); rank 0's
    result.
    """
    python = [sys.executable]
    if ranks > 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        python += ["--virtual-local-rank"] if torch.cuda.is_available() else []
    command = [*python, __file__, "--child", "--setting", setting, "--steps", str(arguments.steps)]
    command += ["--chunks", arguments.chunks, "--top", str(arguments.top), *extra]
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr[-3000:]}
    found = json.loads(done.stdout.strip().splitlines()[-1])
    tuned = [line for line in done.stderr.splitlines() if "flex_attention" in line]
    return found | ({"tuning_log": tuned[:60]} if tuned else {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", default="27B,8B")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--chunks", default="4096", help="slots of a head chunk; the first is warmed up with")
    parser.add_argument("--variants", default="", help=f"besides plain: {', '.join(VARIANTS)}")
    parser.add_argument("--ranks", default="", help="also on so many GPUs, e.g. 2,4")
    parser.add_argument("--top", type=int, default=25, help="kernels to list")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    parser.add_argument("--only-first", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--variant", default="plain", help=argparse.SUPPRESS)
    parser.add_argument("--ceiling", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        result = child(arguments)
        if result.get("rank", 0) == 0:
            print(json.dumps(result))
        return
    results: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    for setting in arguments.settings.split(","):
        results[setting] = measure_setting(arguments, setting)
    print(json.dumps(results, indent=1))


def measure_setting(arguments: argparse.Namespace, setting: str) -> dict[str, Any]:
    """All that was asked for of one setting; each part is printed as one line as soon as it is known."""

    def part(name: str, *extra: str, ranks: int = 1) -> dict[str, Any]:
        measured = run_child(arguments, setting, cache, *extra, ranks=ranks)
        print(json.dumps({"setting": setting, "part": name, **measured}), flush=True)
        return measured

    with tempfile.TemporaryDirectory() as cache:
        found = part("plain")
        found["warm"] = part("warm", "--only-first")
        alone = found.get("by_chunk_slots", {}).get(arguments.chunks.split(",")[0], {}).get("step_ms")
        for ranks in (int(r) for r in arguments.ranks.split(",") if r):
            several = part(f"{ranks} ranks", ranks=ranks)
            if alone and "step_ms" in several:
                several["efficiency"] = round(alone / several["step_ms"], 4)
            found.setdefault("ranks", {})[ranks] = several
        ceiling = str(found.get("ceiling_tflops", 0.0))
        for variant in filter(None, arguments.variants.split(",")):
            other = part(variant, "--variant", variant, "--ceiling", ceiling)
            found.setdefault("variants", {})[variant] = other
    return found


if __name__ == "__main__":
    main()
