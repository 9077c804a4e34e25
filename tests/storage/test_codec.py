"""Codecs: exact where promised, within the named error elsewhere, readable from docs/codec.md alone."""

import dataclasses
import math
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard

from dflash_core.configuration import UserError
from storage.calibration import Calibration
from storage.cell import open_cell
from storage.codec import Codec, CodecError, cpu_kernels, parse_codec
from storage.symbols import ErrorSums, Symbols, SymbolsBatch

NAMES = ["lossless", "fp8", "tolerance=0.005", "tolerance=0.01", "tolerance=0.026", "tolerance=0.1"] + [
    "tolerance=0.2",
    "tolerance=0.5",
]


@pytest.fixture(params=["one pass", "torch"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode with the kernels of numba, and as where it is not installed."""
    if request.param == "torch":
        monkeypatch.setattr("storage.codec.cpu_kernels", lambda: None)
    else:
        pytest.importorskip("numba")
        assert cpu_kernels() is not None


def realistic_states(tokens: int, width: int, seed: int = 0) -> torch.Tensor:
    """bf16 [T, D] with a massive channel and a massive token, as real hidden states have."""
    generator = torch.Generator().manual_seed(seed)
    loudness_D = torch.exp(torch.randn(width, generator=generator))
    states_TD = torch.randn(tokens, width, generator=generator) * loudness_D
    states_TD[:, 3] *= 500
    states_TD[0] *= 300
    return states_TD.bfloat16()


def scales_of(states_TD: torch.Tensor) -> torch.Tensor:
    calibration = Calibration()
    calibration.add({"x": states_TD})
    return calibration.scales()["x"]


def round_trip(codec: Codec, states_TD: torch.Tensor, scale_D: torch.Tensor | None) -> torch.Tensor:
    cell = codec.to_bytes(codec.encode_on_device(states_TD, scale_D))
    decoded_TD = torch.empty_like(states_TD)
    codec.decode_on_device(codec.from_bytes(cell), scale_D, decoded_TD)
    return decoded_TD


def decode_by_the_specification(cell: bytes, scale_D: np.ndarray) -> np.ndarray:
    """Decode a cell from docs/codec.md with numpy, struct and zstandard only; bf16 bits as uint16 [T, D]."""
    magic, kind, layout, count, zero, tokens, width, outliers, step = struct.unpack("<4s4B3If", cell[:24])
    assert magic == b"DFC1" and zero == 0
    table = [struct.unpack_from("<II", cell, 24 + 8 * i) for i in range(count)]
    at = 24 + 8 * count
    assert struct.unpack_from("<I", cell, at)[0] == zlib.crc32(cell[:at])
    at += 4
    sections = []
    for raw, stored in table:
        sections.append(zstandard.decompress(cell[at : at + stored]))
        assert len(sections[-1]) == raw
        at += stored
    assert at == len(cell)
    if kind == 0:
        base, exponent, rest = (np.frombuffer(s, np.uint8).astype(np.uint16) for s in sections)
        exponent = (exponent.reshape(tokens, width) + base) % 256
        rest = rest.reshape(tokens, width)
        return (rest % 2) * 0x8000 + exponent * 0x80 + rest // 2
    if kind == 1:
        scale_T = np.frombuffer(sections[0], "<f4")
        value = torch.tensor(np.frombuffer(sections[1], np.uint8)).view(torch.float8_e4m3fn).float().numpy()
        return bf16_bits(value.reshape(tokens, width) * scale_T[:, None])
    half = (width + 1) // 2
    if layout == 0:
        symbol = np.frombuffer(sections[0], np.int8).reshape(tokens, width).astype(int)
    else:
        folded = np.frombuffer(sections[layout - 1], np.uint8).reshape(tokens, half).astype(int)
        symbol = np.concatenate([folded // 16, folded % 16], axis=1)[:, :width]
        if layout == 1:
            symbol = np.where(symbol > 7, symbol - 16, symbol)
        else:
            symbol += 16 * np.frombuffer(sections[0], np.int8).reshape(tokens, width).astype(int)
    bits = bf16_bits(symbol.astype(np.float32) * (scale_D * np.float32(step)))
    gap = np.frombuffer(sections[-2], np.uint8).reshape(4, outliers).astype(np.int64)
    position = np.cumsum(gap[0] + gap[1] * 2**8 + gap[2] * 2**16 + gap[3] * 2**24)
    value = np.frombuffer(sections[-1], np.uint8).reshape(2, outliers).astype(np.uint16)
    bits.reshape(-1)[position] = value[0] + value[1] * 256
    return bits


def bf16_bits(value: np.ndarray) -> np.ndarray:
    """Round float32 to bf16, ties to even; uint16."""
    bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@pytest.mark.usefixtures("arithmetic")
def test_lossless_keeps_every_bit_pattern() -> None:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    shuffled = patterns[torch.randperm(65536, generator=torch.Generator().manual_seed(1))]
    for bits in (patterns, shuffled):
        states_TD = bits.view(torch.bfloat16).view(1024, 64)
        decoded_TD = round_trip(parse_codec("lossless"), states_TD, None)
        assert torch.equal(decoded_TD.view(torch.int16), states_TD.view(torch.int16))


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (1, 7), (3, 64), (130, 33)])
def test_a_decoder_written_from_the_specification_gets_the_same_bits(
    name: str, shape: tuple[int, int]
) -> None:
    states_TD = realistic_states(max(shape[0], 1), max(shape[1], 4))[: shape[0], : shape[1]].contiguous()
    scale_D = scales_of(realistic_states(500, max(shape[1], 4))[:, : shape[1]].contiguous())
    codec = parse_codec(name)
    cell = codec.to_bytes(codec.encode_on_device(states_TD, scale_D))
    decoded_TD = torch.empty_like(states_TD)
    codec.decode_on_device(codec.from_bytes(cell), scale_D, decoded_TD)
    expected_TD = decode_by_the_specification(cell, scale_D.numpy())
    assert np.array_equal(decoded_TD.view(torch.int16).numpy().view(np.uint16), expected_TD)
    header = open_cell(cell).header
    assert (header.tokens, header.width) == shape


@pytest.mark.parametrize("tolerance", [0.005, 0.01, 0.026, 0.1, 0.15, 0.2, 0.3, 0.5])
def test_the_error_is_the_named_one(tolerance: float) -> None:
    states_TD = realistic_states(2000, 64)
    scale_D = scales_of(states_TD)
    codec = parse_codec(f"tolerance={tolerance}")
    symbols = codec.encode_on_device(states_TD, scale_D)
    decoded_TD = torch.empty_like(states_TD)
    codec.decode_on_device(codec.from_bytes(codec.to_bytes(symbols)), scale_D, decoded_TD)
    difference_TD = (decoded_TD.double() - states_TD.double()) / scale_D.double()
    assert symbols.error.relative_error == pytest.approx(
        difference_TD.square().mean().sqrt().item(), rel=1e-5
    )
    assert symbols.error.relative_error == pytest.approx(tolerance, rel=0.05)
    worst_D = difference_TD.square().mean(0).sqrt()
    assert worst_D.max() < 1.2 * tolerance, "a massive channel or token must not hurt the others"


def test_massive_tokens_and_channels_do_not_set_the_scale() -> None:
    states_TD = realistic_states(4000, 64)
    ordinary_D = states_TD[1:].double().square().mean(0).sqrt()
    assert torch.allclose(scales_of(states_TD).double(), ordinary_D, rtol=0.02)


def test_scales_do_not_depend_on_batches_or_order() -> None:
    states_TD = realistic_states(3000, 16)
    expected_D = scales_of(states_TD)
    calibration = Calibration()
    for part_TD in reversed(states_TD.split([1, 999, 700, 1300])):
        calibration.add({"x": part_TD})
    assert torch.equal(calibration.scales()["x"], expected_D)


def test_scales_of_silent_and_sparse_channels_are_usable() -> None:
    states_TD = torch.zeros(100, 3, dtype=torch.bfloat16)
    states_TD[::10, 1] = 4.0
    states_TD[:, 2] = torch.inf
    scale_D = scales_of(states_TD)
    assert scale_D.isfinite().all() and (scale_D > 0).all()
    decoded_TD = round_trip(parse_codec("tolerance=0.1"), states_TD, scale_D)
    assert torch.allclose(decoded_TD.float(), states_TD.float(), rtol=0.2)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("name", ["tolerance=0.005", "tolerance=0.1", "tolerance=0.3"])
def test_outliers_and_what_is_not_finite_come_back_exactly(name: str) -> None:
    states_TD = torch.zeros(8, 6, dtype=torch.bfloat16)
    bits_TD = states_TD.view(torch.int16)
    bits_TD[0, 0], bits_TD[3, 5], bits_TD[7, 5] = 0x7FC1, 0x7F80, -128  # a NaN's payload, inf, -inf
    states_TD[4, 2] = 3.0e38
    decoded_TD = round_trip(parse_codec(name), states_TD, torch.ones(6))
    assert torch.equal(decoded_TD.view(torch.int16), bits_TD)


def test_fp8_is_what_torch_makes_of_a_scaled_token() -> None:
    states_TD = realistic_states(50, 32)
    decoded_TD = round_trip(parse_codec("fp8"), states_TD, None)
    scale_T = states_TD.float().abs().amax(1, keepdim=True) / 448
    expected_TD = ((states_TD.float() / scale_T).to(torch.float8_e4m3fn).float() * scale_T).bfloat16()
    assert torch.equal(decoded_TD, expected_TD)


@pytest.mark.usefixtures("arithmetic")
def test_decoding_writes_into_a_strided_view_and_nowhere_else() -> None:
    states_TD = realistic_states(20, 16)
    scale_D = scales_of(states_TD)
    for name in NAMES:
        codec = parse_codec(name)
        row_CLD = torch.full((30, 48), 7.0, dtype=torch.bfloat16)
        cell = codec.to_bytes(codec.encode_on_device(states_TD, scale_D))
        codec.decode_on_device(codec.from_bytes(cell), scale_D, row_CLD[5:25, 16:32])
        assert torch.equal(row_CLD[5:25, 16:32], round_trip(codec, states_TD, scale_D))
        row_CLD[5:25, 16:32] = 7.0
        assert (row_CLD == 7.0).all()
        transposed_DT = torch.empty(16, 20, dtype=torch.bfloat16)
        codec.decode_on_device(codec.from_bytes(cell), scale_D, transposed_DT.T)
        assert torch.equal(transposed_DT.T, round_trip(codec, states_TD, scale_D))


def test_cells_are_decoded_into_a_given_buffer() -> None:
    codec = parse_codec("tolerance=0.1")
    cell = codec.to_bytes(codec.encode_on_device(realistic_states(20, 16), torch.ones(16)))
    buffer = torch.empty(open_cell(cell).header.payload_bytes + 100, dtype=torch.uint8)
    symbols = codec.from_bytes(memoryview(cell), out=buffer)
    assert symbols.payload.data_ptr() == buffer.data_ptr()
    with pytest.raises(CodecError, match="buffer"):
        codec.from_bytes(cell, out=buffer[:50])


@pytest.mark.parametrize("name", ["lossless", "fp8", "tolerance=0.01", "tolerance=0.1", "tolerance=0.3"])
def test_a_damaged_cell_is_one_clear_error(name: str) -> None:
    states_TD = realistic_states(12, 8)
    scale_D = scales_of(realistic_states(500, 8))
    codec = parse_codec(name)
    cell = codec.to_bytes(codec.encode_on_device(states_TD, scale_D))
    damaged = [cell[:length] for length in range(len(cell))] + [cell + b"\0"]
    for at in range(len(cell)):
        for bit in (0, 3, 7):
            damaged.append(cell[:at] + bytes([cell[at] ^ (1 << bit)]) + cell[at + 1 :])
    whole = codec.from_bytes(cell).payload
    silent = 0
    for data in damaged:
        try:
            decoded = codec.from_bytes(data)
        except CodecError:
            continue
        # zstandard has a few bits that mean nothing; then the content must be untouched.
        assert torch.equal(decoded.payload, whole)
        silent += 1
    assert silent < len(damaged) / 50


def test_random_bytes_are_refused() -> None:
    random = np.random.default_rng(0)
    for length in (0, 3, 4, 24, 60, 500):
        with pytest.raises(CodecError):
            open_cell(random.bytes(length))
        with pytest.raises(CodecError):
            parse_codec("lossless").from_bytes(b"DFC1" + random.bytes(length))


def test_mistakes_are_named() -> None:
    for name in (
        "",
        "zip",
        "tolerance",
        "tolerance=",
        "tolerance=x",
        "tolerance=2",
        "tolerance=nan",
        "fp8=1",
    ):
        with pytest.raises(UserError, match="does not exist"):
            parse_codec(name)
    codec = parse_codec("tolerance=0.1")
    states_TD = realistic_states(4, 4)
    with pytest.raises(CodecError, match="bfloat16"):
        codec.encode_on_device(states_TD.float(), torch.ones(4))
    with pytest.raises(CodecError, match="scales"):
        codec.encode_on_device(states_TD)
    with pytest.raises(CodecError, match="scales"):
        codec.encode_on_device(states_TD, torch.ones(5))
    with pytest.raises(CodecError, match="states on a GPU, and these are on cpu"):
        codec.encode_at_once([(states_TD, torch.ones(4))], [16])
    symbols = codec.encode_on_device(states_TD, torch.ones(4))
    with pytest.raises(CodecError, match="does not fit"):
        codec.decode_on_device(symbols, torch.ones(4), torch.empty(4, 5, dtype=torch.bfloat16))
    with pytest.raises(CodecError, match="cannot read"):
        parse_codec("fp8").from_bytes(codec.to_bytes(symbols))


def test_encoding_is_deterministic_and_independent_of_memory_layout() -> None:
    states_TD = realistic_states(40, 16)
    codec = parse_codec("tolerance=0.1")
    wide_TD = torch.cat([states_TD, states_TD], dim=1)
    first = codec.to_bytes(codec.encode_on_device(states_TD, torch.ones(16)))
    assert first == codec.to_bytes(codec.encode_on_device(wide_TD[:, 16:], torch.ones(16)))


@pytest.mark.parametrize("name", ["tolerance=0.01", "tolerance=0.1", "tolerance=0.3"])
def test_outliers_in_any_order_and_too_much_room_settle_to_the_same_cell(name: str) -> None:
    codec = parse_codec(name)
    states_TD, scale_D = realistic_states(300, 33), torch.ones(33)
    states_TD[7, 5], states_TD[150, 6], states_TD[299, 32] = torch.nan, torch.inf, -torch.inf
    exact = codec.encode_on_device(states_TD, scale_D)
    found = exact.header.outliers
    order_N = torch.randperm(found, generator=torch.Generator().manual_seed(3))
    for room in (found, found + 1, found + 1000):
        header = dataclasses.replace(exact.header, outliers=room)
        payload = torch.full((header.payload_bytes,), 255, dtype=torch.uint8)
        rough = Symbols(header=header, payload=payload, sums=exact.sums, outlier_count=torch.tensor([found]))
        for array in exact.header.offsets:
            values = exact.array(array)
            listed = array in ("position", "outlier")
            rough.array(array)[: len(values)] = values[order_N] if listed else values
        settled = rough.settled()
        assert settled is not None and settled.header == exact.header
        assert codec.to_bytes(settled) == codec.to_bytes(exact)
        assert dataclasses.replace(rough, outlier_count=torch.tensor([room + 1])).settled() is None


def test_cells_of_a_batch_are_views_of_one_payload() -> None:
    codec, scale_D = parse_codec("tolerance=0.1"), torch.ones(33)
    exact = [codec.encode_on_device(realistic_states(tokens, 33), scale_D) for tokens in (3, 70, 1)]
    sizes = [-(-len(symbols.payload) // 16) * 16 for symbols in exact]
    starts = [0, sizes[0], sizes[0] + sizes[1]]
    payload = torch.full((sum(sizes),), 255, dtype=torch.uint8)
    for symbols, start in zip(exact, starts, strict=True):
        payload[start : start + len(symbols.payload)] = symbols.payload
    halves = torch.stack(
        [symbols.sums / 2 for symbols in exact for _ in range(2) if symbols.sums is not None]
    )
    batch = SymbolsBatch(
        headers=tuple(symbols.header for symbols in exact),
        payload=payload,
        starts=tuple(starts),
        sums_P4=halves,
        first_sums=[0, 2, 4, 6],
        outlier_counts=torch.tensor([symbols.header.outliers for symbols in exact]),
    )
    assert len(batch) == 3
    for cells in (list(batch), [batch[i] for i in (-3, -2, -1)], list(batch.map(torch.clone))):
        for found, expected in zip(cells, exact, strict=True):
            settled = found.settled()
            assert codec.to_bytes(settled) == codec.to_bytes(expected)
            assert settled.error == expected.error
    with pytest.raises(IndexError):
        batch[3]


def test_coded_size_is_close_to_the_entropy_of_the_symbols() -> None:
    states_TD = torch.randn(4000, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    for tolerance in (0.01, 0.026, 0.1, 0.2, 0.3, 0.5):
        codec = parse_codec(f"tolerance={tolerance}")
        cell = codec.to_bytes(codec.encode_on_device(states_TD, torch.ones(256)))
        symbols = (states_TD.float() / (tolerance * math.sqrt(12))).round().flatten().to(torch.int64)
        share = torch.bincount(symbols - symbols.min()).double() / symbols.numel()
        entropy = -(share[share > 0] * share[share > 0].log2()).sum().item()
        assert 8 * len(cell) / states_TD.numel() < 1.05 * entropy, tolerance


def test_error_sums_add_up() -> None:
    total = ErrorSums(squared_error=1.0, squared_value=100.0, scaled_squared_error=2.0, scaled_values=8.0)
    total += ErrorSums()
    assert total.energy_error == pytest.approx(0.1) and total.relative_error == pytest.approx(0.5)
    assert ErrorSums().relative_error == 0.0


def test_what_does_not_fit_is_refused_before_a_kernel_writes() -> None:
    codec = parse_codec("tolerance=0.1")
    symbols_TD = torch.ones(1000, 16, dtype=torch.int8)
    row_CD = torch.full((1000, 16), 7.0, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        codec.decode_arrays({"symbol": symbols_TD}, torch.ones(17), row_CD)
    assert (row_CD == 7.0).all()
    codec.decode_arrays({"symbol": symbols_TD}, torch.ones(1, 16), row_CD)
    assert (row_CD == 1.0).all()


def test_a_header_that_no_codec_writes_is_refused() -> None:
    codec = parse_codec("lossless")
    cell = bytearray(codec.to_bytes(codec.encode_on_device(realistic_states(4, 8))))
    fixed = 24 + 8 * cell[6]
    struct.pack_into("<I", cell, 16, 1)  # an outlier
    struct.pack_into("<I", cell, fixed, zlib.crc32(cell[:fixed]))
    with pytest.raises(CodecError, match="contradicts itself"):
        codec.from_bytes(bytes(cell))


def test_a_damaged_cache_of_numba_costs_speed_alone(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    script = "from storage.codec import cpu_kernels; print(cpu_kernels())"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def start() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    assert "quantise_cpu" in start().stdout
    kept = list(tmp_path.rglob("*.nb?"))
    assert kept
    for path in kept:
        path.write_bytes(b"")
    damaged = start()
    assert damaged.stdout == "None\n" and "NUMBA_CACHE_DIR" in damaged.stderr
