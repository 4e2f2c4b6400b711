"""The schedules of a run: exact, so that the bits do not depend on which worker carries which lane.

In all of them every worker sends to every other at once: the fewest rounds, whatever the number of workers.
"""

from functools import lru_cache

from lockstep.lanes import Assignment, Reduction, Root
from lockstep.lanes import reduction as cut_tree
from lockstep.wire.schedules.schedule import AddPart, Cost, Schedule, ScheduleRound, SendPart, busy

DIRECT = Cost("min(W, 2)", "(K+1)*(W-1)/W*P")
DIRECT_REDUCE_SCATTER = Cost("1", "K*(W-1)/W*P")
DIRECT_ALL_GATHER = Cost("min(W-1, 1)", "(W-1)/W*P")
ONESHOT = Cost("1", "K*(W-1)*P")


@lru_cache(maxsize=256)
def one_root_each(num_workers: int) -> Reduction:
    """The sum of one value per worker: what makes an exact schedule a plain one."""
    return cut_tree(Assignment.even(num_workers, num_workers), tuple(range(num_workers)))


@lru_cache(maxsize=256)
def direct(reduction: Reduction) -> Schedule:
    """All-reduce: each worker sends part i of its roots to worker i, which adds them and returns the sum."""
    scatter = direct_reduce_scatter(reduction)
    rounds = scatter.rounds + direct_all_gather(scatter.num_workers).rounds
    return Schedule(scatter.num_workers, rounds, "all_reduce", scatter.num_parts, reduction)


@lru_cache(maxsize=256)
def direct_reduce_scatter(reduction: Reduction) -> Schedule:
    """Reduce-scatter: each worker sends part i of its roots to worker i, which adds them."""
    workers = range(len(reduction.folds))
    sends = _roots_to_all(reduction, {target: target for target in workers})
    adds = tuple(AddPart(worker, part=worker, tree=reduction.tree) for worker in workers)
    return Schedule(len(workers), (ScheduleRound(sends, adds),), "reduce_scatter", len(workers), reduction)


@lru_cache(maxsize=256)
def direct_all_gather(num_workers: int) -> Schedule:
    """All-gather: each worker sends its part to all others."""
    workers = range(num_workers)
    sends = tuple(SendPart(source, target, part=source) for source in workers for target in workers if source != target)
    return Schedule(num_workers, busy(ScheduleRound(sends)), "all_gather", num_workers)


@lru_cache(maxsize=256)
def oneshot(reduction: Reduction) -> Schedule:
    """All-reduce: each worker sends its whole roots to all others, and adds the whole tree. For tiny messages.

    If every worker added what arrives to its own value instead, each would have brackets of its own.
    """
    workers = range(len(reduction.folds))
    sends = _roots_to_all(reduction, dict.fromkeys(workers, 0))
    adds = tuple(AddPart(worker, part=0, tree=reduction.tree) for worker in workers)
    return Schedule(len(workers), (ScheduleRound(sends, adds),), "all_reduce", 1, reduction)


def _roots_to_all(reduction: Reduction, part_for: dict[int, int]) -> tuple[SendPart, ...]:
    """Each worker sends every other one that one's part of each of its roots."""
    return tuple(
        SendPart(source, target, part, root=Root(source, index))
        for source, num_roots in enumerate(reduction.roots_of)
        for target, part in part_for.items()
        if source != target
        for index in range(num_roots)
    )
