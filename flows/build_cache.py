"""Builds the compile artifact of a training configuration: one full train step and one evaluation step.

Run it once for a fingerprint, and every start of training is warm. On a machine that has a fitting version
already it proves that version: nothing may be compiled. `flows.build` does the same as a Prefect flow.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_core.compile_graphs import training_graphs
from dflash_core.configuration import UserError
from dflash_core.drafter import DrafterConfig
from dflash_core.training import TrainingConfig
from flows.config import TrainConfig
from flows.devices import hold_devices
from flows.extract_steps import worker_slots
from flows.launch import Message, OnMessage, ignore
from flows.ranks import rank_environment, run_ranks
from storage.compile_session import CompileCacheConfig, CompileSession, open_compile_store
from storage.dataset import open_dataset
from storage.objects import Store

log = logging.getLogger(__name__)

SILENCE_TIMEOUT_S = 3600.0
"""Ranks that say nothing for this long while they compile are ended."""


def build_for_training(config: TrainConfig, on_message: OnMessage = ignore) -> dict[str, Any]:
    """Build the artifact of a training run, or prove the one that there is; return `build_cache`'s summary.

    The data set says what target the drafter is for; it need not be sealed yet. One GPU serves for all that
    the run will have, because each rank sees its own as the first.

    Raises UserError or RanksFailed as `build_cache`.
    """
    if config.cache is None:
        raise UserError("cache: null switches the compile cache off, so there is nothing to build")
    dataset = open_dataset(config.dataset)
    drafter = config.drafter.for_target(dataset.spec.target, dataset.spec.capture)
    gpus = tuple(slot for slot in worker_slots(config.gpus) if slot != "cpu")[:1]
    with hold_devices(gpus):
        return build_cache(
            drafter,
            config.training,
            config.cache,
            store=open_compile_store(config.cache, dataset.uri),
            gpus=gpus,
            ranks=1 if gpus else config.cpu_ranks,
            run_name=f"build for {config.output}",
            on_message=on_message,
        )


def build_cache(
    drafter: DrafterConfig,
    training: TrainingConfig,
    cache: CompileCacheConfig,
    *,
    store: Store | None = None,
    gpus: Sequence[str] = (),
    ranks: int | None = None,
    run_name: str = "build",
    on_message: OnMessage = ignore,
) -> dict[str, Any]:
    """Restore what fits, run one full step on each rank, publish what it compiled; return the summary.

    Beside the session's summary it holds "first_optimizer_step_seconds" (slowest rank, from the start of its
    process) and "wall_seconds".

    Raises:
        UserError: the configuration compiles nothing here, or `cache.uri` is missing.
        RanksFailed: a rank failed.
    """
    began = time.monotonic()
    opened = store or open_compile_store(cache)
    number = ranks or max(1, len(gpus))
    first_steps: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="dflash-build-") as scratch,
        CompileSession.open(
            opened,
            training_graphs(drafter, training),
            cache,
            ranks=number,
            run_name=run_name,
            variables=rank_environment(gpus, number),
        ) as session,
    ):

        def follow(message: Message) -> None:
            session.on_message(message)
            if message["kind"] == "first_step":
                first_steps.append(float(message["seconds"]))
            on_message(message)

        file = Path(scratch) / "build.json"
        file.write_text(
            json.dumps(
                {"drafter": drafter.model_dump(mode="json"), "training": training.model_dump(mode="json")}
            )
        )
        run_ranks(
            "flows.cache_rank",
            [str(file)],
            ranks=number,
            gpus=gpus,
            environment=session.environment,
            silence_timeout_s=SILENCE_TIMEOUT_S,
            on_message=follow,
        )
        summary = session.summary()
    first = max(first_steps)
    return {
        **summary,
        "first_optimizer_step_seconds": first,
        "wall_seconds": round(time.monotonic() - began, 3),
    }
