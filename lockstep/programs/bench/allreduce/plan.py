"""What an all-reduce benchmark measures, as a value. Without torch, so that a wrong word is refused at once."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lockstep.errors import BadArgument
from lockstep.launch.status import MAX_SLOTS
from lockstep.programs.bench.allreduce.algorithms import SHARED
from lockstep.programs.bench.allreduce.sizes import named
from lockstep.programs.bench.devices import CPU

LOCKSTEP, GLOO, FLOOR = "lockstep", "gloo", "floor"
SIDES = (LOCKSTEP, GLOO, FLOOR)
TENSORS = 4
"""What each worker holds of one size: one for each side, and what the copy is made from."""


@dataclass(frozen=True)
class Part:
    """One size on one number of workers: one row of the report."""

    workers: int
    num_bytes: int
    rounds: int

    @property
    def title(self) -> str:
        return f"{named(self.num_bytes)} on {self.workers} workers"


@dataclass(frozen=True)
class Plan:
    """All sizes on one number of workers: one launch. Every round has one block of each side."""

    workers: int
    sizes: tuple[int, ...]
    algorithm: str
    rounds: int
    device: str = CPU

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise BadArgument(f"an all-reduce needs 2 workers or more, not {self.workers}")
        if self.workers > MAX_SLOTS:
            raise BadArgument(f"one host runs {MAX_SLOTS} workers at most, not {self.workers}")
        if self.device != CPU and self.algorithm != SHARED:
            raise BadArgument(
                f"--algorithm {self.algorithm} is for the CPU: leave it out, and the wire between GPUs is measured"
            )

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(Part(self.workers, num_bytes, self.rounds) for num_bytes in self.sizes)

    def written(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Plan":
        """What `written` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "sizes": tuple(fields["sizes"])})


def make_plans(
    workers: Sequence[int], sizes: Sequence[int], algorithm: str, rounds: int, device: str = CPU
) -> tuple[Plan, ...]:
    """A plan for every number of workers, each with every size, each once; raises before anything runs."""
    each = tuple(dict.fromkeys(sizes))
    return tuple(Plan(count, each, algorithm, rounds, device) for count in dict.fromkeys(workers))


def check_memory(plans: Sequence[Plan], left_bytes: int | None) -> None:
    """Raises if the tensors of some size would not fit into the memory that is left, where that is known."""
    for plan in plans:
        largest = max(plan.sizes)
        needed = plan.workers * TENSORS * largest
        if left_bytes is not None and needed > left_bytes:
            raise BadArgument(
                f"--sizes {named(largest)} needs {needed / 2**30:.1f} GiB on {plan.workers} workers, {TENSORS} tensors "
                f"each, and {left_bytes / 2**30:.1f} GiB are free: give smaller sizes, or fewer workers"
            )


def order(round_number: int) -> tuple[str, ...]:
    """The sides in the order of one round.

    In three rounds every side stands once in every place; the next three run backwards. So neither a slow drift of the
    machine nor what a neighbour left in the caches favours one of them.
    """
    shift = round_number % len(SIDES)
    turned = SIDES[shift:] + SIDES[:shift]
    return turned[::-1] if round_number // len(SIDES) % 2 else turned


def crowding(plans: Sequence[Plan], num_cores: int) -> str | None:
    """The warning that some plan has more workers than there are cores, or None."""
    crowded = [str(plan.workers) for plan in plans if plan.workers > num_cores]
    if not crowded:
        return None
    return (
        f"! {' and '.join(crowded)} workers share {num_cores} cores: they wait for each other's turn, and the times "
        "say little about a machine with a core for each"
    )
