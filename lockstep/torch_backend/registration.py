"""Makes a group for torch.distributed: in shared memory on one host, by Gloo between hosts."""

from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from lockstep.torch_backend.group import SharedMemoryGroup
from lockstep.torch_backend.members import open_members
from lockstep.wire.network.hosts import Hosts, find_hosts
from lockstep.wire.shared import semaphores


def open_group(asked: Any, options: Any) -> Any:
    """Collective. What torch calls for `init_process_group("lockstep")` and `new_group`."""
    rank, size = asked.group_rank, asked.group_size
    store = _fresh(asked.store, rank)
    hosts = find_hosts(rank, size, store)
    global_ranks = asked.global_ranks_in_group or list(range(size))  # empty for the default group
    return open_among(hosts, rank, global_ranks, store, asked.timeout)


def open_among(hosts: Hosts, rank: int, global_ranks: list[int], store: Store, timeout: timedelta) -> Any:
    """Collective. A process group in shared memory if there is one host, else a Gloo backend."""
    if len(hosts) > 1 or not semaphores.available:
        return _gloo(rank, len(global_ranks), store, timeout, ProcessGroupGloo.create_default_device())
    members = open_members(rank, len(global_ranks), global_ranks, store, timeout.total_seconds())
    loopback = ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)
    return SharedMemoryGroup(members, _gloo(rank, len(global_ranks), store, timeout, loopback), store)


def _gloo(rank: int, size: int, store: Store, timeout: timedelta, device: object) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [device]
    return ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)


def _fresh(store: Store, rank: int) -> Store:
    """A part of the store that no earlier group of the same name has written to: torchrun keeps one for all of them."""
    return PrefixStore(f"lockstep/{store.add(f'lockstep/opened/{rank}', 1)}", store)
