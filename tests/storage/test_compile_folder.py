"""Where compile caches lie, and what goes of the folders that no run uses any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_core.configuration import UserError
from storage.compile_session import CompileCacheConfig, open_compile_store


@pytest.mark.parametrize("dataset_uri", ["s3://bucket", "file:///dataset"])
def test_nothing_lies_beside_a_data_set_at_the_root(dataset_uri: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no folder above it: set cache\.uri"):
        open_compile_store(CompileCacheConfig(), dataset_uri)
    elsewhere = CompileCacheConfig(uri=str(tmp_path / "elsewhere"))
    assert open_compile_store(elsewhere, dataset_uri).uri == f"file://{tmp_path}/elsewhere"
    beside = open_compile_store(CompileCacheConfig(), f"file://{tmp_path}/dataset")
    assert beside.uri == f"file://{tmp_path}/compile-cache"
