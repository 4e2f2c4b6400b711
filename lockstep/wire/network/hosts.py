"""Which workers can share memory: those that reach each other by Unix sockets, on one machine and network namespace."""

import os
import socket
from contextlib import suppress
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of the workers on each host; hosts in the order of their lowest rank."""


def find_hosts(rank: int, size: int, store: Store) -> Hosts:
    """Collective. Every worker tells in the store where it is."""
    store.set(f"host/{rank}", _here())
    return group([bytes(store.get(f"host/{peer}")).decode() for peer in range(size)])


def group(places: list[str]) -> Hosts:
    """Ranks with the same place, together."""
    found: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault(place, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def _here() -> str:
    """A name that only processes on this machine, since this boot, in this network namespace have."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return " ".join(parts)
