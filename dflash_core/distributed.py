"""Ranks of a data-parallel run: who we are, and gradients summed over ranks while backward still runs."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dflash_core.configuration import UserError

About = TypeVar("About")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This rank's place among all. One rank without any process group is a world too."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this rank writes logs and checkpoints."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks in place, without waiting for the device."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors with those of rank 0."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def from_first(
        self, read: Callable[[], tuple[About, dict[str, Tensor]] | None]
    ) -> tuple[About, dict[str, Tensor]] | None:
        """Return what `read` returns on rank 0, which alone calls it: something small, and named tensors.

        Where there are several ranks, each has the tensors on its device. An error is raised on all of them.
        """
        if self.size == 1:
            return read()
        outcome: Any = None
        tensors: dict[str, Tensor] = {}
        if self.is_first:
            try:
                if found := read():
                    tensors = {name: t.to(self.device).contiguous() for name, t in found[1].items()}
                    outcome = found[0], {name: (t.shape, t.dtype) for name, t in tensors.items()}
            except UserError as error:
                outcome = error
            except Exception:  # noqa: BLE001  whatever it is, the others wait for an answer
                outcome = RuntimeError(f"on rank 0:\n{traceback.format_exc()}")
        box = [outcome]
        dist.broadcast_object_list(box, src=0, device=self.device)
        outcome = box[0]
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is None:
            return None
        about, shapes = outcome
        if not self.is_first:
            tensors = {n: torch.empty(s, dtype=d, device=self.device) for n, (s, d) in shapes.items()}
        self.broadcast(tensors.values())
        return about, tensors


def own_device() -> str:
    """Return "cuda" or "cpu": the device of this process. Raises UserError when it was given a GPU that torch
    cannot use, so that nothing falls back to the CPU unnoticed.
    """
    if torch.cuda.is_available():
        return "cuda"
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        raise UserError(
            f"this process was given GPU {named}, but torch {torch.__version__} sees none: "
            "mend driver or torch (`dflash doctor` says more), or use the CPU by name"
        )
    return "cpu"


def start_device(device: torch.device) -> None:
    """Make a GPU's context and load cuBLAS: seconds in which the interpreter is free for other threads."""
    if device.type == "cuda":
        square = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
        torch.mm(square, square)
        torch.cuda.synchronize(device)


def join_world(device: str | None = None) -> World:
    """Join the process group that torchrun's environment describes (RANK, WORLD_SIZE, LOCAL_RANK), or be
    alone.

    `device`: "cpu" or "cuda"; None takes the GPU where there is one. NCCL on GPUs, gloo on the CPU.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    kind = device or own_device()
    if kind == "cuda":
        # With torchrun --virtual-local-rank every rank sees one GPU and LOCAL_RANK is 0 everywhere.
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(where)
    else:
        where = torch.device(kind)
    if size > 1 and not dist.is_initialized():
        backend = "nccl" if where.type == "cuda" else "gloo"
        bound = where if where.type == "cuda" else None
        dist.init_process_group(
            backend, rank=rank, world_size=size, timeout=timedelta(minutes=30), device_id=bound
        )
    return World(rank=rank, size=size, device=where)


def leave_world(world: World) -> None:
    """Leave the process group, if there is one."""
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()


class GradientReducer:
    """Sums the gradients of a module over ranks, each parameter as soon as backward has finished it.

    A drafter has few and large parameters, so each is one collective without buckets or copies. Collectives
    are started in one fixed order on every rank, whatever order backward finishes in. Use: `arm()` before the
    last backward of a step, `wait()` after it; backward passes before `arm()` accumulate locally.
    """

    def __init__(self, module: nn.Module, world: World, order: Sequence[str]) -> None:
        """`order` names all parameters, those that backward finishes first in front."""
        self._world = world
        self._armed = False
        named = dict(module.named_parameters())
        if sorted(order) != sorted(named):
            raise ValueError("the order of reduction must name each parameter of the module once")
        self._parameters = [named[name] for name in order]
        self._ready = [False] * len(order)
        self._next = 0
        self._works: list[dist.Work] = []
        if world.size > 1:
            for i, parameter in enumerate(self._parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(i))

    def arm(self) -> None:
        """The next backward is the last of its step."""
        self._armed = True
        self._ready = [False] * len(self._parameters)
        self._next = 0

    def wait(self) -> None:
        """Let the following work see the sums; on GPUs the host does not wait."""
        if self._world.size == 1:
            return
        if self._next != len(self._parameters):
            raise RuntimeError("backward left parameters without a gradient; each rank must run all layers")
        for work in self._works:
            work.wait()
        self._works.clear()
        self._armed = False

    def _hook(self, index: int):  # type: ignore[no-untyped-def]
        def on_gradient(parameter: Tensor) -> None:
            if not self._armed:
                return
            self._ready[index] = True
            while self._next < len(self._ready) and self._ready[self._next]:
                grad = self._parameters[self._next].grad
                assert grad is not None
                work = dist.all_reduce(grad, async_op=True)
                assert work is not None
                self._works.append(work)
                self._next += 1

        return on_gradient


def backward_order(module: nn.Module) -> list[str]:
    """Parameter names of a drafter in the order in which backward finishes them.

    Layers from last to first; the context's projections, and the key/value weights that the context uses too,
    at the end.
    """
    names = [name for name, _ in module.named_parameters()]
    late = [n for n in names if n.startswith(("fc", "hidden_norm")) or ".k_" in n or ".v_proj" in n]
    early = [n for n in reversed(names) if n not in set(late)]
    return early + late
