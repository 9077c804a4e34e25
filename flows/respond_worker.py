"""The process that lets the target answer chats: one job, the whole set."""

from __future__ import annotations

from flows.channel import Channel, Job, Result, RunJob, serve
from flows.respond import RespondConfig, respond


def start(channel: Channel, setup: Job) -> RunJob:
    """Return the function that answers the chats of a job."""

    def run(job: Job) -> Result:
        config = RespondConfig.model_validate(job["config"])
        report = respond(config, lambda done, total: channel.say("progress", done=done, total=total))
        bad = sum(report.bad.values())
        return {
            "sentence": f"{report.written} written, {report.resumed} found, {bad} bad, "
            f"{report.tokens} tokens in {report.seconds:.0f} s"
        }

    return run


if __name__ == "__main__":
    serve(start)
