"""Archives of compile caches: what comes out is what went in, or nothing comes out."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from dflash_core.configuration import UserError
from storage.compile_archive import (
    Manifest,
    Member,
    Package,
    RejectedArtifact,
    mismatches,
    pack,
    package,
    seal,
    unpack,
    unseal,
)
from tests.storage.tiny_cache import FILES, content, fingerprint, write_cache


@pytest.fixture
def packed(tmp_path: Path) -> Package:
    """The tiny cache, packed; the archive stays for the test."""
    folder = tmp_path / "cache"
    write_cache(folder)
    with package(folder, fingerprint(tmp_path), created_by="test") as made:
        kept = tmp_path / "archive"
        kept.write_bytes(made.archive.read_bytes())
        return Package(archive=kept, manifest=made.manifest)


def test_round_trip(packed: Package, tmp_path: Path) -> None:
    unpack(packed.archive, packed.manifest, tmp_path / "out")
    found = content(tmp_path / "out")
    assert {name: data for name, (data, _) in found.items()} == FILES
    assert [name for name, (_, executable) in found.items() if executable] == ["cd/ccdmain.so"]
    assert mismatches(tmp_path / "out", packed.manifest.members) == []


def test_equal_folders_give_equal_archives(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_cache(tmp_path / name)
        os.utime(tmp_path / name / "cd/ccdmain.so", (1, len(name)))
        pack(tmp_path / name, tmp_path / f"{name}.tar.zst")
    assert (tmp_path / "one.tar.zst").read_bytes() == (tmp_path / "two.tar.zst").read_bytes()


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no compiled files"):
        pack(tmp_path / "empty", tmp_path / "archive")
    write_cache(tmp_path / "linked")
    (tmp_path / "linked/link.py").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="not a regular file"):
        pack(tmp_path / "linked", tmp_path / "archive")


def test_mismatches_are_named(packed: Package, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    (folder / "ab/cabkernel.py").write_bytes(b"kernel = 2\n" * 200)
    (folder / "triton/HASH/kernel.cubin").unlink()
    (folder / "new.so").write_bytes(b"")
    assert mismatches(folder, packed.manifest.members) == [
        "triton/HASH/kernel.cubin is missing",
        "new.so is not listed",
        "ab/cabkernel.py has other content",
    ]


def flip_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"\0",
    "flipped": flip_bit,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_archive_is_rejected(packed: Package, tmp_path: Path, damage: str) -> None:
    packed.archive.write_bytes(DAMAGES[damage](packed.archive.read_bytes()))
    with pytest.raises(RejectedArtifact, match=r"sha256|bytes"):
        unpack(packed.archive, packed.manifest, tmp_path / "out")
    assert_nothing_left(tmp_path)


def assert_nothing_left(tmp_path: Path) -> None:
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "cache"]


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


GOOD = ("good.py", b"print('good')")
ATTACKS: dict[str, tuple[list[tuple[tarfile.TarInfo, bytes]], dict[str, bytes], str]] = {
    # entries beside the good one, what the manifest lists beside it, what the refusal says
    "unlisted": ([(entry("evil.py"), b"evil")], {}, "does not list"),
    "missing": ([], {"other.py": b"x"}, "lacks 1 listed"),
    "other content": ([(entry("a.py"), b"evil")], {"a.py": b"good"}, "other content"),
    "other size": ([(entry("a.py"), b"evil!")], {"a.py": b"good"}, "not the regular file"),
    "twice": ([(entry("a.py"), b"good"), (entry("a.py"), b"evil")], {"a.py": b"good"}, "does not list"),
    "symlink": ([(entry("a", tarfile.SYMTYPE, "/etc"), b"")], {"a": b""}, "not the regular file"),
    "hard link": ([(entry("a", tarfile.LNKTYPE, "good.py"), b"")], {"a": b""}, "not the regular file"),
    "device": ([(entry("a", tarfile.CHRTYPE), b"")], {"a": b""}, "not the regular file"),
    "fifo": ([(entry("a", tarfile.FIFOTYPE), b"")], {"a": b""}, "not the regular file"),
    "folder": ([(entry("a", tarfile.DIRTYPE), b"")], {"a": b""}, "not the regular file"),
    "file as folder": ([(entry("good.py/a"), b"x")], {"good.py/a": b"x"}, "cannot be unpacked"),
}


def forge(tmp_path: Path, extra: list[tuple[tarfile.TarInfo, bytes]], listed: dict[str, bytes]) -> Package:
    """An archive whose digest is right and whose manifest is well formed: someone with write access."""
    (tmp_path / "cache").mkdir()
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for info, data in [(entry(GOOD[0]), GOOD[1]), *extra]:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    data = zstandard.compress(plain.getvalue())
    (tmp_path / "archive").write_bytes(data)
    members = tuple(
        Member(name=name, size=len(value), sha256=hashlib.sha256(value).hexdigest())
        for name, value in [GOOD, *listed.items()]
    )
    manifest = Manifest(
        fingerprint=fingerprint(tmp_path),
        archive_sha256=hashlib.sha256(data).hexdigest(),
        archive_bytes=len(data),
        members=members,
        created="2026-01-01T00:00:00+00:00",
        created_by="test",
    )
    return Package(archive=tmp_path / "archive", manifest=manifest)


def test_forging_itself_makes_a_good_archive(tmp_path: Path) -> None:
    made = forge(tmp_path, [], {})
    unpack(made.archive, made.manifest, tmp_path / "out")
    assert content(tmp_path / "out") == {GOOD[0]: (GOOD[1], False)}


@pytest.mark.parametrize("attack", ATTACKS)
def test_forged_archive_is_rejected(tmp_path: Path, attack: str) -> None:
    extra, listed, words = ATTACKS[attack]
    made = forge(tmp_path, extra, listed)
    with pytest.raises(RejectedArtifact, match=words):
        unpack(made.archive, made.manifest, tmp_path / "out")
    assert_nothing_left(tmp_path)


OUTSIDE = ("../evil", "a/../../evil", "/etc/evil", "a//b", "./a", "a/./b", "a/", "", ".", "a\\b", "a\0b")


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_outside_the_folder_are_rejected(tmp_path: Path, name: str) -> None:
    made = forge(tmp_path, [], {name: b"evil"})
    with pytest.raises(RejectedArtifact, match="outside the folder"):
        unseal(seal(made.manifest, None), None)


def test_manifest_needs_the_right_signature(packed: Package) -> None:
    key, other = b"our secret", b"another secret"
    signed = seal(packed.manifest, key)
    assert unseal(signed, key) == packed.manifest
    assert unseal(signed, None) == packed.manifest
    with pytest.raises(RejectedArtifact, match="does not match"):
        unseal(signed, other)
    with pytest.raises(RejectedArtifact, match="not signed"):
        unseal(seal(packed.manifest, None), key)
    forged = json.loads(signed)
    forged["manifest"]["created_by"] = "somebody else"
    with pytest.raises(RejectedArtifact, match="does not match"):
        unseal(json.dumps(forged).encode(), key)
    forged["signature"] = 7
    with pytest.raises(RejectedArtifact, match="does not match"):
        unseal(json.dumps(forged).encode(), key)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b'{"manifest": {}, "signature": null}', b"\xff\xfe", b"[" * 100_000],
    ids=["empty", "torn", "list", "null", "no fields", "not text", "deep"],
)
def test_unreadable_manifest_is_rejected(data: bytes) -> None:
    with pytest.raises(RejectedArtifact, match="cannot be read"):
        unseal(data, None)


def test_manifest_of_another_format_is_rejected(packed: Package) -> None:
    for name, value in (("format", 2), ("surprise", 1), ("archive_bytes", "many")):
        envelope = json.loads(seal(packed.manifest, None))
        envelope["manifest"][name] = value
        with pytest.raises(RejectedArtifact, match="cannot be read"):
            unseal(json.dumps(envelope).encode(), None)
    twice = packed.manifest.model_copy(update={"members": packed.manifest.members * 2})
    with pytest.raises(RejectedArtifact, match="twice"):
        unseal(seal(twice, None), None)
    elsewhere = packed.manifest.model_copy(update={"archive_sha256": "../../other"})
    with pytest.raises(RejectedArtifact, match="hexadecimal"):
        unseal(seal(elsewhere, None), None)
