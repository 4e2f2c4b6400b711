"""Direct: everyone talks to everyone at once. The fewest rounds, whatever the number of workers."""

from functools import lru_cache

from lockstep.lanes import Assignment, Reduction, Root
from lockstep.lanes import reduction as cut_tree
from lockstep.wire.schedules.schedule import Add, Round, Schedule, Send, busy


@lru_cache(maxsize=256)
def one_root_each(num_workers: int) -> Reduction:
    """The sum of one value per worker: what makes an exact schedule a plain one."""
    return cut_tree(Assignment.even(num_workers, num_workers), tuple(range(num_workers)))


@lru_cache(maxsize=256)
def direct(reduction: Reduction) -> Schedule:
    """All-reduce, exact: everyone sends part i of its roots to worker i, who adds them and returns the sum.

    K is the number of roots of the worker that has most.

    Cost: rounds = min(W, 2); bytes = (K+1)*(W-1)/W*P
    """
    scatter = direct_reduce_scatter(reduction)
    gather = direct_all_gather(scatter.num_workers)
    rounds = scatter.rounds + gather.rounds
    return Schedule(scatter.num_workers, rounds, "all_reduce", scatter.num_parts, reduction)


@lru_cache(maxsize=256)
def direct_reduce_scatter(reduction: Reduction) -> Schedule:
    """Reduce-scatter, exact: everyone sends part i of its roots to worker i, who adds them.

    K is the number of roots of the worker that has most.

    Cost: rounds = 1; bytes = K*(W-1)/W*P
    """
    workers, roots_of = range(len(reduction.folds)), reduction.roots_of
    sends = tuple(
        Send(source, target, part=target, root=Root(source, index))
        for source in workers
        for target in workers
        if source != target
        for index in range(roots_of[source])
    )
    adds = tuple(Add(worker, part=worker, tree=reduction.tree) for worker in workers)
    return Schedule(len(workers), (Round(sends, adds),), "reduce_scatter", len(workers), reduction)


@lru_cache(maxsize=256)
def direct_all_gather(num_workers: int) -> Schedule:
    """All-gather: everyone sends its part to everyone.

    Cost: rounds = min(W-1, 1); bytes = (W-1)/W*P
    """
    workers = range(num_workers)
    sends = tuple(Send(source, target, part=source) for source in workers for target in workers if source != target)
    return Schedule(num_workers, busy(Round(sends)), "all_gather", num_workers)
