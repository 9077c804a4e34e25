"""Writing shards from states on a GPU: the bytes that the CPU writes, and nothing waits for the device.

python -m pytest tests/gpu/test_writer_gpu.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash_core.records import CapturedSample
from storage.dataset import Dataset
from storage.writer import ShardWriter, WriterConfig
from tests.storage.made import capture, made_dataset, made_samples, made_spec

pytestmark = pytest.mark.gpu

CODECS = ["lossless", "fp8", "tolerance=0.01", "tolerance=0.1", "tolerance=0.3"]


def write(dataset: Dataset, device: str, *, mad: bool = False) -> list[str]:
    """Write all shards from states on `device`; return the objects' names, which carry their hashes."""
    objects = []
    for shard in dataset.missing():
        captured = []
        for i, sample in enumerate(dataset.samples(shard)):
            states = capture(sample, dataset).states
            if mad and i % 2:  # far more outliers than there is room for
                states = {column: states_TD * 1000 for column, states_TD in states.items()}
            states = {column: states_TD.to(device) for column, states_TD in states.items()}
            captured.append(CapturedSample(sample=sample, states=states))
        with ShardWriter(dataset, shard, None, WriterConfig(threads=2)) as writer:
            writer.add(*captured[:3])
            writer.add(*captured[3:])
            objects.append(writer.close().object)
    return objects


@pytest.mark.parametrize("mad", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_a_gpu_writes_the_bytes_that_a_cpu_writes(tmp_path: Path, codec: str, mad: bool) -> None:
    written = []
    for device in ("cpu", "cuda"):
        dataset = made_dataset(tmp_path / device, made_spec(codec), made_samples(40))
        written.append(write(dataset, device, mad=mad))
    assert written[0] == written[1]


@pytest.mark.parametrize("codec", CODECS)
def test_adding_a_sample_does_not_wait_for_the_device(tmp_path: Path, codec: str) -> None:
    dataset = made_dataset(tmp_path, made_spec(codec), made_samples(40))
    write(dataset, "cuda")  # memory and kernels are there now
    samples = dataset.samples(0)
    states = [
        {column: states_TD.cuda() for column, states_TD in capture(sample, dataset).states.items()}
        for sample in samples
    ]
    with ShardWriter(dataset, 0, None, replace=True) as writer:
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second
        done = torch.cuda.current_stream().record_event()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for sample, of_sample in zip(samples, states, strict=True):
                writer.add(CapturedSample(sample=sample, states=of_sample))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not done.query()
        writer.close()


def test_without_a_compiler_it_says_so_once_and_writes_the_same(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.gpu.test_writer_gpu import *\n"
        "dataset = made_dataset(Path(sys.argv[1]), made_spec('tolerance=0.1'), made_samples(40))\n"
        "print(*write(dataset, 'cuda'))"
    )
    nowhere = {"CC": "/nonexistent/cc", "PATH": "", "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "cuda")],
        env={**os.environ, **nowhere},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert child.stderr.count("goes without its kernel") == 1, child.stderr
    dataset = made_dataset(tmp_path / "cpu", made_spec("tolerance=0.1"), made_samples(40))
    assert child.stdout.split() == write(dataset, "cpu")
