"""Shows why each GPU has a process of its own: compiled code called in one thread fails while another traces.

    python benchmarks/thread_race.py                # on whatever is installed, on a GPU if there is one
    python benchmarks/thread_race.py --as-2.11      # newer torch without the change that hides the fault

torch keeps "somebody is tracing with FX" in one flag for the whole process, and every call of a compiled
function looks at it before anything else. So a thread that calls a finished, warm function raises

    RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function

while any other thread is inside a trace, as every compile is for a while. Since 2.13 a second process-wide
flag hides this during Dynamo's own compiles; since 2.14 the first flag belongs to the thread. Processes share
neither.

Prints JSON:
    held            deterministic: a warm function is called while another thread is held inside an FX trace,
                    or inside its first compile; what happened
    threads         one thread calls a warm function in a loop while others compile: calls and failures
    processes_cold  one process a worker, each compiling and training on all shapes, one shared empty cache
    processes_warm  the same again with what that left
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

Step = Callable[[int], None]
HOLD_S = 20.0


def make_step(device: str) -> Step:
    """Return a compiled training step that takes a length: each new length is a new graph.

    Flex attention with its backward on a GPU; a small product on the CPU, where flex has no backward, through
    AOTAutograd alone, because a C++ compiler adds minutes and no trace.
    """
    if device == "cuda":
        from torch.nn.attention.flex_attention import flex_attention

        attend = torch.compile(flex_attention, dynamic=False)

        def attention_step(length: int) -> None:
            q, k, v = (
                torch.randn(1, 4, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            )
            attend(q, k, v).sum().backward()
            torch.cuda.synchronize()

        return attention_step

    @torch.compile(backend="aot_eager", dynamic=False)
    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(30):
            x = torch.tanh(x @ weight) + x
        return x.sum()

    weight = torch.full((16, 16), 0.01, requires_grad=True)

    def product_step(length: int) -> None:
        product(torch.ones(length, 16), weight).backward()

    return product_step


def held() -> dict[str, str]:
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
    return found


def outcome_of(call: Callable[[], Any]) -> str:
    """Say how a call ended. Tracing beside other threads can fail in any way."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {str(error)[:80]}"
    return "ok"


def threads(device: str, workers: int, shapes: int, seconds: float) -> dict[str, Any]:
    """Call a warm function in this thread while others compile; count what raises."""
    step = make_step(device)
    step(128)
    step(128)
    done = threading.Event()
    errors: list[str] = []

    def compile_new(worker: int) -> None:
        for number in range(shapes):
            try:
                step(256 + 128 * (worker * shapes + number))
            except RuntimeError as error:
                errors.append(str(error)[:120])
        done.set()

    others = [threading.Thread(target=compile_new, args=(i,), daemon=True) for i in range(workers - 1)]
    for other in others:
        other.start()
    calls, raised, first_error = 0, 0, ""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(other.is_alive() for other in others):
        calls += 1
        if (said := outcome_of(lambda: step(128))) != "ok":
            raised += 1
            first_error = first_error or said
    finished = not any(other.is_alive() for other in others)
    return {
        "calls_of_the_warm_function": calls,
        "raised": raised,
        "first_error": first_error,
        "raised_in_compiling_threads": len(errors),
        "compiling_threads_finished": finished,
    }


def one_process(device: str, shapes: int) -> dict[str, Any]:
    """Train on every shape, as a worker with a process of its own."""
    step = make_step(device)
    done, errors = 0, []
    for _ in range(2):
        for number in range(shapes):
            said = outcome_of(lambda number=number: step(128 + 128 * number))  # type: ignore[misc]
            done += said == "ok"
            errors += [said] if said != "ok" else []
    return {"steps_ok": done, "errors": errors}


def child(arguments: argparse.Namespace, case: str, cache: str) -> subprocess.Popen[str]:
    """Start one case in a process of its own."""
    command = [sys.executable, __file__, "--case", case, "--device", arguments.device]
    command += ["--workers", str(arguments.workers), "--shapes", str(arguments.shapes)]
    command += ["--seconds", str(arguments.seconds), *(["--as-2.11"] if arguments.as_2_11 else [])]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def result_of(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """Wait for a case. One that hangs is an outcome too: overlapping traces can leave the flag set."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"outcome": f"did not finish in {seconds:.0f} s"}
    if process.returncode:
        return {"outcome": f"exit code {process.returncode}", "stderr": err[-600:]}
    found = json.loads(out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def processes(arguments: argparse.Namespace, cache: str) -> dict[str, Any]:
    """Run all workers at once on one cache directory."""
    began = time.monotonic()
    started = [child(arguments, "one_process", cache) for _ in range(arguments.workers)]
    results = [result_of(process, 4 * arguments.seconds) for process in started]
    return {
        "steps_ok": sum(result.get("steps_ok", 0) for result in results),
        "steps": arguments.workers * 2 * arguments.shapes,
        "failures": [result for result in results if result.get("errors") or "outcome" in result],
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=3, help="threads, and then processes")
    parser.add_argument("--shapes", type=int, default=3, help="graphs that each worker compiles")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="the longest that the thread case may take"
    )
    parser.add_argument(
        "--as-2.11", dest="as_2_11", action="store_true", help="undo what hides the fault since 2.13"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_2_11 and hasattr(torch.compiler, "_compile_session_context"):
        torch.compiler._compile_session_context = contextlib.nullcontext
    if arguments.case == "held":
        print(json.dumps(held()))
    elif arguments.case == "threads":
        print(
            json.dumps(threads(arguments.device, arguments.workers, arguments.shapes, arguments.seconds)),
            flush=True,
        )
        os._exit(0)  # compiling threads may be stuck
    elif arguments.case == "one_process":
        print(json.dumps(one_process(arguments.device, arguments.shapes)))
    else:
        gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
        found: dict[str, Any] = {"torch": torch.__version__, "device": gpu, "as_2_11": arguments.as_2_11}
        with tempfile.TemporaryDirectory() as cache:
            for case in ("held", "threads"):
                process = child(arguments, case, f"{cache}/{case}")
                found[case] = result_of(process, 2 * arguments.seconds + 120)
            for case in ("processes_cold", "processes_warm"):
                found[case] = processes(arguments, f"{cache}/processes")
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
