"""Times one training step on a GPU in the two settings that public trainers were measured in, and prints
JSON.

python benchmarks/train_step.py --settings 27B,8B --steps 10
python benchmarks/train_step.py --settings 27B --brief --ranks 2 --variants fp8,checkpoint_layers,kl,muon
python benchmarks/train_step.py --settings 27B --brief --ranks 2 --ctas 4,8,16

Each setting runs in processes of its own: first with an empty compile cache (cold), then with the cache that
this left (warm), then on several GPUs and in variants, whose loss is that of the same steps on the same row.
What has been measured is printed as one line at once.

"27B": width 5120, MLP 17408, vocabulary 248320, blocks of 32, 1008 anchors, 49152 context tokens (24
documents of 2048). "8B": 4096 / 12288 / 151936, blocks of 16, 2048 anchors, 12288 context tokens (4 documents
of 3072). Five draft layers, five taps, random data, every token supervised; forward, backward, clipping and
fused AdamW, as `dflash_core.training` runs them. FLOPs: 6 x body x queries + 6 x (fc + context keys/values) x
context tokens + 4 x head x queries (attention is not counted).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.nn.functional as F

from dflash_core.compile_watch import Watch
from dflash_core.distributed import World, join_world, leave_world
from dflash_core.drafter import Drafter, DrafterConfig
from dflash_core.loss import head_loss
from dflash_core.metrics import row_flops
from dflash_core.packing import pack_tokens
from dflash_core.records import Sample
from dflash_core.row_batch import prepare_row
from dflash_core.training import Trainer, TrainingConfig, TrainingRow
from flows.launch import visible_gpus

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
    "fp8": {"layer_products": "fp8"},
    "checkpoint_layers": {"checkpoint_layers": True},
    "kl": {"loss": {"kl_weight": 0.5}},
    "muon": {"optimizer": {"name": "muon"}},
}
"""What differs from the default training configuration."""

KERNEL_GROUPS = {
    "communication": ("nccl",),
    "attention": ("flex_attention", "sdpa", "fmha"),
    "cross_entropy": ("_exponentiate", "_gather_scaled", "_sum_both", "_mixed_gradient"),
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
    loss = {"gamma": 10.0, "chunk_slots": chunk_slots, **variant.get("loss", {})}
    training = TrainingConfig.model_validate(
        {**variant, "row_tokens": row_tokens, "anchors_per_row": setting["anchors"], "loss": loss}
    )
    with torch.device(device):
        drafter = Drafter(config)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for p in drafter.parameters():
            if p.ndim == 2:
                p.normal_(0.0, 0.02, generator=generator)
    if cuda:
        drafter.compile_regions(checkpoint_layers=training.checkpoint_layers)
    elif training.checkpoint_layers:
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
    taps, last_hidden = (
        torch.empty(row_tokens, columns, dtype=torch.bfloat16, device=device).normal_(generator=generator)
        for columns in (width, config.hidden_size if training.loss.kl_weight else 0)
    )
    facts = {
        "scored_slots": batch.count,
        "blocks": batch.num_blocks,
        "queries": setting["anchors"] * config.block_size,
        "context_tokens": row_tokens,
        "flops": row_flops(config, row_tokens, setting["anchors"] * config.block_size),
        "loader_ms_per_row": round(loader_ms, 1),
    }
    row = TrainingRow(batch=batch.to(device), taps_CE=taps, last_hidden_CD=last_hidden)
    return trainer, row, facts


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
    """Milliseconds on the device by group of kernels and the longest kernels, over one call of `work`.

    "idle": the device runs nothing; "exposed_communication": it runs kernels of NCCL alone.
    """
    if not torch.cuda.is_available():
        return {}
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        work()
        synchronise()
    groups: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(list)
    spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for event in profile.events():
        annotation = event.name.startswith(("Optimizer", "## Call", "nccl:"))
        if event.device_type != torch.autograd.DeviceType.CUDA or annotation:
            continue
        kernels[event.name].append(event.device_time / 1000)
        spans["nccl" in event.name].append((event.time_range.start / 1000, event.time_range.end / 1000))
    everything = spans[False] + spans[True]
    whole = max(end for _, end in everything) - min(start for start, _ in everything)
    busy, without_communication = covered(everything), covered(spans[False])
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
        "whole_ms": round(whole, 2),
        "idle_ms": round(whole - busy, 2),
        "exposed_communication_ms": round(busy - without_communication, 2),
        "groups_ms": {name: round(ms, 2) for name, ms in sorted(groups.items(), key=lambda g: -g[1])},
        "uncompiled_ops": sorted(outside, key=lambda op: -op["ms"])[:12],
        "kernels": [
            {"name": name[:110], "calls": len(times), "ms": round(sum(times), 2)} for name, times in longest
        ],
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


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
    setting = SETTINGS[arguments.setting]
    chunks = [int(c) for c in arguments.chunks.split(",")]
    world = join_world()
    watch = Watch.from_environment().start()
    trainer, row, facts = build(setting, chunks[0], VARIANTS[arguments.variant], world)
    synchronise()
    started = time.perf_counter()
    trainer.step([row], 1)
    synchronise()
    found: dict[str, Any] = {"rank": world.rank, "first_step_s": round(time.perf_counter() - started, 2)}
    if arguments.only_first:
        return found | {"compile": _compiled(watch)}
    first, _ = trainer.summary()
    ceiling = arguments.ceiling or ceiling_tflops()
    found |= {"facts": facts, "ceiling_tflops": round(ceiling, 1), "by_chunk_slots": {}}
    watch.forbid("error")
    for chunk in chunks:
        loss = trainer.config.loss.model_copy(update={"chunk_slots": chunk})
        trainer.config = trainer.config.model_copy(update={"loss": loss})
        found["by_chunk_slots"][chunk] = measure(trainer, row, facts, arguments.steps, ceiling)
    trainer.summary()
    trainer.step([row], 1)
    last, norm = trainer.summary()
    found["loss"] = {1: round(first.loss, 4), trainer.optimizer_step: round(last.loss, 4)}
    found["gradient_norm"] = round(norm, 5)
    profile = kernel_times(lambda: trainer.step([row], 1), arguments.top)
    found["compile"] = _compiled(watch)
    if not arguments.brief and world.size == 1:
        found["parts_ms"] = part_times(trainer, row, 3)
        if arguments.variant == "plain" and torch.cuda.is_available():
            found["cross_entropy_kernel_ms"] = kernel_shapes(setting["drafter"]["vocab_size"])
    leave_world(world)
    return found | {"profile": profile}


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
    arguments: argparse.Namespace,
    setting: str,
    cache: str,
    *extra: str,
    ranks: int = 1,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Run one measurement in a fresh process (or `ranks` of them, each with a row and a GPU of its own); rank
    0's result.
    """
    command = [sys.executable, __file__, "--child", "--setting", setting, "--steps", str(arguments.steps)]
    command += ["--chunks", arguments.chunks, "--top", str(arguments.top), *extra]
    command += ["--brief"] if arguments.brief else []
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        **variables,
    }
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
        probe.close()
        processes = []
        for rank in range(ranks):
            own = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            if ranks > 1 and torch.cuda.is_available():
                own["CUDA_VISIBLE_DEVICES"] = visible_gpus(str(rank))[0]
            with Path(folder, f"{rank}.out").open("w") as out, Path(folder, f"{rank}.err").open("w") as err:
                settings = environment | {name: str(value) for name, value in own.items()}
                processes.append(subprocess.Popen(command, env=settings, stdout=out, stderr=err))
        ended = wait_for(processes, arguments.limit_s)
        if not ended:
            errors = [Path(folder, f"{rank}.err").read_text()[-1500:] for rank in range(ranks)]
            return {"failed": [p.returncode for p in processes], "errors": errors}
        return json.loads(Path(folder, "0.out").read_text().strip().splitlines()[-1])


