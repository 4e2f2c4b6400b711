"""Which workers can share memory, and which sums the workers of one host can add.

Workers share memory if they reach each other by Unix sockets: on one machine, in one network namespace.
"""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.errors import BadArgument
from lockstep.lanes import Branch, Reduction, Root, Tree, leaves
from lockstep.wire.transport import Hosts


def find_hosts(rank: int, size: int, store: Store) -> Hosts:
    """Collective. Every worker writes its host into the store, and reads those of all."""
    store.set(f"host/{rank}", _here())
    return group([bytes(store.get(f"host/{peer}")).decode() for peer in range(size)])


def group(places: list[str]) -> Hosts:
    """Ranks with the same place, together."""
    ranks_of: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks_of.setdefault(place, []).append(rank)
    return tuple(tuple(ranks) for ranks in ranks_of.values())


def _here() -> str:
    """A name that only processes on this machine, since this boot, in this network namespace have."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return " ".join(parts)


@dataclass(frozen=True)
class HostReduction:
    """A reduction cut at the hosts: the sums that each host adds, and the tree over these sums.

    `sums_of[h]` are the largest subtrees, from left to right, whose roots all belong to workers of host h. In
    `tree`, `Root(h, i)` is the i-th of them: its rank is a host's, not a worker's.
    """

    sums_of: tuple[tuple[Tree, ...], ...]
    tree: Tree


@lru_cache(maxsize=256)
def host_reduction(reduction: Reduction, hosts: Hosts) -> HostReduction:
    """Cuts the tree of a reduction at the largest subtrees that one host has whole."""
    _check_hosts(hosts, len(reduction.folds))
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    sums_of: list[list[Tree]] = [[] for _ in hosts]

    def cut(tree: Tree) -> Tree:
        owners = {host_of[root.rank] for root in leaves(tree) if isinstance(root, Root)}
        if len(owners) == 1:
            host = owners.pop()
            sums_of[host].append(tree)
            return Root(host, len(sums_of[host]) - 1)
        assert isinstance(tree, Branch)
        return Branch(cut(tree.left), cut(tree.right))

    over_hosts = cut(reduction.tree)
    return HostReduction(tuple(map(tuple, sums_of)), over_hosts)


def _check_hosts(hosts: Hosts, num_workers: int) -> None:
    if not all(hosts) or sorted(rank for ranks in hosts for rank in ranks) != list(range(num_workers)):
        raise BadArgument(
            f"hosts must name each of the workers 0 to {num_workers - 1} once, at least one on every host, "
            f"not {list(map(list, hosts))}"
        )
