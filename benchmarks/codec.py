"""Measures the codecs on hidden states: size, entropy, error, and speed of one thread each way.

python benchmarks/codec.py --json
python benchmarks/codec.py --target FOLDER --texts chats.jsonl --json
python benchmarks/codec.py --synthetic --width 5120 --tokens 4096 --json

Real states come from `--target` (a transformers folder) reading the chats of `--texts`; left out, the
demo's target (extra `demo`) reads its own answers to the demo's prompts, which takes minutes the first time
and is kept in runs/bench. `--cache FILE` keeps states for the next run. Channel scales come from the first
third of the chats; the other two thirds are measured. Each codec reports: ratio (against bf16),
bits_per_value, entropy_bits_per_value (order-0 entropy of the symbols of each layer), relative_error (RMS
in channel scales), worst_layer_error, energy_error (sqrt(sum of squared errors / sum of squares)), and MB
of bf16 a second of one core: encode_MB_s and decode_MB_s of everything, entropy_encode_MB_s and
entropy_decode_MB_s of the part that runs on CPU threads.
With `--device cuda` the arithmetic runs there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors.torch import load_file, save_file
from synthetic import synthetic_states
from torch import Tensor

from storage.calibration import Calibration
from storage.codec import Codec, Kind, Layout, parse_codec
from storage.symbols import ErrorSums, Symbols

NAMES = ["lossless", "fp8"] + [f"tolerance={e}" for e in (0.01, 0.026, 0.05, 0.1, 0.2, 0.3, 0.5)]
Cells = list[dict[str, Tensor]]
"""One entry a chat: column -> bf16 [T, D]."""
ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "runs" / "bench"
"""Where answers and states of the demo's target are kept."""


def demo_chats() -> tuple[str, str]:
    """Return the folder of the demo's target, and that of its own answers to the demo's prompts."""
    from dflash_core.respond import GenerationSettings
    from flows.demo_target import write_demo_target
    from flows.respond import RespondConfig, respond

    target = str(write_demo_target(ROOT / "runs" / "demo" / "target"))
    config = RespondConfig(
        inputs=(str(ROOT / "configs" / "demo" / "prompts_train.jsonl"),),
        output=str(KEPT / "responses"),
        target=target,
        dtype="float32",
        generation=GenerationSettings(max_new_tokens=192),
        batch_size=25,
    )
    respond(config)
    return target, config.output


def capture_states(target_folder: str, texts: str, layers: tuple[int, ...], max_tokens: int) -> Cells:
    """Run the target over the chats of `texts` until `max_tokens` are there."""
    from dflash_core.chat import ChatConfig, ChatEncoder
    from dflash_core.target import TargetConfig, load_target
    from storage.chats import read_chats

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = TargetConfig(
        path=target_folder,
        tap_layer_ids=layers,
        mask_token=0,
        dtype="bfloat16" if device == "cuda" else "float32",  # bf16 is slow on processors without AVX-512
    )
    target = load_target(config, device)
    encoder = ChatEncoder(target.tokenizer, ChatConfig())
    cells: Cells = []
    tokens = 0
    for record, _ in read_chats(texts):
        captured = target.capture([encoder.encode(record)])[0]
        cells.append({column: states.cpu().contiguous() for column, states in captured.states.items()})
        tokens += captured.sample.num_tokens
        if tokens >= max_tokens:
            break
    return cells


