"""Reads chat records from files, folders and Hugging Face data sets, and says where each came from."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_core.configuration import UserError, expand_home, fingerprint

_LINES, _WHOLE, _PARQUET = (".jsonl", ".ndjson"), (".json",), (".parquet",)
_PACKED = (".gz", ".zst")
_READ_BYTES = 1 << 22
_UNREADABLE = (OSError, EOFError, zlib.error, pa.ArrowException)
_EMPTY_SHA256 = hashlib.sha256().hexdigest()

_fingerprinted: dict[str, str] = {}
"""Hugging Face data set -> the commit that `input_fingerprint` saw last, which is the one to read."""


class UnreadableRecord(dict[str, Any]):
    """Stands in the stream for a line that is no JSON object; `error` says why. It is an empty record."""

    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error


def read_chats(source: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (record, "file:line") one at a time, in a fixed order.

    `source` is a .jsonl, .json or .parquet file (the first two also .gz or .zst), a folder of them (sorted
    by path; names that begin with "_" or "." are left out), or a Hugging Face data set, streamed: "name",
    "name:split" or "name:config:split" (split "train" by default). The line counts from 1; in .json and
    Parquet files it is the number of the record.
    Of a data set the commit is read that `input_fingerprint` saw last in this process, or else the newest.
    Lines that are no JSON object come as `UnreadableRecord`. Raise UserError when there is nothing to read.
    """
    path = _path(source)
    if path.exists():
        for file in _files(path):
            yield from _read_file(file)
    elif _looks_like_path(source):
        raise UserError(f"input {source!r} does not exist")
    else:
        yield from _read_hub(source)


def input_fingerprint(sources: Sequence[str]) -> str:
    """64 hex digits of the content of the inputs in their order, wherever the files lie.

    Files are hashed whole; a Hugging Face data set counts by its name and commit. Raise UserError, also when
    no file holds a byte.
    """
    parts: list[Any] = []
    for source in sources:
        path = _path(source)
        if path.exists():
            parts.append([_file_sha256(file) for file in _files(path)])
        elif _looks_like_path(source):
            raise UserError(f"input {source!r} does not exist")
        else:
            name, config, split = _hub_name(source)
            _fingerprinted[name] = _hub_commit(name)
            parts.append(["hub", name, config, split, _fingerprinted[name]])
    if all(digest == _EMPTY_SHA256 for part in parts for digest in part):
        raise UserError(f"there are no chats in {', '.join(sources)}: not a byte is there")
    return fingerprint(parts)


def _path(source: str) -> Path:
    """The file or folder that a source would be."""
    return Path(expand_home(source))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if _kind(path) is None:
            raise UserError(f"{path} is neither .jsonl, .json nor .parquet")
        return [path]
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and _kind(file) is not None and not file.name.startswith(("_", "."))
    )
    if not files:
        raise UserError(f"folder {path} holds no .jsonl, .json or .parquet file")
    return files


def _kind(path: Path) -> tuple[str, ...] | None:
    name = path.name.lower()
    for ending in _PACKED:
        name = name.removesuffix(ending)
    return next((kind for kind in (_LINES, _WHOLE, _PARQUET) if name.endswith(kind)), None)


def _read_file(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    try:
        yield from _records_of(path)
    except _UNREADABLE as error:
        raise UserError(f"{path} cannot be read, it may be damaged or cut short: {error}") from None


def _records_of(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    kind = _kind(path)
    if kind is _PARQUET:
        yield from _read_parquet(path)
        return
    with path.open("rb") as raw:
        data = _unpacked(raw, path)
        if kind is _WHOLE:
            yield from _read_json(data.read(), path)
            return
        for number, line in enumerate(data, start=1):
            if line.strip():
                yield _parse(line), f"{path}:{number}"


def _unpacked(raw: IO[bytes], path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return gzip.open(raw)  # type: ignore[return-value]
    if path.suffix.lower() == ".zst":
        # Unlike zstandard's reader, this one takes several frames and notices a file that was cut short.
        return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"))
    return raw


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.rstrip())
    except RecursionError:
        return UnreadableRecord("its JSON is nested too deeply")
    except json.JSONDecodeError as error:
        return UnreadableRecord(f"not JSON: {error.msg}, column {error.colno}")
    except ValueError as error:
        return UnreadableRecord(f"not JSON: {error}")
    if not isinstance(record, dict):
        return UnreadableRecord(f"not a JSON object but a {type(record).__name__}")
    return record


def _read_json(data: bytes, path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """A .json file is a list of records, one record, or (as often found) lines of records."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        lines = [line for line in data.splitlines() if line.strip()]
        if len(lines) < 2 or isinstance(_parse(lines[0]), UnreadableRecord):
            raise UserError(f"{path} is not JSON: {error}") from None
        for number, line in enumerate(data.splitlines(), start=1):
            if line.strip():
                yield _parse(line), f"{path}:{number}"
        return
    records = content if isinstance(content, list) else [content]
    for number, record in enumerate(records, start=1):
        if isinstance(record, dict):
            yield record, f"{path}:{number}"
        else:
            error_text = f"not a JSON object but a {type(record).__name__}"
            yield UnreadableRecord(error_text), f"{path}:{number}"


def _read_parquet(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    number = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=256):
            for record in batch.to_pylist():
                number += 1
                yield without_nones(record), f"{path}:{number}"


def without_nones(value: Any) -> Any:
    """Drop keys whose value is None, at any depth: Parquet gives every struct the keys of all the others."""
    if isinstance(value, dict):
        return {key: without_nones(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [without_nones(entry) for entry in value]
    return value


def _read_hub(source: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Stream a data set. Raises UserError, also when the stream breaks in the middle."""
    import httpx
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    name, config, split = _hub_name(source)
    revision = _fingerprinted.get(name)
    number = 0
    try:
        for record in load_dataset(name, config, split=split, streaming=True, revision=revision):
            number += 1
            yield without_nones(record), f"{source}:{number}"
    except (*_UNREADABLE, ValueError, ImportError, httpx.HTTPError, DatasetsError) as error:
        begun = f" after {number} records; run again, or download it and name the folder" if number else ""
        raise UserError(f"cannot read data set {name!r} (split {split!r}){begun}: {error}") from None


def _hub_name(source: str) -> tuple[str, str | None, str]:
    parts = source.split(":")
    if len(parts) > 3 or not all(parts):
        raise UserError(f"data set {source!r} must be name, name:split or name:config:split")
    return parts[0], parts[1] if len(parts) == 3 else None, parts[-1] if len(parts) > 1 else "train"


def _hub_commit(name: str) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return str(HfApi().dataset_info(name).sha)
    except (OSError, HfHubHTTPError) as error:
        raise UserError(
            f"no file or folder {name!r} is here, and the hub does not say which commit a data set of that "
            f"name is at: {error}"
        ) from None


def _looks_like_path(source: str) -> bool:
    endings = tuple(ending for kind in (_LINES, _WHOLE, _PARQUET) for ending in kind) + _PACKED
    return source.startswith((".", "/", "~")) or source.lower().endswith(endings) or source.count("/") > 1


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
