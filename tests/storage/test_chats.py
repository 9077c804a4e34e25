"""Chats are read from every kind of file with the place that each came from."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from dflash_core.configuration import UserError
from storage.chats import UnreadableRecord, input_fingerprint, read_chats

RECORDS: list[dict[str, Any]] = [
    {"id": "a", "messages": [{"role": "user", "content": "é"}]},
    {
        "id": "b",
        "messages": [{"role": "user", "content": "x", "name": "n"}, {"role": "tool", "content": "y"}],
    },
]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)


def write_all(folder: Path) -> dict[str, Path]:
    (folder / "plain.jsonl").write_text(LINES, "utf-8")
    (folder / "list.json").write_text(json.dumps(RECORDS), "utf-8")
    (folder / "lines.json").write_text(LINES, "utf-8")
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    frames = [zstandard.compress(line.encode()) for line in LINES.splitlines(keepends=True)]
    (folder / "packed.jsonl.zst").write_bytes(b"".join(frames))
    pq.write_table(pa.Table.from_pylist(RECORDS), folder / "table.parquet")
    return {path.name: path for path in folder.iterdir()}


def test_every_kind_of_file_gives_the_same_records(tmp_path: Path) -> None:
    for path in write_all(tmp_path).values():
        read = list(read_chats(str(path)))
        assert [record for record, _ in read] == RECORDS, path
        assert [where for _, where in read] == [f"{path}:1", f"{path}:2"]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "a.jsonl", "_problems.jsonl", ".draft.jsonl", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(LINES, "utf-8")
    read = list(read_chats(str(tmp_path)))
    assert [where.removeprefix(str(tmp_path)) for _, where in read] == [
        "/a.jsonl:1",
        "/a.jsonl:2",
        "/b/2.jsonl:1",
        "/b/2.jsonl:2",
    ]


def test_lines_that_are_no_records_are_reported_in_their_place(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text(LINES + '\n{"a": \n[1]\n' + LINES, "utf-8")
    read = list(read_chats(str(path)))
    faults = [(record.error, where) for record, where in read if isinstance(record, UnreadableRecord)]
    assert len(read) == 6 and len(faults) == 2
    assert faults[0] == ("not JSON: Expecting value, column 6", f"{path}:4")
    assert faults[1] == ("not a JSON object but a list", f"{path}:5")
    (tmp_path / "list.json").write_text('[{"a": 1}, 3]')
    _, (record, where) = read_chats(str(tmp_path / "list.json"))
    assert isinstance(record, UnreadableRecord) and where.endswith("list.json:2")


def test_a_record_that_is_nested_too_deeply_is_one_that_cannot_be_read(tmp_path: Path) -> None:
    deep = "[" * 100_000
    (tmp_path / "deep.jsonl").write_text(f"{LINES}{deep}\n{LINES}")
    read = [record for record, _ in read_chats(str(tmp_path / "deep.jsonl"))]
    assert [record for i, record in enumerate(read) if i != 2] == RECORDS * 2
    assert isinstance(read[2], UnreadableRecord) and "nested too deeply" in read[2].error
    (tmp_path / "deep.json").write_text(deep)
    with pytest.raises(UserError, match="is not JSON"):
        list(read_chats(str(tmp_path / "deep.json")))


def test_a_data_set_is_read_at_the_commit_that_was_fingerprinted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is made up: what it is asked for is what counts."""
    asked = []

    def load_dataset(
        name: str, config: str | None, *, revision: str | None, **_: Any
    ) -> list[dict[str, Any]]:
        asked.append((name, config, revision))
        return RECORDS

    class Information:
        sha = "0123abc"

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda api, name: Information)
    list(read_chats("some/chats"))
    input_fingerprint(["some/chats:train"])
    list(read_chats("some/chats:english:train"))
    assert asked == [("some/chats", None, None), ("some/chats", "english", "0123abc")]


def test_a_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_all(tmp_path)["plain.jsonl"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [record for record, _ in read_chats("~/plain.jsonl")] == RECORDS
    assert input_fingerprint(["~/plain.jsonl"]) == input_fingerprint([str(path)])
    with pytest.raises(UserError, match=r"'~no-such-user/plain\.jsonl' does not exist"):
        input_fingerprint(["~no-such-user/plain.jsonl"])


def test_missing_or_empty_inputs_are_refused(tmp_path: Path) -> None:
    for source, message in (
        (str(tmp_path / "no.jsonl"), "does not exist"),
        (str(tmp_path), "holds no"),
        ("a:b:c:d", "must be name"),
    ):
        with pytest.raises(UserError, match=message):
            list(read_chats(source))
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(UserError, match="neither"):
        list(read_chats(str(tmp_path / "x.txt")))
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        list(read_chats(str(tmp_path / "x.json")))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "one.jsonl").write_text(LINES, "utf-8")
    empty, one = str(tmp_path / "empty.jsonl"), str(tmp_path / "one.jsonl")
    with pytest.raises(UserError, match=r"no chats in .*empty\.jsonl"):
        input_fingerprint([empty, empty])
    input_fingerprint([empty, one])


@pytest.mark.parametrize("name", ["packed.jsonl.gz", "packed.jsonl.zst", "table.parquet"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    path = write_all(tmp_path)[name]
    whole = path.read_bytes()
    for damaged in (b"not at all", whole[:12] + bytes(99) + whole[12:], whole[:-5]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=f"{name} cannot be read"):
            list(read_chats(str(path)))


@pytest.mark.parametrize("error", [ConnectionError("reset by peer"), httpx.ReadError("reset by peer")])
def test_a_stream_that_breaks_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The hub is made up: it gives some records, and then no more."""

    def stream() -> Iterator[dict[str, Any]]:
        yield from RECORDS
        raise error

    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: stream())
    read = []
    words = rf"'some/chats' \(split 'test'\) after {len(RECORDS)} records; run again, or .*: reset by peer"
    with pytest.raises(UserError, match=words):
        read.extend(read_chats("some/chats:test"))
    assert [record for record, _ in read] == RECORDS


def test_a_data_set_that_cannot_be_reached_is_one_clear_error() -> None:
    with pytest.raises(UserError, match=r"cannot read data set 'nobody/nothing' \(split 'train'\)"):
        list(read_chats("nobody/nothing"))
    with pytest.raises(UserError, match="no file or folder 'nobody/nothing' is here, and the hub"):
        input_fingerprint(["nobody/nothing"])


def test_the_fingerprint_follows_the_content_alone(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    write_all(first)
    shutil.copytree(first, second)
    before = input_fingerprint([str(first)])
    assert before == input_fingerprint([str(second)])
    assert before != input_fingerprint([str(first), str(first)])
    with (second / "plain.jsonl").open("a") as file:
        file.write("\n")
    assert before != input_fingerprint([str(second)])
