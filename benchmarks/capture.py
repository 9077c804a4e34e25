"""Measures capture of hidden states by a target of random weights, and prints one JSON line a measurement.

python benchmarks/capture.py --shape qwen3.6-27b --variants all --seconds 8

Variants:
  logits        transformers, output_hidden_states and logits, 4 rows x 2048
  hooks         the body alone with hooks on the taps, 16 x 2048
  padded        layers behind the last tap dropped, 16 x 2048 (uniform) / length-sorted rows (chats)
  padded-layers the same with every decoder layer compiled
  packed-plain  packed documents, merged projections, not compiled
  packed        packed documents, compiled arithmetic; with each of --budgets
  packed-fp8    the same with 8-bit matrix products
  parity        largest error of the packed forward against transformers' forward of one chat at a time
  write         packed capture to closed shard files on the local disk (--codec), against capture alone
  encode        packed capture and the codec's arithmetic and copies, nothing written, against capture alone
  profile       the kernels of one packed forward by time
"Uniform" input is documents of 2,048 tokens, "chats" have a realistic spread (log-normal, median 1,100,
from 32 to 4,096). tokens/s counts real tokens, no padding. TFLOP/s: 2 x parameters of the matrices of the
layers that are run (attention itself is not counted).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import transformers
from torch import nn

from dflash_core.capture import TapRecorder
from dflash_core.capture_ahead import captures
from dflash_core.parity import channel_scale, token_error
from dflash_core.records import CapturedSample, CaptureSpec, Sample, TargetSpec
from dflash_core.target import Target, TargetConfig, default_tap_ids

if TYPE_CHECKING:
    from storage.dataset import Dataset

ROPE_35 = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.6-27b": (
        "Qwen3_5TextConfig",
        {
            "vocab_size": 248320,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "rope_parameters": ROPE_35,
        },
    ),
    "qwen3-8b": (
        "Qwen3Config",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "qwen3-30b-a3b": (
        "Qwen3MoeConfig",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "qwen3.5-35b-a3b": (
        "Qwen3_5MoeTextConfig",
        {
            "vocab_size": 248320,
            "hidden_size": 2048,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "rope_parameters": ROPE_35,
        },
    ),
    "tiny": (
        "Qwen3_5TextConfig",
        {
            "vocab_size": 320,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 12,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "rope_parameters": {**ROPE_35, "mrope_section": [2, 1, 1]},
        },
    ),
}
VARIANTS = (
    "packed",
    "write",
    "encode",
    "parity",
    "profile",
    "packed-fp8",
    "packed-plain",
    "padded",
    "padded-layers",
    "hooks",
    "logits",
)


class Bench:
    """A random target on one device, and how it is measured."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        kind, shape = SHAPES[arguments.shape]
        if arguments.layers:
            shape = {**shape, "num_hidden_layers": arguments.layers}
        config = getattr(transformers, kind)(**shape)
        start = time.monotonic()
        torch.manual_seed(0)
        with torch.device(self.device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.model = model.eval().requires_grad_(False)
        if arguments.calm:
            calm(model)
        self.body: Any = model.model
        self.layers, self.norm = self.body.layers, self.body.norm
        self.taps = default_tap_ids(config.num_hidden_layers, 5)
        self.scale = arguments.length_scale
        self.recorder: TapRecorder | None = None
        self.say(
            "build",
            seconds=time.monotonic() - start,
            parameters=sum(p.numel() for p in model.parameters()),
            torch=torch.__version__,
            transformers=transformers.__version__,
            device=torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
        )

    def say(self, measurement: str, **numbers: Any) -> None:
        """Print one line of JSON."""
        rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in numbers.items()}
        print(json.dumps({"measurement": measurement, "shape": self.arguments.shape, **rounded}), flush=True)

    def uniform(self, count: int, tokens: int = 2048) -> list[Sample]:
        """Documents of one length."""
        return self._samples([tokens // self.scale] * count)

    def chats(self, tokens: int) -> list[Sample]:
        """Documents of realistic lengths with so many tokens together."""
        generator = np.random.default_rng(1)
        lengths: list[int] = []
        while sum(lengths) < tokens:
            length = int(np.clip(generator.lognormal(np.log(1100), 0.8), 32, 4096))
            lengths.append(max(8, length // self.scale))
        return self._samples(lengths)

    def _samples(self, lengths: Sequence[int]) -> list[Sample]:
        generator = np.random.default_rng(0)
        vocabulary = self.model.config.vocab_size
        return [
            Sample(
                sample_id=f"chat-{i:06d}",
                token_ids_T=generator.integers(0, vocabulary, length).astype(np.int32),
                loss_mask_T=np.ones(length, bool),
            )
            for i, length in enumerate(lengths)
        ]

    def target(
        self,
        *,
        batching: Literal["packed", "padded"],
        compiled: bool,
        budget: int,
        dtype: Literal["bfloat16", "fp8"] = "bfloat16",
    ) -> Target:
        """The body cut behind the last tap, as `load_target` leaves it."""
        last = self.taps[-1] + 1
        self.cut(last)
        self.body.norm = nn.Identity()
        text = self.model.config
        spec = TargetSpec(
            name=self.arguments.shape,
            weights_sha256="0" * 64,
            tokenizer_sha256="0" * 64,
            model_type=text.model_type,
            num_layers=len(self.layers),
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            rope_theta=float(text.rope_parameters["rope_theta"]),
        )
        config = TargetConfig(
            path="random", batching=batching, compile_layers=compiled, batch_tokens=budget, dtype=dtype
        )
        capture_spec = CaptureSpec(tap_layer_ids=self.taps, weights_dtype=dtype)
        target = Target(self.body, None, config, spec, capture_spec)
        self.recorder = target.recorder
        return target

    def cut(self, num_layers: int) -> None:
        """Run this many layers; forget hooks and compiled forwards of the variant before."""
        if self.recorder is not None:
            self.recorder.remove()
        for layer in self.layers:
            layer.__dict__.pop("forward", None)
        self.body.layers = self.layers[:num_layers]
        self.body.config.num_hidden_layers = num_layers
        self.body.norm = self.norm

    def layer_flops(self) -> float:
        """Matrix FLOPs of a token in the layers that are run now (a mixture counts its active experts)."""
        config = self.model.config
        active = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_experts", 1)
        total = 0.0
        for name, parameter in self.body.layers.named_parameters():
            if parameter.ndim >= 2 and "conv1d" not in name:
                total += 2.0 * parameter.numel() * (active if "expert" in name else 1.0)
        return total

    def measure(self, name: str, run: Callable[[], int], **about: Any) -> float:
        """Warm up once, run for --seconds, say tokens/s; return it."""
        start = time.monotonic()
        run()
        self.wait()
        warm = time.monotonic() - start
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        tokens, rounds, start = 0, 0, time.monotonic()
        while time.monotonic() - start < self.arguments.seconds or not rounds:
            tokens += run()
            rounds += 1
            self.wait()
        seconds = time.monotonic() - start
        speed = tokens / seconds
        memory = torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else 0.0
        self.say(
            name,
            **about,
            tokens_per_second=round(speed, 1),
            tflops=speed * self.layer_flops() / 1e12,
            warm_up_seconds=warm,
            rounds=rounds,
            peak_gb=memory,
        )
        return speed

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def rows(self, rows: int) -> torch.Tensor:
        """Random token ids [rows, 2048]."""
        shape = (rows, 2048 // self.scale)
        return torch.randint(0, self.model.config.vocab_size, shape, device=self.device)


CALM = 1e-3
"""Share of what layers add with weights as they are drawn. A tenth still lets rounding grow to 9 % over the
62 layers of the 27B shape, more than the parity gate takes."""


def calm(model: nn.Module) -> None:
    """Let layers add little to their input: from random weights rounding grows from layer to layer."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                weight.mul_(CALM)


def logits(bench: Bench) -> None:
    """What a plain script does."""
    bench.cut(len(bench.layers))
    ids_BT = bench.rows(4)

    def run() -> int:
        with torch.no_grad():
            bench.model(input_ids=ids_BT, use_cache=False, output_hidden_states=True)
        return ids_BT.numel()

    bench.measure("logits", run, batch="4x2048")


def hooks(bench: Bench) -> None:
    """The body alone, all layers, hooks on the taps."""
    bench.cut(len(bench.layers))
    recorder = bench.recorder = TapRecorder(bench.body, CaptureSpec(tap_layer_ids=bench.taps))
    ids_BT = bench.rows(16)

    def run() -> int:
        with torch.no_grad():
            bench.body(input_ids=ids_BT, use_cache=False)
        recorder.take()
        return ids_BT.numel()

    bench.measure("hooks", run, batch="16x2048")


def capture_variant(
    bench: Bench, name: str, batching: Literal["packed", "padded"], *, compiled: bool
) -> None:
    """One of our ways, on uniform documents and on chats."""
    for budget in bench.arguments.budgets if name == "packed" else bench.arguments.budgets[:1]:
        target = bench.target(batching=batching, compiled=compiled, budget=budget)
        uniform = bench.uniform(budget // (2048 // bench.scale))
        bench.measure(name, counted(target, uniform), input="uniform", budget=budget)
        chats = bench.chats(2 * budget)
        bench.measure(name, counted(target, chats), input="chats", budget=budget)


def eight_bits(bench: Bench) -> None:
    """Packed capture with 8-bit products: its speed and its error."""
    budget = bench.arguments.budgets[0]
    on_gpu = bench.device.type == "cuda"
    target = bench.target(batching="packed", compiled=on_gpu, budget=budget, dtype="fp8")
    bench.measure("packed-fp8", counted(target, bench.chats(2 * budget)), input="chats", budget=budget)
    parity(bench, "fp8")


def counted(target: Target, samples: Sequence[Sample]) -> Callable[[], int]:
    """Capture all samples and return their tokens."""

    def run() -> int:
        for captured in captures(target, samples):
            del captured
        return sum(sample.num_tokens for sample in samples)

    return run


CELLS_TOGETHER = 10
"""About as many as the writer encodes together: two samples of five columns."""
ENCODE_BATCHES = 12
"""In a run of `encode`: nothing hides the encoding of the last one."""


def encode(bench: Bench) -> None:
    """Capture, the codec's arithmetic and the copy to the host; nothing is entropy coded or written."""
    from concurrent.futures import ThreadPoolExecutor

    from storage.calibration import Calibration
    from storage.codec import parse_codec
    from storage.host_copies import HostCopies

    budget = bench.arguments.budgets[0]
    target = bench.target(batching="packed", compiled=bench.device.type == "cuda", budget=budget)
    samples = bench.chats(ENCODE_BATCHES * budget)
    copies = HostCopies(parse_codec(bench.arguments.codec))
    calibration = Calibration()
    first = target.capture(next(iter(target.batches(samples))))
    for item in first:
        calibration.add(item.states)
    scales = {column: scale_D.to(bench.device) for column, scale_D in calibration.scales().items()}

    def start(captured: Sequence[CapturedSample], arrivals: ThreadPoolExecutor) -> None:
        cells = [
            (states_TD, scales[column]) for item in captured for column, states_TD in item.states.items()
        ]
        for start in range(0, len(cells), CELLS_TOGETHER):
            for copy in copies.start(cells[start : start + CELLS_TOGETHER]):
                arrivals.submit(copies.finish, copy)

    def run() -> int:
        with ThreadPoolExecutor(1) as arrivals:
            for captured in captures(target, samples):
                start(captured, arrivals)
                del captured
        return sum(sample.num_tokens for sample in samples)

    alone = bench.measure("encode-none", counted(target, samples), budget=budget)
    speed = bench.measure("encode", run, codec=bench.arguments.codec, budget=budget)
    bench.say("encode-share", share=1 - speed / alone)
    with ThreadPoolExecutor(1) as arrivals:
        tokens = sum(item.sample.num_tokens for item in first)
        say_kernels(bench, "encode-profile", tokens, lambda: start(first, arrivals))


def parity(bench: Bench, dtype: Literal["bfloat16", "fp8"]) -> None:
    """Batched and packed against alone and plain, at full size."""
    on_gpu = bench.device.type == "cuda"
    target = bench.target(batching="packed", compiled=on_gpu, budget=16384, dtype=dtype)
    samples = bench._samples([max(4, n // bench.scale) for n in (700, 33, 1500, 64, 2048, 1)])
    worst: dict[str, float] = {}
    again: dict[str, float] = {}
    together = target.capture_exact(samples)
    for sample, states in zip(samples, together, strict=True):
        plain, alone = target.reference(sample), target.capture_exact([sample])[0]
        for column, states_TD in states.items():
            scale_D = channel_scale([other[column] for other in together])
            worst[column] = max(worst.get(column, 0.0), token_error(states_TD, plain[column], scale_D))
            again[column] = max(again.get(column, 0.0), token_error(states_TD, alone[column], scale_D))
    bench.say("parity", dtype=dtype, against_plain=worst, packed_against_packed_alone=again)


def profile(bench: Bench) -> None:
    """Kernels of one packed forward, by time."""
    budget = bench.arguments.budgets[0]
    target = bench.target(batching="packed", compiled=bench.device.type == "cuda", budget=budget)
    samples = next(iter(target.batches(bench.chats(budget))))
    for _ in range(2):
        target.capture(samples)
    say_kernels(bench, "profile", sum(s.num_tokens for s in samples), lambda: target.capture(samples))


def say_kernels(bench: Bench, name: str, tokens: int, run: Callable[[], object]) -> None:
    """Say where the device's time goes."""
    bench.wait()
    kind = "CUDA" if bench.device.type == "cuda" else "CPU"
    activity = getattr(torch.profiler.ProfilerActivity, kind)
    with torch.profiler.profile(activities=[activity]) as recorded:
        start = time.monotonic()
        run()
        enqueued = time.monotonic() - start
        bench.wait()
    attribute = "self_device_time_total" if bench.device.type == "cuda" else "self_cpu_time_total"
    events = sorted(recorded.key_averages(), key=lambda event: -getattr(event, attribute))
    total = sum(getattr(event, attribute) for event in events)
    bench.say(name, total_ms=total / 1e3, enqueued_in_ms=1e3 * enqueued, tokens=tokens)
    for event in events[:28]:
        milliseconds = getattr(event, attribute) / 1e3
        share = getattr(event, attribute) / max(total, 1e-9)
        bench.say("kernel", name=event.key[:110], ms=milliseconds, calls=event.count, share=share)


def write(bench: Bench) -> None:
    """Token ids to closed shard files on the local disk, and what writing costs against capture alone.

    Half of the shards are captured alone before and half after, so that a card that grows warm favours
    neither. Steady: from the end of the first shard to that of the last, so that neither the start of a run
    nor the last shard's closing, beside which nothing is captured, counts.
    """
    from storage.calibration import Calibration
    from storage.dataset import DatasetSpec, create_dataset
    from storage.objects import open_store

    budget = bench.arguments.budgets[0]
    target = bench.target(batching="packed", compiled=bench.device.type == "cuda", budget=budget)
    samples = bench.chats(bench.arguments.shards * bench.arguments.shard_tokens)
    with tempfile.TemporaryDirectory(dir=bench.arguments.scratch) as folder:
        spec = DatasetSpec(
            target=target.spec,
            capture=target.capture_spec,
            codec=bench.arguments.codec,
            input_sha256="0" * 64,
            shard_tokens=bench.arguments.shard_tokens,
        )
        dataset = create_dataset(open_store(folder), "benchmark", spec, samples)
        shards = [dataset.samples(planned.shard) for planned in dataset.plan.shards]
        calibration = Calibration()
        for captured in captures(target, shards[0]):  # compiles, where no variant before has
            for item in captured:
                calibration.add(item.states)
        dataset.publish_scales(calibration.scales())
        tokens = sum(sample.num_tokens for of_shard in shards for sample in of_shard)
        before, clock, after = DeviceClock(bench), DeviceClock(bench), DeviceClock(bench)
        alone = capture_alone(bench, target, shards[::2], before)
        start = time.monotonic()
        sizes, ends = write_shards(bench, target, dataset, clock)
        seconds = ends[-1] - start
        alone += capture_alone(bench, target, shards[1::2], after)
        steady_tokens = sum(planned.tokens for planned in dataset.plan.shards[1:])
        steady = steady_tokens / (ends[-1] - ends[0]) if len(ends) > 1 else 0.0
    bench.say(
        "write",
        codec=bench.arguments.codec,
        budget=budget,
        shards=len(sizes),
        shard_tokens=bench.arguments.shard_tokens,
        tokens_per_second=round(tokens / seconds, 1),
        capture_alone_tokens_per_second=round(tokens / alone, 1),
        write_share=1 - alone / seconds,
        steady_tokens_per_second=round(steady, 1),
        steady_write_share=1 - steady / (tokens / alone),
        device_seconds=clock.seconds(),
        device_seconds_alone=[before.seconds(), after.seconds()],
        alone_seconds=alone,
        seconds_between_shards=[round(b - a, 3) for a, b in itertools.pairwise([start, *ends])],
        bytes_per_token=sum(sizes) / tokens,
        tflops=tokens / seconds * bench.layer_flops() / 1e12,
    )


def capture_alone(
    bench: Bench, target: Target, shards: Sequence[Sequence[Sample]], clock: DeviceClock
) -> float:
    """Seconds of capturing these shards and nothing else."""
    bench.wait()
    start = time.monotonic()
    for of_shard in shards:
        for captured in clock.batches(captures(target, of_shard)):
            del captured
    bench.wait()
    return time.monotonic() - start


class DeviceClock:
    """Where the device's time goes: forwards, encoding, nothing; and the host's, which must be less."""

    def __init__(self, bench: Bench) -> None:
        self._on_gpu = bench.device.type == "cuda"
        self._events: list[list[torch.cuda.Event]] = []
        self._host = {"host_forward": 0.0, "host_encode": 0.0}

    def batches(self, batches: Iterator[list[CapturedSample]]) -> Iterator[list[CapturedSample]]:
        """Pass batches on, noting where the device begins and ends each one's forward."""
        while True:
            asked = time.monotonic()
            events = [self._now()]
            captured = next(batches, None)
            if captured is None:
                return
            events.append(self._now())
            given = time.monotonic()
            yield captured
            del captured
            events.append(self._now())
            self._events.append(events)
            self._host["host_forward"] += given - asked
            self._host["host_encode"] += time.monotonic() - given

    def seconds(self) -> dict[str, float]:
        """Seconds of forwards, of encoding, and of idling between batches; the longest of the last; and what
        the host took to enqueue forwards and encoding, waiting for room included.
        """
        if not self._on_gpu or len(self._events) < 2:
            return {}
        torch.cuda.synchronize()
        forward = [begin.elapsed_time(captured) for begin, captured, _ in self._events]
        encode = [captured.elapsed_time(encoded) for _, captured, encoded in self._events]
        idle = [end.elapsed_time(begin) for (*_, end), (begin, *_) in itertools.pairwise(self._events)]
        named = {"forward": sum(forward), "encode": sum(encode), "idle": sum(idle), "longest_idle": max(idle)}
        device = {name: round(value / 1e3, 3) for name, value in named.items()}
        return device | {name: round(value, 3) for name, value in self._host.items()}

    def _now(self) -> Any:
        if not self._on_gpu:
            return None
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))


def write_shards(
    bench: Bench, target: Target, dataset: Dataset, clock: DeviceClock
) -> tuple[list[int], list[float]]:
    """Write every planned shard, closing one while the next is captured; sizes, and when each was done."""
    from concurrent.futures import Future, ThreadPoolExecutor

    from storage.writer import ShardWriter, WriterConfig

    config = WriterConfig(threads=bench.arguments.threads, pending_bytes=bench.arguments.pending_bytes)
    closing: list[Future[tuple[int, float]]] = []

    def close(writer: ShardWriter) -> tuple[int, float]:
        return writer.close().size, time.monotonic()

    with ThreadPoolExecutor(2) as pool:
        for planned in dataset.plan.shards:
            writer = ShardWriter(dataset, planned.shard, None, config)
            for captured in clock.batches(captures(target, dataset.samples(planned.shard))):
                writer.add(*captured)
                del captured
            closing.append(pool.submit(close, writer))
        sizes, ends = zip(*(future.result() for future in closing), strict=True)
    return list(sizes), list(ends)


def main() -> None:
    """Run the variants asked for; one that fails says so, and the others go on."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--variants", default="all", help=f"comma separated: {', '.join(VARIANTS)}")
    parser.add_argument("--layers", type=int, default=0, help="instead of those of the shape")
    parser.add_argument("--calm", action="store_true", help="layers that add little")
    parser.add_argument("--seconds", type=float, default=8.0, help="time of each measurement")
    parser.add_argument("--budgets", default="32768", help="tokens of a batch, comma separated")
    parser.add_argument("--codec", default="tolerance=0.1")
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--shard-tokens", type=int, default=65536)
    parser.add_argument("--threads", type=int, default=8, help="of the entropy coder")
    parser.add_argument("--pending-bytes", type=int, default=1 << 30, help="of symbols on their way")
    parser.add_argument("--length-scale", type=int, default=1, help="divide all lengths (for the CPU)")
    parser.add_argument("--scratch", default=None, help="folder for the shards that are written")
    arguments = parser.parse_args()
    arguments.budgets = [int(budget) for budget in arguments.budgets.split(",")]
    chosen = VARIANTS if arguments.variants == "all" else arguments.variants.split(",")
    if unknown := set(chosen) - set(VARIANTS):
        parser.error(f"unknown variants: {', '.join(sorted(unknown))}")
    bench = Bench(arguments)
    runs: dict[str, Callable[[], None]] = {
        "logits": lambda: logits(bench),
        "hooks": lambda: hooks(bench),
        "padded": lambda: capture_variant(bench, "padded", "padded", compiled=False),
        "padded-layers": lambda: capture_variant(bench, "padded-layers", "padded", compiled=True),
        "packed-plain": lambda: capture_variant(bench, "packed-plain", "packed", compiled=False),
        "packed": lambda: capture_variant(bench, "packed", "packed", compiled=True),
        "packed-fp8": lambda: eight_bits(bench),
        "parity": lambda: parity(bench, "bfloat16"),
        "profile": lambda: profile(bench),
        "write": lambda: write(bench),
        "encode": lambda: encode(bench),
    }
    for name in chosen:
        try:
            runs[name]()
        except (RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
            bench.say(name, failed=f"{type(error).__name__}: {str(error)[:600]}")


if __name__ == "__main__":
    main()
