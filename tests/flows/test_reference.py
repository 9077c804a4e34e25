"""The configuration reference says what the classes say."""

from __future__ import annotations

from pathlib import Path

from flows.config import ExtractConfig
from flows.reference import PAGE, page

ROOT = Path(__file__).parent.parent.parent


def test_the_page_is_that_of_the_classes() -> None:
    assert (ROOT / PAGE).read_text() == page(), "run: python -m flows.reference"


def test_every_field_has_a_place() -> None:
    text = page()
    for name in ExtractConfig.model_fields:
        assert f"| `{name}` |" in text
    assert "| `block_size` | int | **required** |" in text
    assert '| `batching` | "auto"' in text
