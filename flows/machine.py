"""What a configuration asks of this machine, a device or a folder to write to: refused before work begins."""

from __future__ import annotations

from pathlib import Path

import torch

from dflash_core.configuration import UserError, expand_home
from dflash_core.distributed import own_device


def named_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is the first GPU, or the CPU. Raises UserError."""
    if name == "auto":
        return torch.device(own_device())
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    here = ["cpu", "cuda", *gpus] if gpus else ["cpu"]
    if name not in here:
        raise UserError(f"device {name!r} is not here: name {', '.join(here)} or auto")
    return torch.device(name)


def made_folder(output: str | Path) -> Path:
    """Return the folder, made where it is not there yet. Raises UserError."""
    folder = Path(expand_home(str(output)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output {output} cannot be made: {error.strerror}; name another folder") from None
    return folder
