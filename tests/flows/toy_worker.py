"""A worker that does as each job says: a stand-in for the model, with the real line to the parent."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dflash_core.configuration import UserError
from flows.channel import Channel, RunJob, Unusable, serve
from storage.object_store import StoreError


def start(channel: Channel, setup: dict[str, Any]) -> RunJob:
    if setup.get("refuse"):
        raise UserError("this set-up is refused")
    if Path(setup.get("store_is_away_while", "")).is_file():
        raise StoreError("no server answers")
    time.sleep(setup.get("start_s", 0.0))
    if setup.get("crash"):
        os._exit(3)
    print("noise on stdout that is no message")

    def run(job: dict[str, Any]) -> Any:
        logging.getLogger(__name__).info("job %s", job["name"])
        once = Path(job["once"]) if "once" in job else None
        if once is None or not once.exists():
            if once is not None:
                once.touch()
            misbehave(job.get("fault"), job)
        for step in range(job.get("steps", 1)):
            channel.say("progress", step=step)
            time.sleep(job.get("seconds", 0.0))
        if "afterwards" in job:
            threading.Timer(0.1, print, [job["afterwards"]]).start()
        result = {"name": job["name"], "pid": os.getpid(), "gpus": os.environ["CUDA_VISIBLE_DEVICES"]}
        if "finish_s" not in job:
            return result

        def finish() -> dict[str, Any]:
            channel.say("progress", what="finishing")
            if job.get("fault") == "device":
                time.sleep(3600)
            with channel.waiting("upload"):
                time.sleep(job["finish_s"])
                while "finish_when" in job and not Path(job["finish_when"]).exists():
                    time.sleep(0.01)
            if job.get("fault") == "finish":
                raise RuntimeError("the upload broke")
            return result

        return finish

    return run


def misbehave(fault: str | None, job: dict[str, Any]) -> None:
    if fault == "kill":
        print("about to die", file=sys.stderr, flush=True)
        os.kill(os.getpid(), 9)
    elif fault == "hang":
        time.sleep(3600)
    elif fault == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        Path(job["pid_file"]).write_text(str(child.pid))
        time.sleep(3600)
    elif fault == "error":
        raise RuntimeError("something broke")
    elif fault == "user":
        raise UserError("mend this")
    elif fault == "unusable":
        raise Unusable("CUDA error: an illegal memory access was encountered")


if __name__ == "__main__":
    serve(start)
