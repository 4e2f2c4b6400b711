"""All schedules by collective and name, for the command line, the benchmarks, the pages and the tests."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.errors import BadArgument
from lockstep.lanes import Reduction
from lockstep.programs.explain.schedules import broadcast, halving, hierarchical, ring, tree
from lockstep.wire.schedules import exact
from lockstep.wire.schedules.schedule import Collective, Cost, Schedule
from lockstep.wire.transport import Hosts


@dataclass(frozen=True)
class Setting:
    """What a schedule may depend on; each algorithm takes those for which it has parameters.

    By default every worker has one root, all workers share one host, and the algorithm chooses its chunks.
    """

    num_workers: int
    reduction: Reduction | None = None
    hosts: Hosts | None = None
    source: int | None = None
    num_chunks: int | None = None

    def arguments(self) -> dict[str, object]:
        """All parameters that an algorithm may have, by name; the last ones may be left to its default."""
        given = {"source": self.source, "num_chunks": self.num_chunks}
        return {
            "num_workers": self.num_workers,
            "reduction": self.reduction or exact.one_root_each(self.num_workers),
            "hosts": self.hosts or (tuple(range(self.num_workers)),),
        } | {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Algorithm:
    """One way to do a collective: the function that makes its schedule, its cost, and a one-line description."""

    make: Callable[..., Schedule]
    cost: Cost
    summary: str

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.make).parameters)

    @property
    def exact(self) -> bool:
        """Whether it adds in the order of the summation tree, so that the bits are the same for all assignments."""
        return "reduction" in self.parameters

    def schedule(self, setting: Setting) -> Schedule:
        arguments = setting.arguments()
        return self.make(*(arguments[name] for name in self.parameters if name in arguments))


CATALOGUE: Mapping[Collective, Mapping[str, Algorithm]] = {
    "all_reduce": {
        "direct": Algorithm(exact.direct, exact.DIRECT, "each worker adds one part for all: two rounds, few bytes"),
        "oneshot": Algorithm(exact.oneshot, exact.ONESHOT, "everything to everyone: one round, for tiny messages"),
        "hierarchical": Algorithm(
            hierarchical.hierarchical,
            hierarchical.HIERARCHICAL,
            "inside hosts first, then between them: for slow networks",
        ),
        "ring": Algorithm(
            ring.ring, ring.RING, "to the next worker only: the fewest bytes, for large messages and few workers"
        ),
        "halving-doubling": Algorithm(
            halving.halving_doubling, halving.HALVING_DOUBLING, "hypercube: few rounds and bytes for powers of two"
        ),
        "circulant": Algorithm(
            halving.circulant, halving.CIRCULANT, "circle of doubling steps: few rounds and bytes for any number"
        ),
        "tree": Algorithm(tree.tree, tree.TREE, "up and down a binary tree: few rounds, but inner workers send much"),
        "double-tree": Algorithm(
            tree.double_tree, tree.DOUBLE_TREE, "two trees that share the work: for large messages in chunks"
        ),
    },
    "reduce_scatter": {
        "direct": Algorithm(
            exact.direct_reduce_scatter, exact.DIRECT_REDUCE_SCATTER, "everyone sends each part to its owner: one round"
        ),
        "ring": Algorithm(
            ring.ring_reduce_scatter,
            ring.RING_REDUCE_SCATTER,
            "to the next worker only: many rounds, evenly used links",
        ),
        "halving": Algorithm(
            halving.halving_reduce_scatter,
            halving.HALVING_REDUCE_SCATTER,
            "half of what is left in every round, for any number",
        ),
    },
    "all_gather": {
        "direct": Algorithm(
            exact.direct_all_gather, exact.DIRECT_ALL_GATHER, "everyone sends its part to everyone: one round"
        ),
        "ring": Algorithm(
            ring.ring_all_gather, ring.RING_ALL_GATHER, "to the next worker only: many rounds, evenly used links"
        ),
        "doubling": Algorithm(
            halving.doubling_all_gather,
            halving.DOUBLING_ALL_GATHER,
            "twice as much known in every round, for any number",
        ),
    },
    "broadcast": {
        "binomial": Algorithm(
            broadcast.binomial, broadcast.BINOMIAL, "twice as many have it in every round: for small messages"
        ),
        "direct": Algorithm(
            broadcast.direct_broadcast,
            broadcast.DIRECT_BROADCAST,
            "the source sends to everyone: one round, for few workers",
        ),
        "scatter-gather": Algorithm(
            broadcast.scatter_gather, broadcast.SCATTER_GATHER, "parts first, then all-gather: for large messages"
        ),
    },
}


def find(collective: Collective, name: str) -> Algorithm:
    """The algorithm of that name; `_` and `-` are the same. Raises with the names that exist."""
    known = CATALOGUE[collective]
    hyphenated = name.replace("_", "-")
    if hyphenated not in known:
        raise BadArgument(f"there is no {name!r} for {collective}: choose one of {', '.join(known)}")
    return known[hyphenated]
