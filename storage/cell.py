"""The bytes of a cell: header, table of sections, zstandard frames. Specified in docs/codec.md."""

from __future__ import annotations

import hashlib
import struct
import threading
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import zstandard

from dflash_core.configuration import UserError

MAGIC = b"DFC1"
HEADER = struct.Struct("<4sBBBBIIIf")
"""magic, kind, layout, sections, 0, tokens, width, outliers, step."""
SECTION = struct.Struct("<II")
"""Size of a section before and after zstandard."""
CRC = struct.Struct("<I")
ALIGNMENT = 16
"""Arrays of a payload start at multiples of so many bytes."""
FRAME_HEADER, FRAME_CHECKSUM = 16, 4
"""Bytes in which the header of a zstandard frame has room, and of the checksum at its end."""
MAX_CELL_VALUES = 2**31 - 1
OUTSIDE = "a cell names an outlier outside of itself"


class CodecError(UserError):
    """A codec that does not exist, states that it cannot take, or a cell that is not whole."""


class Kind(IntEnum):
    """What a cell holds."""

    LOSSLESS = 0
    FP8 = 1
    TOLERANCE = 2


class Layout(IntEnum):
    """How the symbols of a tolerance cell lie in bytes."""

    BYTES = 0
    NIBBLES = 1
    WIDE = 2


LIMITS = (127, 7, 2047)
"""Largest symbol of each `Layout`; what lies beyond is an outlier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellHeader:
    """The fixed part of a cell."""

    kind: Kind
    layout: Layout
    tokens: int
    width: int
    outliers: int
    step: float
    """Quantisation step in units of the channel's scale (a float32 number)."""

    @property
    def arrays(self) -> tuple[tuple[str, int], ...]:
        """Name and bytes of the arrays that a payload holds, in order."""
        return self._geometry.arrays

    @property
    def offsets(self) -> Mapping[str, tuple[int, int]]:
        """Array name -> first byte in the payload, and its size."""
        return self._geometry.offsets

    @property
    def payload_bytes(self) -> int:
        """Size of the payload: what `Codec.from_bytes` needs room for, and what crosses to the device."""
        return self._geometry.payload_bytes

    @property
    def _geometry(self) -> _Geometry:
        return _geometry(self.kind, self.layout, self.tokens, self.width, self.outliers)


class _Geometry(NamedTuple):
    """Where the arrays of a payload lie; see the properties of `CellHeader`."""

    arrays: tuple[tuple[str, int], ...]
    offsets: dict[str, tuple[int, int]]
    payload_bytes: int


