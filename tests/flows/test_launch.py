"""Workers that die, hang, fail and lose their parent: real processes, real signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash_core.configuration import UserError
from flows.channel import ORPHANED
from flows.launch import START_FAILURES_ALLOWED, JobFailed, PoolClosed, Tries, WorkerDied, WorkerPool
from storage.object_store import StoreError

TOY = [sys.executable, str(Path(__file__).parent / "toy_worker.py")]


def pool(
    slots: tuple[str, ...] = ("cpu",), silence_s: float = 20.0, depth: int = 1, **setup: Any
) -> WorkerPool:
    return WorkerPool(slots, TOY, setup, depth=depth, start_timeout_s=30, silence_timeout_s=silence_s)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while alive(pid):
        assert time.monotonic() < end, f"process {pid} still runs"
        time.sleep(0.05)


def listen_until(words: str, workers: WorkerPool, heard: list[dict[str, Any]], seconds: float = 20.0) -> None:
    """Run jobs until a worker has printed these words, which may arrive after the job's answer."""
    end = time.monotonic() + seconds
    while not any(m["kind"] == "stderr" and words in m["text"] for m in heard):
        assert time.monotonic() < end, f"never heard: {words}"
        workers.run({"name": "listen"}, heard.append)


def test_a_worker_lives_from_job_to_job_and_its_words_arrive() -> None:
    heard: list[dict[str, Any]] = []
    with pool(("3,4",)) as workers:
        first, worker = workers.run({"name": 1}, heard.append)
        second, _ = workers.run({"name": 2}, heard.append)
        listen_until("noise on stdout", workers, heard)
    assert (first["name"], second["name"]) == (1, 2)
    assert first["pid"] == second["pid"] and worker.starts == 1
    assert first["gpus"] == "3,4"
    assert {"kind": "log", "level": "INFO", "text": "job 1"} in heard
    wait_until_gone(first["pid"])


def test_words_that_come_after_the_answer_are_heard_with_the_next_job() -> None:
    heard: list[dict[str, Any]] = []

    def slowly(message: dict[str, Any]) -> None:
        time.sleep(0.5)  # the answer and the words after it wait together

    with pool() as workers:
        workers.run({"name": 1, "afterwards": "late words"}, slowly)
        listen_until("late words", workers, heard)


def test_an_answer_that_nobody_waits_for_is_not_anothers() -> None:
    def interrupt(message: dict[str, Any]) -> None:
        if message["kind"] == "progress":
            raise ValueError("the listener broke")

    with pool() as workers:
        before, _ = workers.run({"name": 1})
        with pytest.raises(ValueError, match="the listener broke"):
            workers.run({"name": 2}, interrupt)
        after, worker = workers.run({"name": 3})
    assert after["name"] == 3
    assert after["pid"] == before["pid"] and worker.starts == 1, "the worker is as well as before"


def test_a_killed_worker_is_replaced_and_says_its_last_words() -> None:
    with pool() as workers:
        before, _ = workers.run({"name": 0})
        with pytest.raises(WorkerDied, match=r"(?s)killed by SIGKILL.*about to die"):
            workers.run({"name": 1, "fault": "kill"})
        after, worker = workers.run({"name": 1})
    assert after["pid"] != before["pid"] and worker.starts == 2


def test_a_silent_worker_is_killed_with_everything_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pool(silence_s=1.5) as workers:
        # Longer than the limit, but not silent.
        busy, _ = workers.run({"name": 0, "steps": 20, "seconds": 0.1})
        began = time.monotonic()
        with pytest.raises(WorkerDied, match=r"said nothing for 1\.5 s"):
            workers.run({"name": 1, "fault": "child", "pid_file": str(pid_file)})
        assert time.monotonic() - began < 10
        wait_until_gone(busy["pid"])
        wait_until_gone(int(pid_file.read_text()))
        assert workers.run({"name": 1})[0]["name"] == 1


