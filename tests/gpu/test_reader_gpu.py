"""Codecs and reader on a GPU: the same bits as on the CPU, no waiting, no row overwritten while it is used.

python -m pytest tests/gpu/test_reader_gpu.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_core.packing import plan_epoch
from storage.calibration import Calibration
from storage.codec import Codec, parse_codec
from storage.dataset import Dataset
from storage.reader import ReaderConfig, RowReader
from storage.symbols import Symbols
from tests.storage.made import made_dataset, made_samples, made_spec, write_missing
from tests.storage.test_codec import NAMES, realistic_states

pytestmark = pytest.mark.gpu


def test_scales_do_not_depend_on_the_device() -> None:
    states_TD = realistic_states(3000, 64)
    found = []
    for device in ("cpu", "cuda"):
        calibration = Calibration()
        calibration.add({"x": states_TD.to(device)})
        found.append(calibration.scales()["x"])
    assert torch.equal(*found)


@pytest.mark.parametrize("name", NAMES)
def test_cells_and_states_are_the_same_bits_on_both_devices(name: str) -> None:
    codec = parse_codec(name)
    for tokens, width in ((1, 7), (300, 65), (1000, 512)):
        states_TD = realistic_states(tokens, width)
        states_TD[tokens // 2, 1] = torch.nan
        scale_D = torch.rand(width) + 0.5
        cell = codec.to_bytes(codec.encode_on_device(states_TD, scale_D))
        on_gpu = codec.encode_on_device(states_TD.cuda(), scale_D.cuda())
        assert codec.to_bytes(on_gpu.to("cpu")) == cell
        decoded = [torch.empty_like(states_TD), torch.empty_like(states_TD, device="cuda")]
        codec.decode_on_device(codec.from_bytes(cell), scale_D, decoded[0])
        codec.decode_on_device(codec.from_bytes(cell).to("cuda"), scale_D.cuda(), decoded[1])
        on_cpu, back = decoded[0], decoded[1].cpu()
        nan = torch.isnan(on_cpu)  # fp8 does not keep which NaN it was, and each device makes its own of it
        assert torch.equal(nan, torch.isnan(back))
        assert torch.equal(on_cpu.view(torch.int16)[~nan], back.view(torch.int16)[~nan])
        if name != "fp8":
            assert torch.equal(on_cpu.view(torch.int16), back.view(torch.int16))


def encoded_at_once(codec: Codec, states_TD: torch.Tensor, scale_D: torch.Tensor, room: int) -> Symbols:
    """On the host; without waiting, where the codec has a kernel."""
    if not codec.has_kernel:
        return codec.encode_on_device(states_TD, scale_D).to("cpu")
    (symbols,) = codec.encode_at_once([(states_TD, scale_D)], [room]).map(lambda tensor: tensor.cpu())
    assert isinstance(symbols, Symbols)
    return symbols


@pytest.mark.parametrize("name", ["tolerance=0.01", "tolerance=0.1", "tolerance=0.3"])
@pytest.mark.parametrize("width", [33, 512])
def test_many_cells_at_once_are_those_of_one_at_a_time(name: str, width: int) -> None:
    codec = parse_codec(name)
    scales = [torch.rand(width, device="cuda") + 0.5 for _ in range(2)]
    cells = []
    for i, tokens in enumerate((1, 40, 16, 17, 1000, 3, 300)):
        states_TD = realistic_states(tokens, width)
        if i % 3:
            states_TD[tokens // 2, 6], states_TD[-1, -1] = torch.inf, torch.nan
        cells.append((torch.cat([states_TD, states_TD]).cuda()[tokens:], scales[i % 2]))
    alone = [codec.encode_on_device(*states).to("cpu") for states in cells]
    rooms = [symbols.header.outliers + 7 * (i % 2) for i, symbols in enumerate(alone)]
    batch = codec.encode_at_once(cells, rooms).map(lambda tensor: tensor.cpu())
    assert len(batch) == len(alone)
    for exact, rough in zip(alone, batch, strict=True):
        settled = rough.settled()
        assert settled is not None and codec.to_bytes(settled) == codec.to_bytes(exact)
        assert settled.error.relative_error == pytest.approx(exact.error.relative_error, rel=1e-5)
        assert settled.error.scaled_values == exact.error.scaled_values


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 7), (300, 33), (1000, 512), (17, 5120)])
def test_room_for_outliers_instead_of_waiting_gives_the_same_cell(name: str, tokens: int, width: int) -> None:
    codec = parse_codec(name)
    states_TD, scale_D = realistic_states(tokens, width), torch.rand(width) + 0.5
    states_TD[0, 5], states_TD[tokens // 2, 6], states_TD[-1, -1] = torch.nan, torch.inf, -torch.inf
    exact = codec.encode_on_device(states_TD, scale_D)
    states_TD, scale_D = states_TD.cuda(), scale_D.cuda()
    for room in (exact.header.outliers, exact.header.outliers + 1, exact.header.outliers + 1000):
        rough = encoded_at_once(codec, states_TD, scale_D, room)
        settled = rough.settled()
        assert settled is not None and settled.header == exact.header
        assert codec.to_bytes(settled) == codec.to_bytes(exact)
        assert settled.error.relative_error == pytest.approx(exact.error.relative_error, rel=1e-5)
        assert settled.error.energy_error == pytest.approx(exact.error.energy_error, rel=1e-5)
        assert settled.error.scaled_values == exact.error.scaled_values
    if codec.needs_scales:
        for room in (0, 2):
            assert encoded_at_once(codec, states_TD, scale_D, room).settled() is None
    states_TD = torch.randn(tokens, width, device="cuda").bfloat16()  # without an outlier, nor room for one
    scale_D = torch.ones(width, device="cuda")
    settled = encoded_at_once(codec, states_TD, scale_D, 0).settled()
    assert settled is not None and settled.header.outliers == 0
    assert codec.to_bytes(settled) == codec.to_bytes(codec.encode_on_device(states_TD, scale_D).to("cpu"))


@pytest.mark.parametrize("name", NAMES)
def test_decoding_does_not_wait_for_the_device(name: str) -> None:
    codec, states_TD = parse_codec(name), realistic_states(100, 64)
    symbols = codec.encode_on_device(states_TD, torch.ones(64)).to("cuda")
    scale_D, out_TD = torch.ones(64, device="cuda"), torch.empty_like(states_TD, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        codec.decode_on_device(symbols, scale_D, out_TD)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("codec", ["lossless", "fp8", "tolerance=0.01", "tolerance=0.1", "tolerance=0.3"])
def test_rows_are_those_of_the_cpu_however_late_they_are_used(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer is slow now and then, and changes its stream; rows are decoded in several blocks."""
    monkeypatch.setattr("storage.rows.DEVICE_BLOCK", 1000)
    dataset = made_dataset(tmp_path, made_spec(codec), made_samples(60))
    write_missing(dataset)
    rows = planned_rows(dataset, epochs=3)
    rows.insert(5, None)
    config = ReaderConfig(threads=3, prefetch_bytes=50_000)
    with RowReader(dataset, dataset.columns, rows, row_tokens=64, device="cpu", config=config) as reader:
        expected = [states_CE.clone() for _, states_CE in reader]
    found = []
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    with RowReader(dataset, dataset.columns, rows, row_tokens=64, device="cuda", config=config) as reader:
        for i in range(len(rows)):
            stream = streams[i // 4 % 2]
            stream.wait_stream(streams[1 - i // 4 % 2])  # the last row is used before the next is asked for
            with torch.cuda.stream(stream):
                _, states_CE = next(reader)
                if i % 3 == 0:
                    torch.cuda._sleep(20_000_000)
                found.append(states_CE.clone())
        assert next(reader, None) is None
    torch.cuda.synchronize()
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a.view(torch.int16), b.cpu().view(torch.int16))


@pytest.mark.parametrize("codec", ["lossless", "tolerance=0.1", "tolerance=0.3"])
def test_reading_neither_waits_for_the_device_nor_allocates_its_memory(tmp_path: Path, codec: str) -> None:
    dataset = made_dataset(tmp_path, made_spec(codec), made_samples(60))
    write_missing(dataset)
    rows = planned_rows(dataset, epochs=5)
    with RowReader(dataset, dataset.columns, rows, row_tokens=64, device="cuda") as reader:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(4):
                next(reader)
            before = torch.cuda.memory_stats()["num_device_alloc"]
            for _ in range(len(rows) - 4):
                next(reader)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert next(reader, None) is None
        assert torch.cuda.memory_stats()["num_device_alloc"] == before


def planned_rows(dataset: Dataset, epochs: int) -> list[np.ndarray | None]:
    lengths = dataset.index.tokens_N
    return [row for i in range(epochs) for row in plan_epoch(lengths, seed=0, epoch=i, row_tokens=64)]
