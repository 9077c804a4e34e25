"""The proof that nothing was compiled: each of its three eyes sees what the others miss."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch._inductor.codecache import torch_key

from dflash_core.compile_watch import (
    CacheCounts,
    CompileReport,
    StartState,
    Watch,
    cache_files,
    cache_in_use,
    environment_for_ranks,
    seconds_since_process_start,
)
from dflash_core.configuration import UserError
from tests.storage.tiny_cache import FILES, fingerprint, write_cache


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Compiled code and the stance are global to the process."""
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def doubled() -> object:
    """A function compiled without inductor: Dynamo's part alone, which needs no compiler here."""

    @torch.compile(backend="aot_eager", dynamic=False)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    return double


def test_compiles_without_a_cache_are_seen() -> None:
    watch = Watch(None, "cold", None).start()
    double: object = doubled()
    x = torch.ones(3, requires_grad=True)
    double(x).sum().backward()  # type: ignore[operator]
    report = watch.report(rank=2)
    watch.stop()
    assert report.compiled and report.rank == 2
    assert report.events["DYNAMO"] == 1 and report.event_threads == ("MainThread",)
    assert "only 0 of 1 graphs came from the cache" in report.reasons


def test_what_was_compiled_before_does_not_count() -> None:
    double: object = doubled()
    double(torch.ones(3))  # type: ignore[operator]
    watch = Watch(None, "restored", None).start()
    double(torch.ones(3))  # type: ignore[operator]
    report = watch.report()
    assert not report.compiled and report.events == {} and report.caches.graphs == 0
    double(torch.ones(4))  # type: ignore[operator]
    report = watch.report()
    watch.stop()
    assert report.compiled and any("size mismatch" in reason for reason in report.recompile_reasons)
    double(torch.ones(5))  # type: ignore[operator]
    assert watch.report().events == report.events, "stopped"


def test_new_kernel_files_are_seen_and_locks_are_not(tmp_path: Path) -> None:
    write_cache(tmp_path)
    watch = Watch(tmp_path, "restored", None).start()
    for name in ("locks/b.lock", "triton/tmp.pid_2_y/kernel.cubin", "ab/.9.9.tmp"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    assert not watch.report().compiled and watch.report().new_files == 0
    (tmp_path / "ab/new.py").write_bytes(b"source alone is no kernel")
    assert not watch.report().compiled and watch.report().new_files == 1
    (tmp_path / "triton/HASH/new.cubin").write_bytes(b"")
    report = watch.report()
    watch.stop()
    assert report.new_kernel_files == ("triton/HASH/new.cubin",)
    assert report.reasons == ("1 new kernel file(s): triton/HASH/new.cubin",)
    assert set(cache_files(tmp_path)) == {*FILES, "ab/new.py", "triton/HASH/new.cubin"}


def test_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "later", "cold", None).start()
    write_cache(tmp_path / "later")
    report = watch.report()
    watch.stop()
    assert report.new_files == len(FILES) and set(report.new_kernel_files) == {
        "cd/ccdmain.so",
        "triton/HASH/kernel.cubin",
    }


def test_recompile_is_an_error_that_names_the_guard() -> None:
    double: object = doubled()
    double(torch.ones(3))  # type: ignore[operator]
    watch = Watch(None, "cold", None).start()
    watch.forbid("error")
    double(torch.ones(3))  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=r"(?s)recompile.*size mismatch"):
        double(torch.ones(4))  # type: ignore[operator]
    assert watch.warnings() == []
    watch.stop()


def test_recompile_can_be_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    double: object = doubled()
    double(torch.ones(3))  # type: ignore[operator]
    watch = Watch(None, "cold", None).start()
    watch.forbid("warn")
    double(torch.ones(3))  # type: ignore[operator]
    assert watch.warnings() == []
    double(torch.ones(4))  # type: ignore[operator]
    (warning,) = watch.warnings()
    watch.stop()
    assert "size mismatch" in warning and warning in caplog.text
    assert watch.warnings() == []


def test_watch_reads_what_the_launcher_set(tmp_path: Path) -> None:
    ours = fingerprint(tmp_path)
    report = Watch.from_environment(environment_for_ranks(ours, "restored", "abc/def")).start().report()
    assert (report.start, report.fingerprint, report.cache_dir) == ("restored", ours.id, str(ours.cache_dir))
    assert Watch.from_environment({}).start().report().start == "cold"
    with pytest.raises(UserError, match="must be restored, local or cold"):
        Watch.from_environment({"DFLASH_COMPILE_START": "warm"})


def test_the_compiler_is_loaded_while_the_rank_does_other_things(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = torch_key()
    monkeypatch.setenv("DFLASH_COMPILE_TORCH_KEY", "ab" * 32)
    monkeypatch.setattr("dflash_core.compile_watch.NOTABLE_S", 0.0)
    watch = Watch(None, "restored", None)
    watch.mark("imports")
    watch.load_compiler()
    watch.mark("weights")
    watch.start()
    watch.mark("waiting")
    assert torch_key() == bytes.fromhex("ab" * 32), "the launcher's digest is taken, not computed again"
    torch_key.clear()  # type: ignore[attr-defined]
    assert torch_key() == sources
    double: object = doubled()
    double(torch.ones(3))  # type: ignore[operator]
    report = watch.report()
    watch.stop()
    assert report.events == {"DYNAMO": 1} and report.event_threads == ("MainThread",)
    assert list(report.parts) == ["imports", "weights", "waiting"] and min(report.parts.values()) >= 0
    assert 0 < sum(report.parts.values()) <= report.seconds_since_process_start
    assert report.compiler["_compile.compile_inner"] > 0


def test_where_nothing_is_compiled_no_workers_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    ours = fingerprint(tmp_path)
    threads = {
        start: environment_for_ranks(ours, start).get("TORCHINDUCTOR_COMPILE_THREADS")
        for start in get_args(StartState)
    }
    assert threads == {"restored": "1", "local": "1", "cold": None}
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "5")
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in environment_for_ranks(ours, "restored")


def test_what_checkpoints_say_of_the_cache(tmp_path: Path) -> None:
    ours = fingerprint(tmp_path)
    said = cache_in_use(environment_for_ranks(ours, "restored", "abc/def"))
    assert said == {"fingerprint": ours.id, "version": "abc/def", "start": "restored"}
    assert cache_in_use(environment_for_ranks(ours, "cold")) == {**said, "version": "", "start": "cold"}
    assert cache_in_use({}) is None


def test_report_travels_as_json() -> None:
    counts = CacheCounts(
        graphs=1, aot_hits=1, aot_misses=0, aot_bypasses=0, fx_hits=2, fx_misses=0, fx_bypasses=0
    )
    report = Watch(None, "cold", None).start().report().model_copy(update={"caches": counts})
    line = json.dumps(report.model_dump(mode="json"))
    assert json.loads(line)["kind"] == "compile_report"
    assert CompileReport.model_validate_json(line) == report


def test_age_of_this_process() -> None:
    first = seconds_since_process_start()
    assert 0 < first < 100_000
    assert 0 <= seconds_since_process_start() - first < 5
    launched = {"DFLASH_COMPILE_LAUNCHED": str(time.time() - first / 2)}
    assert seconds_since_process_start(launched) == pytest.approx(first / 2, abs=1)