def test_errors_of_a_job_leave_the_worker_alive_unless_it_cannot_be_trusted() -> None:
    with pool() as workers:
        with pytest.raises(JobFailed, match=r"(?s)RuntimeError: something broke.*Traceback"):
            workers.run({"name": 1, "fault": "error"})
        with pytest.raises(UserError, match=r"^mend this$"):
            workers.run({"name": 1, "fault": "user"})
        assert workers.workers[0].starts == 1
        with pytest.raises(WorkerDied, match="illegal memory access"):
            workers.run({"name": 1, "fault": "unusable"})
        workers.run({"name": 2})
        assert workers.workers[0].starts == 2


def begin(
    threads: ThreadPoolExecutor, workers: WorkerPool, name: str, finish_when: Path
) -> Future[dict[str, Any]]:
    """Have a job begun that ends when this file is there; return when it is only to be finished."""
    finishing = threading.Event()

    def hear(message: dict[str, Any]) -> None:
        if message.get("what") == "finishing":
            finishing.set()

    job = {"name": name, "finish_s": 0.0, "finish_when": str(finish_when)}
    future = threads.submit(lambda: workers.run(job, hear)[0])
    assert finishing.wait(60)
    return future


def test_a_worker_begins_the_next_job_while_it_finishes_one(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads, pool(depth=2) as workers:
        slow = begin(threads, workers, "slow", tmp_path / "go")
        quick, _ = workers.run({"name": "quick"})
        assert not slow.done()
        (tmp_path / "go").touch()
        assert slow.result()["name"] == "slow" and slow.result()["pid"] == quick["pid"]
        with pytest.raises(JobFailed, match="the upload broke"):
            workers.run({"name": "broken", "finish_s": 0.0, "fault": "finish"})


def test_of_two_jobs_that_lose_their_worker_each_is_done_again_alone(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads, pool(depth=2) as workers:
        innocent = begin(threads, workers, "innocent", tmp_path / "go")
        tries = Tries()
        deadly = threads.submit(workers.run, {"name": "deadly", "fault": "kill"}, tries=tries)
        while workers.workers[0].starts < 2:
            time.sleep(0.01)
        (tmp_path / "go").touch()
        assert innocent.result(60)["name"] == "innocent"
        with pytest.raises(WorkerDied, match="SIGKILL"):
            deadly.result(60)
        assert tries.failed_on == {workers.workers[0]}


@pytest.mark.parametrize("silence_s", [20.0, 1.5])
def test_what_is_uploaded_is_finished_though_the_next_job_broke_the_device(
    tmp_path: Path, silence_s: float
) -> None:
    heard: list[dict[str, Any]] = []
    with ThreadPoolExecutor() as threads, pool(depth=2, silence_s=silence_s) as workers:
        before = begin(threads, workers, "before", tmp_path / "go")
        bad = {"name": "bad", "fault": "unusable", "once": str(tmp_path / "once")}
        again = threads.submit(workers.run, bad, heard.append)
        end = time.monotonic() + 60
        while not any("illegal memory access" in message.get("text", "") for message in heard):
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(2.0)  # the upload goes on though the process is not to be used any more
        assert not before.done() and not again.done()
        (tmp_path / "go").touch()
        assert before.result(60)["name"] == "before"
        assert again.result(60)[0]["pid"] != before.result()["pid"]
        wait_until_gone(before.result()["pid"])
        assert workers.workers[0].starts == 2
    assert not any("exit code" in message.get("text", "") for message in heard)


def test_the_next_try_waits_for_another_worker_while_one_is_usable() -> None:
    with ThreadPoolExecutor() as threads, pool(("cpu", "cpu")) as workers:
        _, first = workers.run({"name": 1})
        _, second = workers.run({"name": 2}, tries=Tries({first}))
        assert second is not first
        busy = threading.Event()
        threads.submit(workers.run, {"name": 3, "seconds": 1.0}, lambda message: busy.set(), Tries({first}))
        assert busy.wait(60)
        assert workers.run({"name": 4}, tries=Tries({first}))[1] is second, "the first was free meanwhile"
        assert workers.run({"name": 5}, tries=Tries({first, second}))[0]["name"] == 5
    with pool() as workers:
        _, only = workers.run({"name": 1})
        assert workers.run({"name": 2}, tries=Tries({only}))[1] is only


def test_a_job_that_is_to_be_alone_gets_its_worker_though_others_keep_coming(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads, pool(depth=2) as workers:
        first = begin(threads, workers, "first", tmp_path / "go")
        order: list[str] = []

        def run(name: str, tries: Tries) -> None:
            workers.run({"name": name}, tries=tries)
            order.append(name)

        alone = threads.submit(run, "alone", Tries(alone=True))
        while not workers._waiting:
            time.sleep(0.01)
        later = threads.submit(run, "later", Tries())
        time.sleep(0.5)
        assert not later.done() and not alone.done(), "there is room for the later one"
        (tmp_path / "go").touch()
        alone.result(60)
        later.result(60)
        assert order == ["alone", "later"] and first.done()


def test_a_job_that_is_to_be_alone_does_not_wait_for_a_stuck_worker_while_others_keep_coming(
    tmp_path: Path,
) -> None:
    with ThreadPoolExecutor() as threads, pool(("cpu", "cpu"), depth=2) as workers:
        stuck = begin(threads, workers, "stuck", tmp_path / "never")
        busy = threading.Event()
        threads.submit(workers.run, {"name": "busy", "seconds": 1.0}, lambda message: busy.set())
        assert busy.wait(60)
        alone = threads.submit(workers.run, {"name": "alone"}, tries=Tries(alone=True))
        while not workers._waiting:
            time.sleep(0.01)

        def feed() -> None:
            while not alone.done():
                workers.run({"name": "later", "seconds": 0.05})

        for _ in range(3):  # the second worker always has one, and never room for two
            threads.submit(feed)
        assert alone.result(10)[1] is workers.workers[1] and not stuck.done()


def test_no_job_waits_for_the_uploads_of_a_process_that_leaves(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads, pool(("cpu", "cpu"), depth=2) as workers:
        leaves = begin(threads, workers, "leaves", tmp_path / "go")
        begin(threads, workers, "stays", tmp_path / "go")
        workers.workers[0].renew()
        assert threads.submit(workers.run, {"name": "next"}).result(10)[1] is workers.workers[1]
        assert not leaves.done()
        (tmp_path / "go").touch()
        leaves.result(60)
        assert workers.run({"name": "last"})[1].starts == 2, "and then it has jobs again"


def test_a_refused_set_up_is_the_users_error_and_a_slot_that_never_starts_is_given_up() -> None:
    with pool(refuse=True) as workers, pytest.raises(UserError, match="this set-up is refused"):
        workers.run({"name": 1})
    for slots in (("cpu",), ("cpu", "cpu")):
        with pool(slots, crash=True) as workers:
            for _ in range(3):
                with pytest.raises(WorkerDied, match="exit code 3"):
                    workers.run({"name": 1})
            with pytest.raises(PoolClosed, match="no worker can be started"):
                workers.run({"name": 1})


def test_an_upload_that_takes_long_is_no_silence() -> None:
    with pool(silence_s=2.5, depth=2) as workers:
        workers.run({"name": "first"})
        done, worker = workers.run({"name": "stalled", "finish_s": 5.0})
    assert done["name"] == "stalled" and worker.starts == 1


def test_a_device_that_hangs_before_the_upload_is_silence() -> None:
    with pool(silence_s=2.5, depth=2) as workers:
        with pytest.raises(WorkerDied, match=r"said nothing for 2\.5 s"):
            workers.run({"name": "hung", "fault": "device", "finish_s": 0.0})
        assert workers.run({"name": "next"})[1].starts == 2


def test_a_store_that_is_away_costs_no_slot_and_is_asked_again_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause_s = 0.7
    monkeypatch.setattr("flows.worker_process.STORE_PAUSE_S", pause_s)
    away = tmp_path / "away"
    away.touch()
    with pool(store_is_away_while=str(away)) as workers:
        began = time.monotonic()
        for _ in range(START_FAILURES_ALLOWED + 1):
            with pytest.raises(StoreError, match="no server answers"):
                workers.run({"name": 1})
        assert time.monotonic() - began > START_FAILURES_ALLOWED * pause_s
        away.unlink()
        assert workers.run({"name": 1})[0]["name"] == 1
    away.touch()
    monkeypatch.setattr("flows.worker_process.STORE_PAUSE_S", 3600.0)
    with pool(store_is_away_while=str(away)) as workers:
        with pytest.raises(StoreError):
            workers.run({"name": 1})
        threading.Timer(0.5, workers.close).start()
        with pytest.raises(PoolClosed):
            workers.run({"name": 1})


def test_a_start_that_hangs_names_its_limit() -> None:
    hangs = WorkerPool(["cpu"], TOY, {"start_s": 3600.0}, start_timeout_s=1.0)
    with (
        hangs,
        pytest.raises(WorkerDied, match=r"nothing for 1 s and was killed; raise workers\.start_timeout_s"),
    ):
        hangs.run({"name": 1})


def test_workers_can_be_started_ahead_of_their_jobs() -> None:
    heard: list[dict[str, Any]] = []
    with pool(("cpu", "cpu", "cpu")) as workers:
        workers.warm(2, heard.append)
        end = time.monotonic() + 20
        while sum("is ready after" in message.get("text", "") for message in heard) < 2:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert workers.run({"name": "first"})[1].starts == 1
        assert [worker.starts for worker in workers.workers] == [1, 1, 0]
    with pool(refuse=True) as workers:
        told = threading.Event()

        def hear(message: dict[str, Any]) -> None:
            if "did not start: this set-up is refused" in message.get("text", ""):
                told.set()

        workers.warm(1, hear)
        assert told.wait(60)
        with pytest.raises(UserError, match="this set-up is refused"):
            workers.run({"name": "first"})


def test_a_start_that_is_cut_short_by_the_end_of_the_pool_is_nothing_to_tell() -> None:
    heard: list[dict[str, Any]] = []
    with pool(("cpu", "cpu"), start_s=3600.0) as workers:
        before = set(threading.enumerate())
        workers.warm(2, heard.append)
        starting = set(threading.enumerate()) - before
        while any(worker.pid is None for worker in workers.workers):
            time.sleep(0.01)
        time.sleep(0.5)
    for thread in starting:
        thread.join(10)
    assert not [message for message in heard if "did not start" in message.get("text", "")]


def test_closing_the_pool_ends_busy_workers_at_once_and_frees_who_waits() -> None:
    workers = pool()
    first, _ = workers.run({"name": 0})
    outcomes: list[BaseException] = []
    busy = threading.Event()

    def ask() -> None:
        try:
            workers.run({"name": 1, "seconds": 3600}, lambda message: busy.set())
        except PoolClosed as error:
            outcomes.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert busy.wait(60)
    began = time.monotonic()
    workers.close()
    for thread in threads:
        thread.join(10)
    assert len(outcomes) == 2
    assert time.monotonic() - began < 5
    wait_until_gone(first["pid"])


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = f"""
import sys
from flows.launch import WorkerPool
pool = WorkerPool(["cpu"], {TOY!r}, {{}})
print(pool.run({{"name": 0}})[0]["pid"], flush=True)
pool.run({{"name": 1, "seconds": 3600}}, lambda message: print(message["kind"], flush=True))
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    while parent.stdout.readline() != "progress\n":  # in the middle of the second job
        assert parent.poll() is None
    assert alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until_gone(pid)


def test_an_orphan_says_so_in_its_exit_code() -> None:
    worker = subprocess.Popen(TOY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write('{"id": 0}\n{"id": 1, "name": 1, "seconds": 3600}\n')
    worker.stdin.flush()
    while "progress" not in worker.stdout.readline():
        pass
    worker.stdin.close()
    assert worker.wait(10) == ORPHANED
