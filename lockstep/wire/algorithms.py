"""Collectives as data: pure functions that say which worker sends what to whom, and who adds what.

A schedule is made once per (assignment, lanes present) and is the same value on every worker. The executor
carries it out; tests run it symbolically.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from lockstep.lanes import Reduction, Root, Tree


def slices(num_elements: int, num_workers: int) -> list[range]:
    """The contiguous part of a bucket that each worker adds up; sizes differ by at most one."""
    bounds = [num_elements * rank // num_workers for rank in range(num_workers + 1)]
    return [range(lo, hi) for lo, hi in pairwise(bounds)]


@dataclass(frozen=True)
class Send:
    """Worker `source` sends slice `part` to worker `target`: of one of its roots, or of the finished sum."""

    source: int
    target: int
    part: int
    root: Root | None = None


@dataclass(frozen=True)
class Add:
    """Worker `worker` adds slice `part` of all roots, bracketed by `tree`; it then holds that slice of the sum."""

    worker: int
    part: int
    tree: Tree


@dataclass(frozen=True)
class Round:
    """Sends that go out together, then the additions that need what arrived."""

    sends: tuple[Send, ...]
    adds: tuple[Add, ...] = ()

    def at(self, rank: int) -> "Round":
        """What worker `rank` does in this round."""
        return Round(
            tuple(send for send in self.sends if rank in (send.source, send.target)),
            tuple(add for add in self.adds if add.worker == rank),
        )


@dataclass(frozen=True)
class Schedule:
    """The moves of one collective. `part` i in it is the i-th of `slices(num_elements, num_workers)`."""

    num_workers: int
    rounds: tuple[Round, ...]

    def at(self, rank: int) -> tuple[Round, ...]:
        return tuple(step.at(rank) for step in self.rounds)


@lru_cache(maxsize=256)
def direct(reduction: Reduction) -> Schedule:
    """All-reduce by direct slices, exact: everyone sends slice i of its roots to worker i, who adds and returns it.

    Cost for W workers with one root each and P bytes: 2 rounds, 2·(W-1)/W·P bytes sent by each. A worker
    with k roots sends k times as much in the first round.
    """
    workers = range(len(reduction.folds))
    scatter = tuple(
        Send(source, target, part=target, root=Root(source, index))
        for source in workers
        for target in workers
        if source != target
        for index in range(reduction.roots_of[source])
    )
    adds = tuple(Add(worker, part=worker, tree=reduction.tree) for worker in workers)
    gather = tuple(Send(source, target, part=source) for source in workers for target in workers if source != target)
    return Schedule(len(workers), (Round(scatter, adds), Round(gather)))
