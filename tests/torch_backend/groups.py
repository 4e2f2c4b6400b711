"""Process groups of forked workers: the backend under test, and Gloo beside it to compare with."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import lockstep.torch_backend.group  # noqa: F401 - loaded once, not by each forked worker

# DDP may hold the last reference to its group, and lets go of it with the interpreter's lock held. Gloo's threads are
# then joined while one of them may wait for that lock. A forked worker ends without destructors, so it keeps the group.
_kept: list[Any] = []


@dataclass(frozen=True)
class Joined:
    rank: int
    size: int


def open_store() -> dist.Store:
    rank, size = place()
    listen: dict[str, Any] = {"master_listen_fd": int(os.environ["LOCKSTEP_LISTEN_FD"])} if rank == 0 else {}
    return dist.TCPStore(
        "127.0.0.1",
        int(os.environ["MASTER_PORT"]),
        size,
        rank == 0,
        timedelta(seconds=20),
        wait_for_workers=False,
        multi_tenant=False,
        **listen,
    )


def place() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@contextmanager
def joined(backend: str = "lockstep", timeout_s: float = 20.0) -> Iterator[Joined]:
    """The default group, made and destroyed."""
    rank, size = place()
    dist.init_process_group(
        backend, store=open_store(), rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    if backend == "gloo":
        _kept.append(dist.group.WORLD)
    try:
        yield Joined(rank, size)
    finally:
        dist.destroy_process_group()
