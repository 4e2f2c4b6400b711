"""What a schedule is: rounds of sends and additions over the parts of one bucket, the same value on every worker.

It is only data: the executor runs it over a wire; `lockstep explain` proves it on symbols and draws it.

# Note [What a worker holds]
# For each part, a worker holds one running value, and any number of roots.
#
# The running value is, before the first round: in an all-reduce or reduce-scatter, the worker's own
# contribution; in an all-gather, its own part and nothing else; in a broadcast, everything on the source and
# nothing elsewhere. After the last round it is the result. A send without a root carries it.
#
# Roots are for exact schedules, those with a `reduction`: a worker begins with the roots that the reduction
# gives it and without a running value. A root that arrives is held beside its own. An `AddPart` brackets roots
# and leaves their sum as the running value, or as one more root.
#
# All sends of a round carry what was held when the round began; then the additions see what has arrived, but not
# each other's sums. No two sends or additions of a round may write the same place, so their order changes nothing.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil, floor, log2
from types import CodeType
from typing import Literal

from lockstep.errors import BadArgument
from lockstep.lanes import Reduction, Root, Tree

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]


def slices(num_elements: int, num_parts: int) -> list[range]:
    """The contiguous parts of a bucket; sizes differ by at most one."""
    bounds = [num_elements * part // num_parts for part in range(num_parts + 1)]
    return [range(lo, hi) for lo, hi in pairwise(bounds)]


@dataclass(frozen=True)
class SendPart:
    """Worker `source` sends part `part` of `root`, or of its running value if there is none, to worker `target`.

    A root is then held by the target too. A running value replaces the target's, or is added to it if `adds`.
    See Note [What a worker holds].
    """

    source: int
    target: int
    part: int
    root: Root | None = None
    adds: bool = False


@dataclass(frozen=True)
class AddPart:
    """Worker `worker` adds part `part` of the roots in `tree`, in its brackets; it must hold them all.

    The sum becomes its running value of that part or, if `root` is given, is held under that new name. A tree
    of a single root is a copy.
    """

    worker: int
    part: int
    tree: Tree
    root: Root | None = None


@dataclass(frozen=True)
class ScheduleRound:
    """Sends that go out together, then the additions that need what arrived."""

    sends: tuple[SendPart, ...]
    adds: tuple[AddPart, ...] = ()

    def at(self, rank: int) -> "ScheduleRound":
        return ScheduleRound(
            tuple(send for send in self.sends if rank in (send.source, send.target)),
            tuple(add for add in self.adds if add.worker == rank),
        )


def busy(*rounds: ScheduleRound) -> tuple[ScheduleRound, ...]:
    """The rounds in which something happens: few workers often leave some empty."""
    return tuple(moves for moves in rounds if moves.sends or moves.adds)


@dataclass(frozen=True)
class Schedule:
    """The moves of one collective. `part` i in it is the i-th of `slices(num_elements, num_parts)`.

    In a reduce-scatter and an all-gather, part i belongs to worker i. `reduction` defines the roots and the brackets of
    the result; without one every worker contributes one value. `source` is the worker that broadcasts.
    """

    num_workers: int
    rounds: tuple[ScheduleRound, ...]
    collective: Collective
    num_parts: int
    reduction: Reduction | None = None
    source: int = 0

    def __post_init__(self) -> None:
        if self.collective in ("reduce_scatter", "all_gather") and self.num_parts != self.num_workers:
            raise BadArgument(f"{self.collective} needs one part for each of {self.num_workers} workers")

    def at(self, rank: int) -> tuple[ScheduleRound, ...]:
        return tuple(step.at(rank) for step in self.rounds)

    @property
    def exact(self) -> bool:
        """Whether the result has the brackets of the summation tree, under every assignment of lanes."""
        return self.reduction is not None


@dataclass(frozen=True)
class Cost:
    """The rounds of a schedule, and the bytes that its busiest worker sends, as formulas.

    W is the number of workers, P the bytes of the message, K the roots of the worker that has most, N the parts, H the
    hosts, C the workers of the largest host and G the sums of the host that has most. `where` defines one more letter.
    """

    rounds: str
    num_bytes: str
    where: str = ""

    def __str__(self) -> str:
        lines = [self.where, f"rounds = {self.rounds}", f"bytes = {self.num_bytes}"]
        return "; ".join(line for line in lines if line)

    def of(self, **letters: float) -> tuple[float, float]:
        """The rounds and the bytes where the letters have these values."""
        if self.where:
            name, formula = self.where.split(" = ")
            letters[name] = _evaluate(formula, letters)
        return _evaluate(self.rounds, letters), _evaluate(self.num_bytes, letters)


_FUNCTIONS = {"__builtins__": {"log2": log2, "ceil": ceil, "floor": floor, "min": min}}


def _evaluate(formula: str, letters: dict[str, float]) -> float:
    value: float = eval(_compiled(formula), _FUNCTIONS, letters)  # formulas are constants of this package
    return value


@lru_cache(maxsize=256)
def _compiled(formula: str) -> CodeType:
    return compile(formula, "<cost>", "eval")
