"""One shot: everyone sends everything to everyone and adds it up alone. For tiny messages."""

from functools import lru_cache

from lockstep.lanes import Reduction, Root
from lockstep.wire.schedules.direct import one_root_each
from lockstep.wire.schedules.schedule import Add, Round, Schedule, Send


@lru_cache(maxsize=256)
def oneshot_exact(reduction: Reduction) -> Schedule:
    """All-reduce, exact: everyone sends its roots whole to everyone; each adds the whole tree.

    K is the number of roots of the worker that has most.

    Cost: rounds = 1; bytes = K*(W-1)*P
    """
    workers, roots_of = range(len(reduction.folds)), reduction.roots_of
    sends = tuple(
        Send(source, target, part=0, root=Root(source, index))
        for source in workers
        for target in workers
        if source != target
        for index in range(roots_of[source])
    )
    adds = tuple(Add(worker, part=0, tree=reduction.tree) for worker in workers)
    return Schedule(len(workers), (Round(sends, adds),), "all_reduce", 1, reduction)


def oneshot(num_workers: int) -> Schedule:
    """All-reduce of one value per worker: `oneshot_exact` of one root each.

    Adding what arrives to one's own value would be plainer, but then every worker has brackets of its own, and
    the workers' results differ in their last bits.

    Cost: rounds = 1; bytes = (W-1)*P
    """
    return oneshot_exact(one_root_each(num_workers))
