"""Shows why each GPU has a process of its own: compiled code called in one thread fails while another traces.

    python benchmarks/thread_race.py                # on whatever is installed, on a GPU if there is one
    python benchmarks/thread_race.py --flex         # with flex attention instead of some products
    python benchmarks/thread_race.py --as-2.11      # newer torch without the change that hides the fault

torch keeps "somebody is tracing with FX" in one flag for the whole process, and every call of a compiled
function looks at it before anything else. So a thread that calls a finished, warm function raises

    RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function

while any other thread is inside a trace, as every compile is for a while. Since 2.13 a second process-wide
flag hides this during Dynamo's own compiles; since 2.14 the first flag belongs to the thread. Processes share
neither.

Prints a line of JSON after each case, and all of them at the end:
    held            deterministic: a warm function is called while another thread is held inside an FX trace,
                    or inside its first compile; what happened
    race            one thread calls a warm function in a loop while another compiles
    threads         threads that train, each on lengths of its own, as one process for several GPUs would
    processes_cold  the same work with one process a worker, on one shared empty cache
    processes_warm  the same again with what that left

A case that exceeds its share of --seconds is ended, and shows how far it came.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dflash_core.compile_watch import seconds_since_process_start

Step = Callable[[int], torch.Tensor]
"""A compiled function of a length, each new length being a new graph; returns a loss."""
HOLD_S = 10.0
WARM_STEPS = 30
"""Steps that a worker takes between two new lengths."""
SHARES = {"held": 0.25, "race": 0.3, "threads": 0.3, "processes_cold": 0.3, "processes_warm": 0.3}
"""Of --seconds, the most that a case may take; usually all of them together need half."""


def make_step(device: str, flex: bool) -> Step:
    """Return a compiled function with a backward: some products by default, flex attention on request.

    On a CPU through AOTAutograd alone: a C++ compiler adds minutes and no trace, and flex has no backward.
    """
    if flex:
        from torch.nn.attention.flex_attention import flex_attention

        attend = torch.compile(flex_attention, dynamic=False)

        def attention(length: int) -> torch.Tensor:
            q, k, v = (
                torch.randn(1, 4, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            )
            return attend(q, k, v).sum()

        return attention

    @torch.compile(backend="inductor" if device == "cuda" else "aot_eager", dynamic=False)
    def products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = torch.tanh(x @ weight) + x
        return x.sum()

    weight = torch.full((16, 16), 0.01, device=device, requires_grad=True)
    return lambda length: products(torch.ones(length, 16, device=device), weight)


def train(step: Step, lengths: Sequence[int]) -> Iterator[str]:
    """Begin with one length after the other, and go on training on all so far; yield how each step ended."""
    for known in range(1, len(lengths) + 1):
        for length in (lengths[known - 1], *itertools.islice(itertools.cycle(lengths[:known]), WARM_STEPS)):
            yield outcome_of(lambda length=length: step(length).backward())  # type: ignore[misc]


def held(arguments: argparse.Namespace) -> None:
    """Call a warm function while another thread is held inside a trace."""
    inside, go = threading.Event(), threading.Event()

    def parked(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        go.wait(HOLD_S)
        return x + 1

    def tracing_backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        # What AOTAutograd does in every compile that its cache does not spare.
        return make_fx(lambda *a: (parked(a[0]), module(*a))[1])(*inputs)

    warm = torch.compile(lambda x: x * 2, backend="eager")
    x = torch.ones(4)
    warm(x)
    first_compile = torch.compile(lambda x: x.sin() + 1, backend=tracing_backend)
    others: dict[str, Callable[[], Any]] = {
        "control: another thread waits": lambda: parked(x),
        "another thread is in an FX trace": lambda: torch.fx.symbolic_trace(parked),
        "another thread is in its first compile": lambda: first_compile(torch.ones(3)),
    }
    found = {}
    for name, other in others.items():
        inside.clear()
        go.clear()
        # The held thread may fail as well, by the same fault; what counts is the call below.
        thread = threading.Thread(target=outcome_of, args=(other,))
        thread.start()
        inside.wait(HOLD_S)
        found[name] = outcome_of(lambda: warm(x))
        go.set()
        thread.join()
        say(**found)


def outcome_of(call: Callable[[], Any]) -> str:
    """Say how a call ended. Tracing beside other threads can fail in any way."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {str(error)[:80]}"
    return "ok"


def race(arguments: argparse.Namespace) -> None:
    """Call a warm function in this thread while another compiles; count what raises."""
    step = make_step(arguments.device, arguments.flex)
    step(128).backward()
    step(128)

    def compile_new() -> None:
        for number in range(arguments.workers * arguments.shapes):
            # What happens to this thread counts in the case "threads".
            outcome_of(lambda number=number: step(256 + 128 * number).backward())  # type: ignore[misc]

    other = threading.Thread(target=compile_new, daemon=True)
    other.start()
    calls, raised, first_error = 0, 0, ""
    while other.is_alive() and time.monotonic() < arguments.end:
        calls += 1
        if (said := outcome_of(lambda: step(128))) != "ok":
            raised += 1
            first_error = first_error or said
    say(
        calls_of_the_warm_function=calls,
        raised=raised,
        first_error=first_error,
        compiling_thread_finished=not other.is_alive(),
    )


