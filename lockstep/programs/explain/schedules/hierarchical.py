"""Hierarchical: add inside each host first, so that little crosses the network. Exact.

# Note [Columns]
# The bucket has C columns, C being the most workers on a host, and each column has one part per host. The c-th
# worker of a host represents its host in column c; on a smaller host, a worker represents it in several. Host h's
# worker of column c finishes part (c, h). So all links between hosts, and all workers, work at once.
"""

from dataclasses import dataclass
from functools import lru_cache

from lockstep.lanes import Branch, Reduction, Root, Tree
from lockstep.wire.network.hosts import HostReduction, host_reduction
from lockstep.wire.schedules.schedule import AddPart, Cost, Schedule, ScheduleRound, SendPart, busy
from lockstep.wire.transport import Hosts

HIERARCHICAL = Cost("2 + (H > 1) + (C > 1)", "((K+1)*(C-1)/C + (G+1)*(H-1)/(C*H))*P")
"""The bytes are those of hosts of equal size whose workers have K roots each; about (G+1)/C*P cross the network."""


@lru_cache(maxsize=64)
def hierarchical(reduction: Reduction, hosts: Hosts) -> Schedule:
    """All-reduce, exact: hosts add what they have whole, exchange these sums, and spread the result inside.

    See Note [Columns].
    """
    grid = _Grid(hosts, reduction.roots_of, host_reduction(reduction, hosts))
    rounds = busy(_within_hosts(grid), _between_hosts(grid), _return_between_hosts(grid), _return_within_hosts(grid))
    return Schedule(len(reduction.folds), rounds, "all_reduce", grid.num_columns * len(hosts), reduction)


@dataclass(frozen=True)
class _Grid:
    """Which worker represents which host in which column, and under which names it holds the host's sums."""

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


def _within_hosts(grid: _Grid) -> ScheduleRound:
    """Each worker sends each column of its roots to the host's worker of that column, which adds the host's sums."""
    sends = tuple(
        SendPart(rank, grid.stand_in(host, column), part, Root(rank, index))
        for host, ranks in enumerate(grid.hosts)
        for rank in ranks
        for column in range(grid.num_columns)
        if rank != grid.stand_in(host, column)
        for index in range(grid.roots_of[rank])
        for part in grid.parts(column)
    )
    adds = tuple(
        AddPart(grid.stand_in(host, column), part, tree, name)
        for column, host in grid.cells
        for tree, name in zip(grid.cut.sums_of[host], grid.names(host, column), strict=True)
        for part in grid.parts(column)
    )
    return ScheduleRound(sends, adds)


def _between_hosts(grid: _Grid) -> ScheduleRound:
    """Part (c, h) of all hosts' sums goes to host h's worker of column c, which adds them along the whole tree."""
    sends = tuple(
        SendPart(grid.stand_in(other, column), grid.stand_in(host, column), grid.part(column, host), name)
        for column, host in grid.cells
        for other in range(len(grid.hosts))
        if other != host
        for name in grid.names(other, column)
    )
    trees = [_in_column(grid.cut.tree, grid, column) for column in range(grid.num_columns)]
    adds = tuple(
        AddPart(grid.stand_in(host, column), grid.part(column, host), trees[column]) for column, host in grid.cells
    )
    return ScheduleRound(sends, adds)


def _return_between_hosts(grid: _Grid) -> ScheduleRound:
    """Every finished part goes to the other hosts' workers of its column."""
    return ScheduleRound(
        tuple(
            SendPart(grid.stand_in(host, column), grid.stand_in(other, column), grid.part(column, host))
            for column, host in grid.cells
            for other in range(len(grid.hosts))
            if other != host
        )
    )


def _return_within_hosts(grid: _Grid) -> ScheduleRound:
    """Every finished column goes to all workers of the host."""
    return ScheduleRound(
        tuple(
            SendPart(grid.stand_in(host, column), rank, part)
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
