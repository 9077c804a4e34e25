"""Times the start of training with and without a compile artifact, with the trainer's own step; prints JSON.

    python benchmarks/compile_cache.py --setting 27B --gpus 0
    python benchmarks/compile_cache.py --setting 27B --gpus 0,1     # built on the first, restored for both

Four starts of real ranks, each in fresh processes, with a folder as the object store:
    cold        empty store, empty machine: compile, pack, publish
    restored    the machine's caches wiped: download, verify, unpack, start
    again       the same machine once more: verify what lies there, start
    all_ranks   with several GPUs: wiped again, one artifact for all ranks

Seconds "to the first optimizer step" run from the start of the slowest rank's process, imports included;
"wall" is the whole command: finding the fingerprint, restoring, torchrun, the step, an evaluation step, the
end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from train_step import SETTINGS

from dflash_core.drafter import DrafterConfig
from dflash_core.training import TrainingConfig
from flows.build_cache import build_cache
from storage.compile_session import CompileCacheConfig


def configurations(name: str, on_gpu: bool) -> tuple[DrafterConfig, TrainingConfig]:
    """Return the drafter and the training of a setting of benchmarks/train_step.py."""
    setting = SETTINGS[name]
    shape = {"num_heads": 32, "num_kv_heads": 8, "num_layers": 5} | setting["drafter"]
    training = {
        "row_tokens": setting["documents"] * setting["document_tokens"],
        "anchors_per_row": setting["anchors"],
        "loss": {"gamma": 10.0},
        "compile": True,
        "compute_dtype": "bfloat16" if on_gpu else "float32",
    }
    return DrafterConfig.model_validate(shape), TrainingConfig.model_validate(training)


def shown(summary: dict[str, Any], reports: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Pick what is worth printing of one start."""
    names = ("state", "notes", "nothing_compiled", "first_optimizer_step_seconds", "first_step_seconds")
    names += ("wall_seconds", "restore_seconds", "publish_seconds", "archive_bytes", "unpacked_bytes")
    return {
        **{name: summary[name] for name in names},
        "ranks": [
            {
                name: report[name]
                for name in ("rank", "device", "events", "event_threads", "caches", "new_files", "reasons")
            }
            | {"new_kernel_files": len(report["new_kernel_files"])}
            for report in reports
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", default="27B", choices=sorted(SETTINGS))
    parser.add_argument("--gpus", default="", help="GPU numbers with commas; none: the CPU")
    parser.add_argument(
        "--folder", type=Path, help="where store and caches go; a temporary folder by default"
    )
    arguments = parser.parse_args()
    gpus = [gpu for gpu in arguments.gpus.split(",") if gpu]
    drafter, training = configurations(arguments.setting, bool(gpus))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        root, store = Path(scratch) / "root", Path(scratch) / "store"
        cache = CompileCacheConfig(uri=str(store), local_root=str(root))
        found: dict[str, Any] = {"setting": arguments.setting, "gpus": len(gpus)}

        def start(name: str, used: list[str]) -> None:
            reports: list[Mapping[str, Any]] = []

            def keep(message: Mapping[str, Any]) -> None:
                if message["kind"] == "compile_report":
                    reports.append(message)
                elif message["kind"] == "stderr":
                    print(message["text"], file=sys.stderr)

            summary = build_cache(drafter, training, cache, gpus=used, on_message=keep)
            found[name] = shown(summary, reports)
            print(json.dumps({name: found[name]}), flush=True)

        start("cold", gpus[:1])
        shutil.rmtree(root)
        start("restored", gpus[:1])
        start("again", gpus[:1])
        if len(gpus) > 1:
            shutil.rmtree(root)
            start("all_ranks", gpus)
    cold, restored = (found[name]["first_optimizer_step_seconds"] for name in ("cold", "restored"))
    found["restored_share_of_cold"] = round(restored / cold, 3)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