def threads(arguments: argparse.Namespace) -> None:
    """Train in several threads of this process."""
    step, number = make_step(arguments.device, arguments.flex), arguments.shapes
    outcomes: list[str] = []

    def work(worker: int) -> None:
        for said in train(step, [128 * (1 + worker * number + i) for i in range(number)]):
            outcomes.append(said)

    others = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(arguments.workers)]
    for other in others:
        other.start()
    for other in others:
        other.join(max(0.0, arguments.end - time.monotonic()))
    errors = [said for said in outcomes if said != "ok"]
    say(
        steps=arguments.workers * number * (1 + WARM_STEPS),
        steps_ok=outcomes.count("ok"),
        steps_raised=len(errors),
        first_error=errors[0] if errors else "",
        finished=not any(other.is_alive() for other in others),
    )


def one_process(arguments: argparse.Namespace) -> None:
    """Train in a process of its own."""
    step, done, errors = make_step(arguments.device, arguments.flex), 0, []
    for said in train(step, [128 * (1 + i) for i in range(arguments.shapes)]):
        done += said == "ok"
        errors += [said] if said != "ok" else []
        say(steps_ok=done, errors=errors)


def say(**fields: Any) -> None:
    """Tell the parent how far a case is; the last line counts."""
    print(json.dumps(fields), flush=True)


def child(arguments: argparse.Namespace, case: str, cache: str, seconds: float) -> subprocess.Popen[str]:
    """Start one case in a process of its own."""
    command = [sys.executable, __file__, "--case", case, "--device", arguments.device]
    command += ["--workers", str(arguments.workers), "--shapes", str(arguments.shapes)]
    command += ["--seconds", str(seconds)]
    command += [*(["--as-2.11"] if arguments.as_2_11 else []), *(["--flex"] if arguments.flex else [])]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    return subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def result_of(process: subprocess.Popen[str], end: float) -> dict[str, Any]:
    """Wait for a case. One that hangs is an outcome too: overlapping traces can leave the flag set."""
    ended = ""
    try:
        out, err = process.communicate(timeout=max(1.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        ended = "did not finish in its time"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    lines = [line for line in out.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if process.returncode and not ended:
        ended = f"exit code {process.returncode}: {err[-600:]}"
    return found | ({"outcome": ended} if ended else {})


def processes(arguments: argparse.Namespace, cache: str, seconds: float) -> dict[str, Any]:
    """Run all workers at once on one cache directory."""
    end = time.monotonic() + seconds
    started = [child(arguments, "one_process", cache, seconds) for _ in range(arguments.workers)]
    results = [result_of(process, end) for process in started]
    return {
        "steps": arguments.workers * arguments.shapes * (1 + WARM_STEPS),
        "steps_ok": sum(result.get("steps_ok", 0) for result in results),
        "failures": [result for result in results if result.get("errors") or "outcome" in result],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=3, help="threads, and then processes")
    parser.add_argument("--shapes", type=int, default=2, help="graphs that each worker compiles")
    parser.add_argument("--flex", action="store_true", help="compile flex attention; needs a GPU, and longer")
    parser.add_argument("--seconds", type=float, default=150.0, help="the longest that all of it may take")
    parser.add_argument(
        "--as-2.11", dest="as_2_11", action="store_true", help="undo what hides the fault since 2.13"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_2_11 and hasattr(torch.compiler, "_compile_session_context"):
        torch.compiler._compile_session_context = contextlib.nullcontext
    if arguments.case:
        # Some seconds went into starting this process, and some are left for telling.
        arguments.end = time.monotonic() + arguments.seconds - seconds_since_process_start() - 3.0
        {"held": held, "race": race, "threads": threads, "one_process": one_process}[arguments.case](
            arguments
        )
        os._exit(0)  # compiling threads may be stuck
    gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    found: dict[str, Any] = {"torch": torch.__version__, "device": gpu, "as_2_11": arguments.as_2_11}
    end = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as cache:
        for case, share in SHARES.items():
            began = time.monotonic()
            seconds = min(share * arguments.seconds, end - began)
            if case.startswith("processes"):
                found[case] = processes(arguments, f"{cache}/processes", seconds)
            else:
                found[case] = result_of(child(arguments, case, f"{cache}/{case}", seconds), began + seconds)
            found[case]["seconds"] = round(time.monotonic() - began, 1)
            print(json.dumps({case: found[case]}), flush=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