def wait_for(processes: list[subprocess.Popen[bytes]], limit_s: float) -> bool:
    """Wait until all have ended well; at the first failure, or after `limit_s`, end the others and say
    False.
    """
    deadline = time.monotonic() + limit_s
    while any(p.poll() is None for p in processes):
        if time.monotonic() > deadline or any(p.poll() for p in processes):
            for p in processes:
                p.kill()
                p.wait()
            return False
        time.sleep(0.1)
    return not any(p.returncode for p in processes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", default="27B,8B")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--chunks", default="4096", help="slots of a head chunk; the first is warmed up with")
    parser.add_argument("--variants", default="", help=f"besides plain: {', '.join(VARIANTS)}")
    parser.add_argument("--ranks", default="", help="also on so many GPUs, e.g. 2,4")
    parser.add_argument("--ctas", default="", help="with --ranks: limits of NCCL's thread blocks to try")
    parser.add_argument("--brief", action="store_true", help="step times and one profile, nothing else")
    parser.add_argument("--cache", help="compile cache to use and to leave; an empty one unless given")
    parser.add_argument("--limit-s", type=float, default=600.0, help="most seconds of each process")
    parser.add_argument("--top", type=int, default=25, help="kernels to list")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    parser.add_argument("--only-first", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--variant", default="plain", help=argparse.SUPPRESS)
    parser.add_argument("--ceiling", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(arguments)))
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(json.dumps({"torch": torch.__version__, "device": device}), flush=True)
    for setting in arguments.settings.split(","):
        measure_setting(arguments, setting)


def measure_setting(arguments: argparse.Namespace, setting: str) -> None:
    """All that was asked for of one setting, one line a part.

    "speed" is the plain step time by that of the part: on several GPUs the scaling efficiency.
    """
    plain: dict[str, Any] = {}

    def part(name: str, *extra: str, ranks: int = 1, **variables: str) -> dict[str, Any]:
        found = run_child(arguments, setting, cache, *extra, ranks=ranks, variables=variables)
        line: dict[str, Any] = {"setting": setting, "part": name}
        if plain and "by_chunk_slots" in found:
            line["speed"] = round(_step_ms(plain) / _step_ms(found), 4)
        print(json.dumps(line | found), flush=True)
        return found

    with tempfile.TemporaryDirectory() as scratch:
        cache = arguments.cache or scratch
        plain |= part("plain")
        if "failed" in plain:
            return
        if not arguments.brief:
            part("warm", "--only-first")
        extra = ["--ceiling", str(plain["ceiling_tflops"])]
        for ranks in (int(r) for r in arguments.ranks.split(",") if r not in ("", "1")):
            part(f"{ranks} ranks", *extra, ranks=ranks)
            for most in filter(None, arguments.ctas.split(",")):
                part(f"{ranks} ranks, {most} CTAs", *extra, ranks=ranks, NCCL_MAX_CTAS=most)
        for variant in filter(None, arguments.variants.split(",")):
            part(variant, "--variant", variant, *extra)


def _step_ms(found: dict[str, Any]) -> float:
    """Step time with the first of the chunk sizes."""
    return float(next(iter(found["by_chunk_slots"].values()))["step_ms"])


if __name__ == "__main__":
    main()
