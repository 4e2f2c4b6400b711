"""All schedules by collective and name: what the command line, the benchmarks, the pages and the tests go through."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lockstep.errors import BadArgument
from lockstep.lanes import Reduction
from lockstep.wire.schedules.broadcast import binomial, direct_broadcast, scatter_gather
from lockstep.wire.schedules.circulant import circulant, doubling_all_gather, halving_reduce_scatter
from lockstep.wire.schedules.direct import direct, direct_all_gather, direct_reduce_scatter, one_root_each
from lockstep.wire.schedules.halving import halving_doubling
from lockstep.wire.schedules.hierarchical import Hosts, hierarchical
from lockstep.wire.schedules.oneshot import oneshot_exact
from lockstep.wire.schedules.ring import ring, ring_all_gather, ring_reduce_scatter
from lockstep.wire.schedules.schedule import Collective, Schedule
from lockstep.wire.schedules.tree import double_tree, tree


@dataclass(frozen=True)
class Setting:
    """What a schedule may depend on; each algorithm takes of it what it has parameters for.

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
            "reduction": self.reduction or one_root_each(self.num_workers),
            "hosts": self.hosts or (tuple(range(self.num_workers)),),
        } | {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Algorithm:
    """One way to do a collective: the function that makes its schedule, and what to know of it in a line."""

    make: Callable[..., Schedule]
    summary: str

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.make).parameters)

    @property
    def exact(self) -> bool:
        """Whether it adds in the order of the summation tree, so that the bits are the same for all assignments."""
        return "reduction" in self.parameters

    @property
    def cost(self) -> str:
        """The cost line of the function's docstring: assignments in Python, separated by semicolons."""
        found = re.search(r"^Cost: (.+)$", inspect.getdoc(self.make) or "", re.MULTILINE)
        return found.group(1) if found else "not known: docstrings were stripped"

    def schedule(self, setting: Setting) -> Schedule:
        arguments = setting.arguments()
        return self.make(*(arguments[name] for name in self.parameters if name in arguments))


CATALOGUE: Mapping[Collective, Mapping[str, Algorithm]] = MappingProxyType(
    {
        "all_reduce": MappingProxyType(
            {
                "direct": Algorithm(direct, "each worker adds one part for all: two rounds, few bytes"),
                "oneshot": Algorithm(oneshot_exact, "everything to everyone: one round, for tiny messages"),
                "hierarchical": Algorithm(hierarchical, "inside hosts first, then between them: for slow networks"),
                "ring": Algorithm(
                    ring, "to the next worker only: the fewest bytes, for large messages and few workers"
                ),
                "halving-doubling": Algorithm(halving_doubling, "hypercube: few rounds and bytes for powers of two"),
                "circulant": Algorithm(circulant, "circle of doubling steps: few rounds and bytes for any number"),
                "tree": Algorithm(tree, "up and down a binary tree: few rounds, but inner workers send much"),
                "double-tree": Algorithm(double_tree, "two trees that share the work: for large messages in chunks"),
            }
        ),
        "reduce_scatter": MappingProxyType(
            {
                "direct": Algorithm(direct_reduce_scatter, "everyone sends each part to its owner: one round"),
                "ring": Algorithm(ring_reduce_scatter, "to the next worker only: many rounds, evenly used links"),
                "halving": Algorithm(halving_reduce_scatter, "half of what is left in every round, for any number"),
            }
        ),
        "all_gather": MappingProxyType(
            {
                "direct": Algorithm(direct_all_gather, "everyone sends its part to everyone: one round"),
                "ring": Algorithm(ring_all_gather, "to the next worker only: many rounds, evenly used links"),
                "doubling": Algorithm(doubling_all_gather, "twice as much known in every round, for any number"),
            }
        ),
        "broadcast": MappingProxyType(
            {
                "binomial": Algorithm(binomial, "twice as many have it in every round: for small messages"),
                "direct": Algorithm(direct_broadcast, "the source sends to everyone: one round, for few workers"),
                "scatter-gather": Algorithm(scatter_gather, "parts first, then all-gather: for large messages"),
            }
        ),
    }
)


def find(collective: Collective, name: str) -> Algorithm:
    """The algorithm of that name; `_` and `-` are the same. Raises with the names that exist."""
    known = CATALOGUE[collective]
    wanted = name.replace("_", "-")
    if wanted not in known:
        raise BadArgument(f"there is no {name!r} for {collective}: choose one of {', '.join(known)}")
    return known[wanted]
