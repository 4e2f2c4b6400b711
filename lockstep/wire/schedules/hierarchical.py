"""Hierarchical: add inside each host first, so that little crosses the network. Exact.

# Note [Columns]
# The bucket has C columns, C being the most workers on a host, and each column has one part per host. The c-th
# worker of a host stands for its host in column c; on a smaller host, workers stand for several. Part (c, h)
# is finished by host h's worker of column c. So all links between hosts, and all workers, work at once.
"""

from dataclasses import dataclass
from functools import lru_cache

from lockstep.errors import BadArgument
from lockstep.lanes import Branch, Reduction, Root, Tree, leaves
from lockstep.wire.schedules.schedule import Add, Round, Schedule, Send, busy

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of each host's workers."""


@dataclass(frozen=True)
class HostReduction:
    """A reduction cut at the hosts: what each host adds by itself, and the tree over what the hosts then have.

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


@lru_cache(maxsize=64)
def hierarchical(reduction: Reduction, hosts: Hosts) -> Schedule:
    """All-reduce, exact: hosts add what they have whole, exchange these sums, and spread the result inside.

    See Note [Columns]. H is the number of hosts, C the most workers on one, K the number of roots of the worker
    that has most and G the number of sums of the host that has most. The bytes are those of hosts of equal size
    whose workers have K roots each; about (G+1)/C*P of them cross the network.

    Cost: rounds = 2 + (H > 1) + (C > 1); bytes = ((K+1)*(C-1)/C + (G+1)*(H-1)/(C*H))*P
    """
    grid = _Grid(hosts, reduction.roots_of, host_reduction(reduction, hosts))
    rounds = busy(_within_hosts(grid), _between_hosts(grid), _return_between_hosts(grid), _return_within_hosts(grid))
    return Schedule(len(reduction.folds), rounds, "all_reduce", grid.num_columns * len(hosts), reduction)


@dataclass(frozen=True)
class _Grid:
    """Who stands for which host in which column, and under which names it holds the host's sums."""

    hosts: Hosts
    roots_of: tuple[int, ...]
    cut: HostReduction

    @property
    def num_columns(self) -> int:
        return max(map(len, self.hosts))

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Every (column, host), in the order of the parts."""
        return [(column, host) for column in range(self.num_columns) for host in range(len(self.hosts))]

    def stand_in(self, host: int, column: int) -> int:
        return self.hosts[host][column % len(self.hosts[host])]

    def part(self, column: int, host: int) -> int:
        return column * len(self.hosts) + host

    def parts(self, column: int) -> range:
        return range(self.part(column, 0), self.part(column + 1, 0))

    def names(self, host: int, column: int) -> list[Root]:
        """The host's sums, as its worker of this column holds them: numbered after the worker's own roots."""
        rank = self.stand_in(host, column)
        return [Root(rank, self.roots_of[rank] + index) for index in range(len(self.cut.sums_of[host]))]


def _within_hosts(grid: _Grid) -> Round:
    """Everyone sends each column of its roots to the host's worker of that column, who adds the host's sums."""
    sends = tuple(
        Send(rank, grid.stand_in(host, column), part, Root(rank, index))
        for host, ranks in enumerate(grid.hosts)
        for rank in ranks
        for column in range(grid.num_columns)
        if rank != grid.stand_in(host, column)
        for index in range(grid.roots_of[rank])
        for part in grid.parts(column)
    )
    adds = tuple(
        Add(grid.stand_in(host, column), part, tree, name)
        for column, host in grid.cells
        for tree, name in zip(grid.cut.sums_of[host], grid.names(host, column), strict=True)
        for part in grid.parts(column)
    )
    return Round(sends, adds)


def _between_hosts(grid: _Grid) -> Round:
    """Part (c, h) of all hosts' sums goes to host h's worker of column c, who adds them along the whole tree."""
    sends = tuple(
        Send(grid.stand_in(other, column), grid.stand_in(host, column), grid.part(column, host), name)
        for column, host in grid.cells
        for other in range(len(grid.hosts))
        if other != host
        for name in grid.names(other, column)
    )
    trees = [_in_column(grid.cut.tree, grid, column) for column in range(grid.num_columns)]
    adds = tuple(
        Add(grid.stand_in(host, column), grid.part(column, host), trees[column]) for column, host in grid.cells
    )
    return Round(sends, adds)


def _return_between_hosts(grid: _Grid) -> Round:
    """Every finished part goes to the other hosts' workers of its column."""
    return Round(
        tuple(
            Send(grid.stand_in(host, column), grid.stand_in(other, column), grid.part(column, host))
            for column, host in grid.cells
            for other in range(len(grid.hosts))
            if other != host
        )
    )


def _return_within_hosts(grid: _Grid) -> Round:
    """Every finished column goes to all workers of the host."""
    return Round(
        tuple(
            Send(grid.stand_in(host, column), rank, part)
            for column, host in grid.cells
            for rank in grid.hosts[host]
            if rank != grid.stand_in(host, column)
            for part in grid.parts(column)
        )
    )


def _in_column(tree: Tree, grid: _Grid, column: int) -> Tree:
    """The tree over the hosts' sums, with the names that they have in this column."""
    names = [grid.names(host, column) for host in range(len(grid.hosts))]

    def rename(node: Tree) -> Tree:
        if isinstance(node, Branch):
            return Branch(rename(node.left), rename(node.right))
        assert isinstance(node, Root)
        return names[node.rank][node.index]

    return rename(tree)


def _check_hosts(hosts: Hosts, num_workers: int) -> None:
    if not all(hosts) or sorted(rank for ranks in hosts for rank in ranks) != list(range(num_workers)):
        raise BadArgument(
            f"hosts must name each of the workers 0 to {num_workers - 1} once, at least one on every host, "
            f"not {list(map(list, hosts))}"
        )
