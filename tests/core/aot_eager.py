"""`torch.compile` with the backend "aot_eager": all that traces stays, and the C++ compiler, which takes
minutes, goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

compile_ = torch.compile


def aot_eager(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Stand in for `torch.compile`."""
    assert not isinstance(model, torch.nn.Module), "modules are compiled nowhere"
    kept = {name: value for name, value in options.items() if name not in ("mode", "options", "backend")}
    compiled: Callable[..., Any] = compile_(model, backend="aot_eager", **kept)
    return compiled
