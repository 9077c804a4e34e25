"""Machines on one machine: network namespaces that a bridge joins to this one."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ADDRESS = "198.51.100."
"""Of a range that is kept for examples."""


@dataclass(frozen=True)
class Network:
    """Where servers listen, and how to be on each machine."""

    host: str
    """Address that all machines reach."""
    machines: dict[str, list[str]]
    """Name -> the words before a command that run it on that machine."""
    refusal: str = ""
    """Why the machines share this one's network after all; empty when they do not."""


@contextlib.contextmanager
def network_of(names: Sequence[str]) -> Iterator[Network]:
    """Give each machine a network of its own that reaches nothing but the host, where the kernel lets us."""
    with contextlib.ExitStack() as stack:
        try:
            machines = _build(names, stack)
        except (OSError, subprocess.CalledProcessError) as error:
            stack.close()
            words = getattr(error, "stderr", None) or str(error)
            yield Network("127.0.0.1", {name: [] for name in names}, words.strip())
        else:
            yield Network(f"{ADDRESS}1", machines)


def _build(names: Sequence[str], stack: contextlib.ExitStack) -> dict[str, list[str]]:
    pid, machines = os.getpid(), {}
    bridge = f"dfl{pid}"
    _ip("link", "add", bridge, "type", "bridge")
    stack.callback(_ip, "link", "delete", bridge)
    _ip("address", "add", f"{ADDRESS}1/24", "dev", bridge)
    _ip("link", "set", bridge, "up")
    for number, name in enumerate(names, start=2):
        space, here = f"dflash-{pid}-{name}", f"dfl{pid}-{number}"
        _ip("netns", "add", space)
        stack.callback(_ip, "netns", "delete", space)
        _ip("link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", here, "master", bridge, "up")
        _ip("-netns", space, "address", "add", f"{ADDRESS}{number}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-netns", space, "link", "set", device, "up")
        machines[name] = ["nsenter", f"--net=/run/netns/{space}"]
        subprocess.run([*machines[name], "true"], check=True, capture_output=True, text=True)
    return machines


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
