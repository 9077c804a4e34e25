"""From states to symbols on the host; tests/gpu/test_writer_gpu.py has what only a GPU shows."""

from __future__ import annotations

import pytest
import torch

from storage.codec import parse_codec
from storage.host_copies import encodes_without_waiting


def test_a_kernel_that_cannot_be_had_is_tried_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    encodes_without_waiting.cache_clear()
    codec, cpu = parse_codec("tolerance=0.1"), torch.device("cpu")
    assert not encodes_without_waiting(codec, 64, cpu)
    assert not encodes_without_waiting(codec, 64, cpu)
    (warning,) = caplog.messages
    assert "tolerance=0.1 goes without its kernel, and cpu is waited for once a cell: CodecError: " in warning


def test_codecs_without_a_kernel_have_nothing_to_try(caplog: pytest.LogCaptureFixture) -> None:
    absent = torch.device("cuda", 99)  # whoever tries anything there fails
    for name in ("lossless", "fp8"):
        assert encodes_without_waiting(parse_codec(name), 64, absent)
    assert not caplog.messages