def synthetic_cells(width: int, tokens: int, layers: tuple[int, ...]) -> Cells:
    """Chats of 512 tokens."""
    return [
        {f"layer_{layer:03d}": synthetic_states(512, width, seed=1000 * chat + layer) for layer in layers}
        for chat in range(max(tokens // 512, 3))
    ]


def load_cells(path: Path) -> Cells:
    cells: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, states in load_file(path).items():
        chat, column = name.split(".")
        cells[int(chat)][column] = states
    return [cells[chat] for chat in sorted(cells)]


def save_cells(cells: Cells, path: Path) -> None:
    save_file(
        {f"{i}.{column}": states for i, cell in enumerate(cells) for column, states in cell.items()}, path
    )


def symbol_counts(symbols: Symbols) -> list[Tensor]:
    """Histograms of the independent symbol streams of a cell (what its entropy is the entropy of)."""
    if symbols.header.kind == Kind.LOSSLESS:
        streams = [symbols.array("exponent"), symbols.array("rest")]
    elif symbols.header.kind == Kind.FP8:
        streams = [symbols.array("value").view(torch.uint8)]
    elif symbols.header.layout == Layout.BYTES:
        streams = [symbols.array("symbol")]
    else:
        folded_TH = symbols.array("folded" if symbols.header.layout == Layout.NIBBLES else "low")
        low_TD = torch.cat([folded_TH >> 4, folded_TH & 15], 1)[:, : symbols.header.width].int()
        streams = [low_TD]
        if symbols.header.layout == Layout.WIDE:
            streams = [low_TD + 16 * symbols.array("high").int()]
    return [torch.bincount(stream.flatten().int() + 2048, minlength=1 << 12) for stream in streams]


def entropy(counts: Tensor) -> float:
    """Bits a symbol."""
    share = counts[counts > 0].double() / counts.sum()
    return float(-(share * share.log2()).sum())


class Clock:
    """Adds up the seconds of named stages: CPU time of this thread, or time on the clock with a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = 0.0

    def start(self) -> None:
        self._wait()
        self._last = self._now()

    def stop(self, stage: str) -> None:
        self._wait()
        now = self._now()
        self.seconds[stage] += now - self._last
        self._last = now

    def _now(self) -> float:
        return time.thread_time() if self.device.type == "cpu" else time.perf_counter()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(codec: Codec, cells: Cells, scales: dict[str, Tensor], device: torch.device) -> dict[str, Any]:
    """Encode and decode every cell once, check it, and report."""
    clock = Clock(device)
    values = size = 0
    errors: dict[str, ErrorSums] = defaultdict(ErrorSums)
    counts: dict[str, list[Tensor]] = {}
    for cell in cells:
        for column, states in cell.items():
            states_TD, scale_D = states.to(device), scales[column].to(device)
            clock.start()
            encoded = codec.encode_on_device(states_TD, scale_D)
            symbols = encoded.to("cpu")
            clock.stop("encode")
            data = codec.to_bytes(symbols)
            clock.stop("entropy_encode")
            back = codec.from_bytes(data)
            clock.stop("entropy_decode")
            decoded_TD = torch.empty_like(states_TD)
            codec.decode_on_device(back.to(device), scale_D, decoded_TD)
            clock.stop("decode")
            if codec.kind == Kind.LOSSLESS:
                assert torch.equal(decoded_TD.view(torch.int16), states_TD.view(torch.int16))
            values, size = values + states.numel(), size + len(data)
            errors[column] += symbols.error
            found = symbol_counts(encoded)
            counts[column] = (
                [a + b for a, b in zip(counts[column], found, strict=True)] if column in counts else found
            )
    megabytes, seconds = values * 2 / 1e6, clock.seconds
    column_values = values / len(counts)
    bits = sum(entropy(c) * float(c.sum()) / column_values for streams in counts.values() for c in streams)
    return {
        "ratio": 16 * values / (8 * size),
        "bits_per_value": 8 * size / values,
        "entropy_bits_per_value": bits / len(counts),
        "relative_error": sum(errors.values(), ErrorSums()).relative_error,
        "worst_layer_error": max(e.relative_error for e in errors.values()),
        "energy_error": sum(errors.values(), ErrorSums()).energy_error,
        "encode_MB_s": megabytes / (seconds["encode"] + seconds["entropy_encode"]),
        "decode_MB_s": megabytes / (seconds["decode"] + seconds["entropy_decode"]),
        "entropy_encode_MB_s": megabytes / seconds["entropy_encode"],
        "entropy_decode_MB_s": megabytes / seconds["entropy_decode"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="transformers folder of the target; default: the demo's")
    parser.add_argument("--texts", help="chats: JSONL, JSON, Parquet, a folder of them; with --target")
    parser.add_argument("--layers", default="1,8,14,20,27")
    parser.add_argument("--tokens", type=int, default=12_000, help="how many tokens to measure on, about")
    parser.add_argument("--cache", type=Path, help="safetensors file that keeps the states between runs")
    parser.add_argument("--synthetic", action="store_true", help="random states instead of a target's")
    parser.add_argument("--width", type=int, default=5120, help="width of synthetic states")
    parser.add_argument("--codecs", default=",".join(NAMES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    layers = tuple(int(layer) for layer in arguments.layers.split(","))
    if (arguments.target is None) != (arguments.texts is None):
        parser.error("give --target and --texts together, or neither for the demo's")
    cache = arguments.cache
    if cache is None and arguments.target is None:
        cache = KEPT / f"states-{arguments.layers}-{arguments.tokens}.safetensors"
    if arguments.synthetic:
        cells = synthetic_cells(arguments.width, arguments.tokens, layers)
    elif cache is not None and cache.exists():
        cells = load_cells(cache)
    else:
        target, texts = (arguments.target, arguments.texts) if arguments.target else demo_chats()
        cells = capture_states(target, texts, layers, arguments.tokens)
        if cache is not None:
            save_cells(cells, cache)
    torch.set_num_threads(1)
    calibration, device = Calibration(), torch.device(arguments.device)
    for cell in cells[: max(len(cells) // 3, 1)]:
        calibration.add({column: states.to(device) for column, states in cell.items()})
    scales = calibration.scales()
    report = {}
    for name in arguments.codecs.split(","):
        measure(parse_codec(name), cells[:1], scales, device)  # kernels are compiled
        report[name] = measure(parse_codec(name), cells[len(cells) // 3 :], scales, device)
    if arguments.json:
        print(json.dumps(report, indent=1))
        return
    keys = list(next(iter(report.values())))
    print(f"{'codec':16s}" + "".join(f"{key:>24s}" for key in keys))
    for name, numbers in report.items():
        print(f"{name:16s}" + "".join(f"{numbers[key]:24.4f}" for key in keys))


if __name__ == "__main__":
    main()
