"""Extraction by the flow's steps and workers, without Prefect: a data set for tests of what comes after."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from flows.config import ExtractConfig
from flows.extract_plan import plan_dataset
from flows.extract_steps import Outcome, ShardRunner, finish_dataset, open_pool, seal_if_whole, wanted_shards
from flows.launch import ignore
from storage.dataset import Dataset


def run_extraction(config: ExtractConfig, only: Sequence[int] = ()) -> tuple[Dataset, Outcome]:
    """Plan, capture each shard once, seal; an error of a shard is raised."""
    dataset = plan_dataset(config)
    outcome = Outcome()
    shards = wanted_shards(dataset, only)
    with open_pool(config, dataset) as pool, ThreadPoolExecutor(pool.capacity) as threads:
        runner = ShardRunner(pool, redo=bool(only))
        runner.prepare(ignore, len(shards))
        results = threads.map(lambda shard: runner.attempt(shard, ignore), shards)
        outcome.done.update(zip(shards, results, strict=True))
    seal_if_whole(dataset, outcome, only, lambda: finish_dataset(dataset))
    return dataset, outcome
