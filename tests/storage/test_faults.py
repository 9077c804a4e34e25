"""Whatever dies, fills up or is cut: what can be read is whole, and a run again ends as an undisturbed."""

from __future__ import annotations

import itertools
import os
import random
import resource
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from storage.checkpoints import Checkpoints, Position
from storage.dataset import Dataset, open_dataset
from storage.objects import (
    ObjectExists,
    ObjectNotFound,
    ObjectTruncated,
    Store,
    StoreConfig,
    StoreError,
    open_store,
)
from storage.reader import RowReader
from storage.verify import orphans, verify_dataset
from tests.storage.faulty_proxy import Fault, FaultyProxy, Rule, faulty_proxy
from tests.storage.killable import Workers, workers
from tests.storage.made import contents, made_dataset, made_samples, made_spec, write_missing
from tests.storage.seaweed import SeaweedServer

LARGE = random.Random(0).randbytes(12 << 20)
PATIENT = StoreConfig(part_bytes=5 << 20, read_timeout=1)


@pytest.fixture(scope="module")
def crew(s3: SeaweedServer) -> Iterator[Workers]:
    with workers(s3.environment) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    dataset = made_dataset(tmp_path_factory.mktemp("undisturbed"), made_spec(), made_samples(40))
    write_missing(dataset)
    return contents(dataset.store)


def check_like(dataset: Dataset, undisturbed: dict[str, bytes]) -> None:
    """Sealed, every byte verified, nothing unread, and equal to a run without faults."""
    assert dataset.sealed and all(finding.state == "good" for finding in verify_dataset(dataset, "cells"))
    dataset.store.abort_unfinished()
    assert not dataset.store.abort_unfinished(dry_run=True)
    assert not orphans(dataset)
    assert contents(dataset.store) == undisturbed


# Processes that die.


