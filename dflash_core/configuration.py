"""What every configuration shares: strict fields, a stable fingerprint, one error type for users."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def expand_home(path: str) -> str:
    """Return a path in which ~ is one's home; "~name" of a user whom nobody knows stays as it is."""
    return os.path.expanduser(path)  # noqa: PTH111  pathlib's raises for an unknown user


Text = Annotated[str, Field(min_length=1)]
"""A path, an address, a name: never empty, or the current folder would be meant unnoticed."""
LocalPath = Annotated[Text, AfterValidator(expand_home)]
"""A path of this machine, in which ~ is one's home."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""What random numbers begin with: torch, numpy and servers take all of these."""


class UserError(ValueError):
    """Something that the user can mend: the message says what was wrong, where, and how to mend it."""


class Config(BaseModel):
    """A frozen set of named values that refuses unknown names; docstrings of fields become descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def fingerprint(value: Any) -> str:
    """Return 64 hex digits that change when `value` does: sha256 of its canonical JSON.

    `value` is a `Config` or anything that `json.dumps` takes. Key order does not matter; NaN is refused.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
