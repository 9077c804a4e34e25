"""A process that holds the whole target for one step of a flow: to answer chats, or to evaluate a drafter."""

from __future__ import annotations

from flows.channel import Channel, Job, Result, RunJob, serve


def start(channel: Channel, setup: Job) -> RunJob:
    """Return the function that does {"task": "respond" or "evaluate", "config": ...}."""

    def progress(done: int, total: int | None) -> None:
        channel.say("progress", done=done, of=total)

    def run(job: Job) -> Result:
        if job["task"] == "respond":
            from flows.respond import RespondConfig, respond

            report = respond(RespondConfig.model_validate(job["config"]), progress)
            bad = sum(report.bad.values())
            words = f"{report.written} written, {report.resumed} found, {bad} bad, {report.tokens} tokens"
            return {"sentence": f"{words} in {report.seconds:.0f} s"}
        from flows.evaluate import EvaluateConfig, evaluate

        return {"report": evaluate(EvaluateConfig.model_validate(job["config"]), progress)}

    return run


if __name__ == "__main__":
    serve(start)