@pytest.mark.parametrize("where, kills", [("local", 12), ("s3", 8)])
def test_workers_killed_at_random_moments(
    where: str,
    kills: int,
    crew: Workers,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    uri = str(tmp_path) if where == "local" else request.getfixturevalue("s3_uri")
    stores = (made_dataset(f"{uri}-{i}", made_spec(), made_samples(40)).uri for i in itertools.count())
    longest = 0.5 * crew.seconds({"do": "write", "store": next(stores)})
    for store in crew.kill_often("write", stores, longest, seed=7, kills=kills):
        check_like(open_dataset(store), undisturbed)


@pytest.mark.parametrize("where", ["local", "s3"])
def test_uploads_killed_at_random_moments(
    where: str, crew: Workers, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The object is absent or whole; what is left over is listed, removed, and does not stand in the way."""
    uri = str(tmp_path / "store") if where == "local" else request.getfixturevalue("s3_uri")
    store = open_store(uri)
    (tmp_path / "large").write_bytes(LARGE)
    moments = random.Random(3)
    whole = crew.seconds({"do": "put", "store": uri, "key": "whole", "file": str(tmp_path / "large")})
    seen: list[str] = []
    number = killed = 0
    # A kill may come when all is done, or before the server knows of an upload: until enough did not.
    while killed < 5 or (where == "s3" and not seen):
        assert number < 40, f"only {killed} kills came before the end of an upload, {len(seen)} inside of one"
        number += 1
        task = {"do": "put", "store": uri, "key": f"object-{number}", "file": str(tmp_path / "large")}
        killed += crew.run(task, kill_after=moments.uniform(0.1, 0.9) * whole) != 0
        assert all(store.get(info.key) == LARGE for info in store.list())
        seen += store.abort_unfinished()
        if f"object-{number}" not in {info.key for info in store.list()}:
            assert crew.run(task) == 0
        assert store.get(f"object-{number}") == LARGE
    assert not store.abort_unfinished()


def test_creation_killed_at_random_moments(crew: Workers, tmp_path: Path) -> None:
    stores = (str(tmp_path / f"store-{i}") for i in itertools.count())
    undisturbed = next(stores)
    longest = 0.8 * crew.seconds({"do": "create", "store": undisturbed})
    (folder,) = open_store(undisturbed).folders()
    for store in crew.kill_often("create", stores, longest, seed=1, kills=6):
        assert open_store(store).folders() == [folder]
        assert contents(open_store(store).child(folder)) == contents(open_store(undisturbed).child(folder))


# A server that dies.


@pytest.fixture
def proxy(s3: SeaweedServer, s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3.port) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running


def kill_server_during(work: Future[None], held: Rule, s3: SeaweedServer) -> None:
    """Kill the server when it has half of a request that this rule holds, and start it again."""
    reached = held.held.wait(30)
    s3.kill()
    under_way = not work.done()
    held.times = 0
    held.let_go.set()
    s3.start()
    assert reached and under_way, "the kill did not come in the middle of the work"


@pytest.mark.parametrize(
    "method, contains", [("POST", "uploads"), ("PUT", "partNumber=2"), ("POST", "uploadId")]
)
def test_server_killed_while_uploading(
    method: str, contains: str, s3: SeaweedServer, proxy: FaultyProxy, s3_uri: str, tmp_path: Path
) -> None:
    store = open_store(s3_uri, PATIENT)
    (tmp_path / "large").write_bytes(LARGE)
    with ThreadPoolExecutor(1) as pool:
        proxy.rules = [Rule("hold request", method, contains, times=99)]
        upload = pool.submit(store.put_file, "large", tmp_path / "large")
        kill_server_during(upload, proxy.rules[0], s3)
        upload.result()  # the client's own patience outlasts the restart
    assert store.get("large") == LARGE
    store.abort_unfinished()
    assert store.get("large") == LARGE


def test_server_killed_while_a_data_set_is_written(
    s3: SeaweedServer, proxy: FaultyProxy, s3_uri: str, undisturbed: dict[str, bytes]
) -> None:
    dataset = made_dataset(open_store(s3_uri, PATIENT), made_spec(), made_samples(40))

    def work() -> None:
        while True:
            with suppress(StoreError):  # a worker that gave up is started again
                return write_missing(dataset)

    keys = ("shards/00001", "records/00003", "manifest.json")
    # What was held during an earlier kill is no request of the server any more: until its turn it is refused.
    proxy.rules = [Rule("refuse", "PUT", key, times=20) for key in keys]
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        for turn, key in enumerate(keys):
            proxy.rules[turn] = Rule("hold request", "PUT", key, times=99)
            kill_server_during(working, proxy.rules[turn], s3)
        working.result()
    check_like(open_dataset(dataset.uri), undisturbed)


# Connections that fail.


WRITES: list[tuple[Fault, str, str]] = [
    ("refuse", "PUT", "small"),
    ("cut request", "PUT", "small"),
    ("lose answer", "PUT", "small"),
    ("refuse", "PUT", "partNumber=2"),
    ("cut request", "PUT", "partNumber=2"),
    ("lose answer", "PUT", "partNumber=3"),
    ("refuse", "POST", "uploads"),
    ("lose answer", "POST", "uploads"),
    ("refuse", "POST", "uploadId"),
    ("lose answer", "POST", "uploadId"),
]


@pytest.mark.parametrize("fault, method, contains", WRITES)
def test_a_fault_while_writing_goes_unnoticed(
    fault: Fault, method: str, contains: str, proxy: FaultyProxy, s3_uri: str, tmp_path: Path
) -> None:
    """A lost answer is the hard one: the repetition meets our own object, and must know it."""
    store = open_store(s3_uri, PATIENT)
    proxy.rules = [Rule(fault, method, contains)]
    if contains == "small":
        store.put_bytes("small", b"data")
        assert store.get("small") == b"data"
    else:
        (tmp_path / "large").write_bytes(LARGE)
        store.put_file("large", tmp_path / "large")
        assert store.get("large") == LARGE
    assert proxy.met == [fault]
    with pytest.raises(ObjectExists):
        store.put_bytes("small" if contains == "small" else "large", b"other")
    # A lost answer to the start leaves an upload that nobody knows; one to the end does on this server.
    assert len(store.abort_unfinished()) <= (fault == "lose answer" and method == "POST")
    assert contains == "small" or store.get("large") == LARGE


def test_a_lost_answer_does_not_hide_another_winner(proxy: FaultyProxy, s3_uri: str) -> None:
    store = open_store(s3_uri, PATIENT)
    store.put_bytes("key", b"theirs")
    proxy.rules = [Rule("lose answer", "PUT", "key")]
    with pytest.raises(ObjectExists):
        store.put_bytes("key", b"ours")
    etag = store.head("key").etag
    proxy.rules = [Rule("lose answer", "PUT", "key")]
    store.replace("key", b"ours", etag)
    assert store.get("key") == b"ours"
    proxy.rules = [Rule("lose answer", "PUT", "key")]
    with pytest.raises(ObjectExists):
        store.replace("key", b"others", etag)


@pytest.mark.parametrize("fault", ["refuse", "cut answer", "stall"])
def test_a_fault_while_reading_goes_unnoticed(fault: Fault, proxy: FaultyProxy, s3_uri: str) -> None:
    store = open_store(s3_uri, PATIENT)
    store.put_bytes("key", LARGE[: 9 << 20])
    proxy.rules = [Rule(fault, "GET", "key", times=1)]
    assert store.get("key") == LARGE[: 9 << 20]
    proxy.rules = [Rule(fault, "GET", "key", times=2)]
    assert store.get_range("key", 1_000, 8 << 20) == LARGE[1_000 : 1_000 + (8 << 20)]
    assert proxy.met == [fault] * 3


def test_a_server_that_ignores_ranges_is_no_corruption(
    s3: SeaweedServer, proxy: FaultyProxy, s3_uri: str
) -> None:
    def whole(path: str) -> bytes:
        _, bucket, key = path.split("/", 2)
        return bytes(s3.client().get_object(Bucket=bucket, Key=key)["Body"].read())

    proxy.whole = whole
    store = open_store(s3_uri, PATIENT)
    store.put_bytes("key", LARGE[:1_000])
    dataset = made_dataset(store, made_spec(), made_samples(40))
    write_missing(dataset)
    proxy.rules = [Rule("ignore range", "GET", "", times=99)]
    assert store.get_range("key", 0, 1_000) == LARGE[:1_000]
    with pytest.raises(ObjectTruncated):
        store.get_range("key", 0, 1_001)
    for start, size in ((0, 999), (1, 999), (999, 1), (1_000, 1)):
        with pytest.raises(StoreError, match=r"the server ignores ranges .* AWS_ENDPOINT_URL"):
            store.get_range("key", start, size)
    with pytest.raises(StoreError, match="the server ignores ranges"):
        list(verify_dataset(dataset, "cells"))
    rows = [np.array([0])]
    with (
        RowReader(dataset, dataset.columns, rows, row_tokens=64, device="cpu") as reader,
        pytest.raises(StoreError, match="the server ignores ranges"),
    ):
        next(iter(reader))


def test_patience_ends(proxy: FaultyProxy, s3_uri: str, tmp_path: Path) -> None:
    """A server that never works is an error that says so, and nothing is left behind."""
    store = open_store(s3_uri, StoreConfig(part_bytes=5 << 20, patience=0.5))
    (tmp_path / "large").write_bytes(LARGE)
    proxy.rules = [Rule("refuse", "PUT", "partNumber=2", times=99)]
    with pytest.raises(StoreError, match=r"uploading .*large: failed again and again for \d+ s .*SlowDown"):
        store.put_file("large", tmp_path / "large")
    with pytest.raises(ObjectNotFound):
        store.head("large")
    assert not store.abort_unfinished()
    store.put_bytes("key", LARGE)
    proxy.rules = [Rule("cut answer", "GET", "key", times=99)]
    with pytest.raises(StoreError, match="failed again and again"):
        store.get("key")


@contextmanager
def refusing(proxy: FaultyProxy, seconds: float) -> Iterator[None]:
    """Answer every request with 503 from now on, for some time."""
    rule = Rule("refuse", "", "", times=1 << 30)
    proxy.rules = [rule]
    timer = threading.Timer(seconds, lambda: setattr(rule, "times", 0))
    timer.start()
    yield
    timer.join()


def test_every_request_waits_for_an_overwhelmed_server(
    proxy: FaultyProxy, s3_uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(s3_uri, StoreConfig(part_bytes=5 << 20, read_timeout=1.5))  # a client of its own
    (tmp_path / "large").write_bytes(LARGE)
    store.put_bytes("there/key", b"data")
    store.put_bytes("gone", b"data")
    etag = store.head("there/key").etag
    requests = [
        lambda: store.put_bytes("new", b"data"),
        lambda: store.put_file("large", tmp_path / "large"),
        lambda: store.replace("there/key", b"other", etag),
        lambda: store.delete("gone"),
        lambda: store.head("ready"),
        lambda: [info.key for info in store.list("ready")],
        lambda: store.folders(),
        lambda: store.abort_unfinished("nothing"),
        *([lambda: store.get("ready"), lambda: store.get_range("ready", 1, 2)] * 12),
    ]
    store.put_bytes("ready", b"ready")
    with ThreadPoolExecutor(len(requests)) as pool, refusing(proxy, 4):
        answers = list(pool.map(lambda request: request(), requests))
    assert answers[5:8] == [["ready"], ["there"], []]
    assert answers[8:] == [b"ready", b"ea"] * 12
    assert store.get("new") == b"data" and store.get("large") == LARGE and store.get("there/key") == b"other"
    assert {info.key for info in store.list()} == {"there/key", "new", "large", "ready"}
    (told,) = [r.getMessage() for r in caplog.records if r.name == "storage.patience"]
    # The first to be refused may have been a HEAD, whose answer names no reason.
    assert "SlowDown; trying again for up to 300 s" in told or "503; trying again for up to 300 s" in told


@pytest.mark.parametrize("theirs, ours", [(b"data", b"data"), (b"theirs", b"ours")])
def test_a_lost_answer_before_an_outage(theirs: bytes, ours: bytes, proxy: FaultyProxy, s3_uri: str) -> None:
    """What came of the write is looked up when the server is back, however many tries lie between."""
    store = open_store(s3_uri, PATIENT)
    if theirs != ours:
        store.put_bytes("key", theirs)
    proxy.rules = [Rule("lose answer", "PUT", "key"), Rule("refuse", "PUT", "key", times=5)]
    proxy.rules += [Rule("refuse", "GET", "key", times=2)]
    if theirs == ours:
        store.put_bytes("key", ours)
    else:
        with pytest.raises(ObjectExists):
            store.put_bytes("key", ours)
    assert store.get("key") == theirs and len(proxy.met) == 8


def test_a_write_whose_answers_are_all_lost_is_found(proxy: FaultyProxy, s3_uri: str) -> None:
    store = open_store(s3_uri, StoreConfig(patience=0.5))
    proxy.rules = [Rule("lose answer", "PUT", "key", times=99)]
    store.put_bytes("key", b"ours")
    assert store.get("key") == b"ours"
    with pytest.raises(StoreError, match="failed again and again"):
        store.put_bytes("key", b"others")
    assert store.get("key") == b"ours"


@pytest.fixture
def credentials_file(s3_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """AWS's file of credentials, with keys that the proxy calls expired; the variables name none."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    write_credentials(path, "old-access-key", "old-secret-word")
    return path


def write_credentials(path: Path, key: str, secret: str) -> None:
    path.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")


@pytest.mark.parametrize("first", ["put", "head", "list", "upload"])
def test_credentials_are_read_anew_when_they_expire(
    first: str, proxy: FaultyProxy, s3: SeaweedServer, s3_uri: str, credentials_file: Path, tmp_path: Path
) -> None:
    proxy.expired = {"old-access-key"}
    store = open_store(s3_uri, PATIENT).child("below")
    write_credentials(credentials_file, s3.access_key, s3.secret_key)
    (tmp_path / "large").write_bytes(LARGE)
    if first == "head":
        with pytest.raises(ObjectNotFound):
            store.head("key")
    elif first == "list":
        assert not list(store.list())
    elif first == "upload":
        store.put_file("large", tmp_path / "large")
    store.put_bytes("key", b"data")
    assert store.get("key") == b"data"


def test_credentials_that_stay_expired_are_named_as_such(
    proxy: FaultyProxy, s3_uri: str, credentials_file: Path
) -> None:
    proxy.expired = {"old-access-key"}
    store = open_store(s3_uri, PATIENT)
    for request in (lambda: store.get("key"), lambda: store.head("key"), lambda: store.put_bytes("key", b"")):
        with pytest.raises(StoreError, match=r"credentials have expired, .*read anew just now") as caught:
            request()
        assert "old-secret-word" not in str(caught.value)


def test_a_data_set_through_a_bad_line(
    proxy: FaultyProxy, s3_uri: str, undisturbed: dict[str, bytes]
) -> None:
    faults: list[Fault] = ["refuse", "cut request", "lose answer"]
    random.Random(5).shuffle(faults)
    proxy.rules = [Rule(fault, "PUT", part) for part in ("shards/", "records/") for fault in faults]
    proxy.rules += [Rule("cut answer", "GET", "samples/"), Rule("lose answer", "PUT", "manifest")]
    dataset = made_dataset(open_store(s3_uri, PATIENT), made_spec(), made_samples(40))
    write_missing(dataset)
    assert len(proxy.met) == 8
    check_like(open_dataset(dataset.uri), undisturbed)


def test_a_checkpoint_comes_by_many_requests_at_a_time(
    proxy: FaultyProxy, s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.ahead.PIECE_BYTES", 1 << 18)
    checkpoints = Checkpoints(open_store(s3_uri, PATIENT), {}, keep=1)
    weights = torch.arange(1_000_000)  # 8 MB, 31 pieces
    with checkpoints:
        checkpoints.save(Position(optimizer_step=1, epoch=0, step_in_epoch=1), {"weights": weights}, {})
    proxy.rules = [Rule("cut answer", "GET", "safetensors", times=2)]
    proxy.rules += [Rule("delay", "GET", "safetensors", times=99)]
    found = checkpoints.latest()
    assert found is not None and torch.equal(found[1]["weights"], weights)
    assert 4 <= proxy.most_delayed <= 8
    assert set(proxy.met) == {"cut answer", "delay"} and len(proxy.met) >= 31


def test_a_folder_removed_and_made_again_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def just_then(folder: Path) -> None:
        monkeypatch.undo()
        folder.parent.rmdir()
        try:
            folder.mkdir()
        finally:
            folder.parent.mkdir()

    store = open_store(tmp_path / "store")
    (tmp_path / "store").mkdir()
    monkeypatch.setattr(Path, "mkdir", just_then)
    store.put_bytes("made/key", b"data")
    assert store.get("made/key") == b"data"


# Disks that fill up.


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Store]:
    """A store on a file system of 200 kB; skipped where mounting is not allowed."""
    folder = tmp_path / "small-disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)], check=False, capture_output=True
    ).returncode:
        pytest.skip("mounting a file system needs more rights")
    try:
        yield open_store(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_disk_full(full_disk: Store, undisturbed: dict[str, bytes]) -> None:
    dataset = made_dataset(full_disk, made_spec(), made_samples(40))
    folder = Path(full_disk.uri.removeprefix("file://"))
    filler = folder / "filler"
    filler.write_bytes(bytes(max(0, _free(folder) - 30_000)))
    with pytest.raises(StoreError, match="No space left"):
        write_missing(dataset)
    assert not dataset.sealed and dataset.missing()
    assert all(f.state != "corrupt" for f in verify_dataset(dataset, "cells"))
    subprocess.run(["mount", "-o", "remount,size=8m", str(folder)], check=True)
    filler.unlink()
    write_missing(dataset)
    check_like(dataset, undisturbed)


def _free(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def test_files_may_not_grow(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    """The same by a limit on file sizes, which needs no rights."""
    dataset = made_dataset(tmp_path, made_spec(), made_samples(40))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    sizes = sorted(len(data) for key, data in undisturbed.items() if key.startswith("shards/"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[-1] - 1, hard))
    try:
        with pytest.raises(StoreError, match="File too large"):
            write_missing(dataset)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert dataset.missing() and not dataset.sealed
    write_missing(dataset)
    check_like(dataset, undisturbed)
