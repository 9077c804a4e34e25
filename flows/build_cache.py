"""Builds the compile artifact of a training configuration: one full train step and one evaluation step.

Run it once for a fingerprint, and every start of training is warm. On a machine that has a fitting version
already it proves that version: nothing may be compiled.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_core.compile_graphs import training_graphs
from dflash_core.configuration import Config, UserError
from dflash_core.drafter import DrafterConfig
from dflash_core.training import TrainingConfig
from flows.ranks import run_ranks
from storage.compile_session import CompileCacheConfig, CompileSession
from storage.objects import Store, open_store

log = logging.getLogger(__name__)

SILENCE_TIMEOUT_S = 3600.0
"""Ranks that say nothing for this long while they compile are ended."""


class BuildCacheConfig(Config):
    """A compile artifact to build."""

    drafter: DrafterConfig
    training: TrainingConfig
    gpus: tuple[str, ...] = ()
    """GPUs to compile on, one rank each; one is enough. Empty: the CPU."""
    cache: CompileCacheConfig
    """Its `uri` must be set here."""


def build_cache(
    drafter: DrafterConfig,
    training: TrainingConfig,
    cache: CompileCacheConfig,
    *,
    store: Store | None = None,
    gpus: Sequence[str] = (),
    ranks: int | None = None,
    run_name: str = "build",
    on_message: Callable[[Mapping[str, Any]], None] = lambda message: None,
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
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[:1])}
    with (
        tempfile.TemporaryDirectory(prefix="dflash-build-") as scratch,
        CompileSession.open(
            opened,
            training_graphs(drafter, training),
            cache,
            ranks=number,
            run_name=run_name,
            variables=visible,
        ) as session,
    ):

        def follow(message: Mapping[str, Any]) -> None:
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


def open_compile_store(cache: CompileCacheConfig, beside: str | None = None) -> Store:
    """Open the store of compile caches: `cache.uri`, or `compile-cache` below the store of the data sets."""
    if cache.uri is not None:
        return open_store(cache.uri)
    if beside is None:
        raise UserError("say where compile caches lie: set cache.uri to a folder or s3://bucket/prefix")
    return open_store(beside).child("compile-cache")