@lru_cache(maxsize=1 << 12)
def _geometry(kind: Kind, layout: Layout, tokens: int, width: int, outliers: int) -> _Geometry:
    """Kept: the columns of a row ask for it again and again, and it takes as long as decoding a short one."""
    values, folded = tokens * width, tokens * ((width + 1) // 2)
    if kind == Kind.LOSSLESS:
        arrays: tuple[tuple[str, int], ...] = ("base", width), ("exponent", values), ("rest", values)
    elif kind == Kind.FP8:
        arrays = ("token_scale", 4 * tokens), ("value", values)
    else:
        symbols: dict[Layout, tuple[tuple[str, int], ...]] = {
            Layout.BYTES: (("symbol", values),),
            Layout.NIBBLES: (("folded", folded),),
            Layout.WIDE: (("high", values), ("low", folded)),
        }
        arrays = *symbols[layout], ("position", 4 * outliers), ("outlier", 2 * outliers)
    offsets, at = {}, 0
    for name, size in arrays:
        offsets[name] = (at, size)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return _Geometry(arrays, offsets, at)


def pack_cell(header: CellHeader, payload: np.ndarray) -> bytes:
    """Entropy code a payload (uint8 [header.payload_bytes]) into a cell. Thread-safe; frees the GIL."""
    sections = {name: payload[start : start + size] for name, (start, size) in header.offsets.items()}
    if "position" in sections:
        position_N = sections["position"].view(np.int32)
        sections["position"] = _byte_planes(np.diff(position_N, prepend=np.int32(0)).astype("<u4"))
        sections["outlier"] = _byte_planes(sections["outlier"].view("<u2"))
    frames = [_compress(name, data) for name, data in sections.items()]
    fixed = HEADER.pack(
        MAGIC,
        header.kind,
        header.layout,
        len(frames),
        0,
        header.tokens,
        header.width,
        header.outliers,
        header.step,
    )
    sizes = zip(sections.values(), frames, strict=True)
    fixed += b"".join(SECTION.pack(data.nbytes, len(frame)) for data, frame in sizes)
    return b"".join([fixed, CRC.pack(zlib.crc32(fixed)), *frames])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cell:
    """A cell with a sound header; its frames are views that nobody has looked at yet."""

    header: CellHeader
    before_frames: memoryview
    """Header, table and CRC."""
    frames: tuple[memoryview, ...]

    def unpack(self, payload: np.ndarray) -> None:
        """Undo `pack_cell` into `payload` (uint8 [header.payload_bytes]). Thread-safe; frees the GIL.

        Raises CodecError unless every frame is whole.
        """
        self.unpack_sections(payload)
        if self.header.outliers:
            _restore_outliers(self.header, payload)

    def unpack_sections(self, payload: np.ndarray) -> None:
        """Do the same, but leave outliers as they are stored: gaps between them, and planes of bytes."""
        for (name, (start, size)), frame in zip(self.header.offsets.items(), self.frames, strict=True):
            _decompress(frame, payload[start : start + size], name)


def open_cell(cell: bytes | memoryview) -> Cell:
    """Read everything before the frames. Raises CodecError on anything but a whole cell."""
    if len(cell) < HEADER.size or bytes(cell[:4]) != MAGIC:
        raise CodecError("not a cell of hidden states: it is too short or does not start with DFC1")
    _, kind, layout, count, _, tokens, width, outliers, step = HEADER.unpack_from(cell)
    fixed = HEADER.size + count * SECTION.size
    if len(cell) < fixed + CRC.size or CRC.unpack_from(cell, fixed)[0] != zlib.crc32(cell[:fixed]):
        raise CodecError("the header of a cell is damaged: its checksum does not fit")
    if kind >= len(Kind) or layout >= len(Layout):
        raise CodecError(f"a cell of kind {kind}, layout {layout} was written by a newer version")
    header = CellHeader(
        kind=Kind(kind), layout=Layout(layout), tokens=tokens, width=width, outliers=outliers, step=step
    )
    sizes = [SECTION.unpack_from(cell, HEADER.size + i * SECTION.size) for i in range(count)]
    most = tokens * width if header.kind == Kind.TOLERANCE else 0
    sound = width > 0 and tokens * width <= MAX_CELL_VALUES and outliers <= most
    if not sound or [raw for raw, _ in sizes] != [size for _, size in header.arrays]:
        raise CodecError("the header of a cell contradicts itself")
    ends = [*accumulate((stored for _, stored in sizes), initial=fixed + CRC.size)]
    if ends[-1] != len(cell):
        raise CodecError("a cell is truncated or has bytes behind its end")
    view = memoryview(cell)
    frames = tuple(view[a:b] for a, b in pairwise(ends))
    return Cell(header=header, before_frames=view[: ends[0]], frames=frames)


def imprint(cells: Iterable[Cell]) -> str:
    """First 32 hex digits of the sha256 of everything but the blocks of the frames.

    For each cell: what stands before its frames; of each frame the first 16 bytes and the last 4, the
    checksum of its content. So cells with this imprint that can be unpacked are those that were written, at a
    small part of the cost of hashing them.
    """
    sha256 = hashlib.sha256()
    for cell in cells:
        sha256.update(cell.before_frames)
        for frame in cell.frames:
            sha256.update(frame[:FRAME_HEADER])
            sha256.update(frame[-FRAME_CHECKSUM:])
    return sha256.hexdigest()[:32]


def _byte_planes(array_N: np.ndarray) -> np.ndarray:
    """Bytes of fixed-size integers, all lowest bytes first: uint8 [itemsize * N]."""
    return np.ascontiguousarray(array_N.view(np.uint8).reshape(len(array_N), array_N.itemsize).T).reshape(-1)


def _join_planes(planes: np.ndarray, itemsize: int) -> np.ndarray:
    """Invert `_byte_planes`: uint8 [itemsize * N] in memory order."""
    return np.ascontiguousarray(planes.reshape(itemsize, -1).T).reshape(-1)


def _restore_outliers(header: CellHeader, payload: np.ndarray) -> None:
    """Turn the stored outliers (gaps, byte planes) into positions and values, in place; check bounds."""
    (p, p_size), (o, o_size) = header.offsets["position"], header.offsets["outlier"]
    gap_N = _join_planes(payload[p : p + p_size], 4).view("<u4")
    position_N = np.cumsum(gap_N, dtype=np.int64)
    if position_N[-1] >= header.tokens * header.width or not gap_N[1:].all():
        raise CodecError(OUTSIDE)
    payload[p : p + p_size] = position_N.astype(np.int32).view(np.uint8)
    payload[o : o + o_size] = _join_planes(payload[o : o + o_size], 2)


_LOCAL = threading.local()
_SEARCHES = {
    # Nearly uniform bits: a large target length makes zstandard skip ahead and leave literals uncoded.
    "stored": {"compression_level": -(1 << 17), "hash_log": 6},
    # Few bits a symbol: what a small hash table still finds by chance would cost more than Huffman codes.
    "huffman": {"compression_level": 1, "min_match": 7, "target_length": 0, "hash_log": 6, "chain_log": 6},
    # Where a token comes again, its early layers are nearly the same, and whole stretches of symbols match.
    "matches": {"compression_level": 1, "min_match": 7, "target_length": 0, "hash_log": 16, "chain_log": 6},
}
_SECTION_SEARCHES = {
    "rest": ("stored",),
    "low": ("stored",),
    "exponent": ("huffman",),
    "high": ("matches", "huffman"),
    "folded": ("matches", "huffman"),
}
"""What is tried for a section, the shortest frame being kept; every other section: "matches"."""


def _compress(section: str, data: np.ndarray) -> bytes:
    """Return the frame of a section, with size and checksum of its content. Deterministic."""
    frames = [
        _compressor(search).compress(data.data) for search in _SECTION_SEARCHES.get(section, ("matches",))
    ]
    return min(frames, key=len)


def _compressor(search: str) -> zstandard.ZstdCompressor:
    """This thread's compressor."""
    if not hasattr(_LOCAL, search):
        parameters = zstandard.ZstdCompressionParameters(
            **_SEARCHES[search], window_log=21, write_checksum=True, write_content_size=True
        )
        setattr(_LOCAL, search, zstandard.ZstdCompressor(compression_params=parameters))
    return getattr(_LOCAL, search)


def _decompress(frame: memoryview, out: np.ndarray, section: str) -> None:
    """Decode one frame that must fill `out` exactly; its checksum is verified."""
    if not hasattr(_LOCAL, "decompressor"):
        _LOCAL.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    try:
        parameters = zstandard.get_frame_parameters(frame)
        if parameters.content_size != out.nbytes or not parameters.has_checksum:
            raise CodecError(f"section {section} of a cell has another size than its header says")
        if out.nbytes == 0:
            return
        with _LOCAL.decompressor.stream_reader(frame) as reader:
            done = reader.readinto(out)
            if done != out.nbytes or reader.read(1):
                raise CodecError(f"section {section} of a cell is truncated")
    except zstandard.ZstdError as error:
        raise CodecError(f"section {section} of a cell is damaged: {error}") from error
