"""What the first rank reads reaches the others, which read nothing; so do its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_core.configuration import UserError
from dflash_core.distributed import World
from tests.spawned_ranks import results_of_ranks

READ = {
    "weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "step": torch.tensor(7.0),
    "random": torch.arange(5, dtype=torch.uint8),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
}


def _read(case: str) -> tuple[str, dict[str, torch.Tensor]] | None:
    if case == "user":
        raise UserError("of another configuration: lr: 1 -> 2")
    if case == "other":
        raise OSError("no room")
    if case == "nowhere":  # cannot be brought to the device
        return "step 7", {"weight": torch.empty(3, device="meta")}
    return ("step 7", READ) if case == "found" else None


def _rank(rank: int, size: int, port: int, results: Any, case: str) -> None:
    import torch.distributed as dist

    def read_by_others() -> None:
        raise AssertionError("only the first rank reads")

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    world = World(rank=rank, size=size, device=torch.device("cpu"))
    try:
        found = world.from_first(read_by_others if rank else lambda: _read(case))
        outcome: Any = found and (found[0], {name: tensor.numpy() for name, tensor in found[1].items()})
    except (UserError, RuntimeError) as error:
        outcome = f"{type(error).__name__}: {error}"
    results.put(outcome)
    dist.barrier()
    dist.destroy_process_group()


def test_all_ranks_have_what_the_first_one_read() -> None:
    for about, tensors in results_of_ranks(_rank, 2, "found"):
        assert about == "step 7" and tensors.keys() == READ.keys()
        for name, array in tensors.items():
            torch.testing.assert_close(torch.from_numpy(array), READ[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("none", None),
        ("user", "UserError: of another configuration: lr: 1 -> 2"),
        ("other", 'raise OSError("no room")\nOSError: no room'),
        ("nowhere", "NotImplementedError"),
    ],
)
def test_all_ranks_hear_of_the_rest(case: str, expected: str | None) -> None:
    for outcome in results_of_ranks(_rank, 2, case):
        assert outcome is None if expected is None else expected in outcome
