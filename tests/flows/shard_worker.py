"""A worker that does shards in no time, and fails where its set-up says: at "worker 1", "shard 3", "start of
worker 0", "scales of worker 0"; with "first worker" the first process of that worker alone does.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from flows.channel import Channel, RunJob, serve
from tests.flows.toy_worker import misbehave


def start(channel: Channel, setup: dict[str, Any]) -> RunJob:
    mark = Path(setup["folder"]) / str(setup["worker"])
    names = [f"worker {setup['worker']}"] + ([] if mark.exists() else [f"first worker {setup['worker']}"])
    mark.touch()

    def meet(*places: str) -> None:
        for place in places:
            misbehave(setup["faults"].get(place), {})

    meet(*(f"start of {name}" for name in names))

    def run(job: dict[str, Any]) -> Any:
        if job["task"] == "scales":
            meet(*(f"scales of {name}" for name in names))
            return {}
        meet(*names, f"shard {job['shard']}")
        time.sleep(setup["seconds"])

        def finish() -> dict[str, Any]:
            with channel.waiting("upload"):
                time.sleep(setup["finish_s"])
            return {"shard": job["shard"]}

        return finish

    return run


if __name__ == "__main__":
    serve(start)
