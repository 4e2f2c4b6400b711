"""What a step benchmark on a GPU measures, as a value. Without torch, so that a wrong word is refused at once."""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from lockstep.errors import BadArgument
from lockstep.programs.packages import require

PLAIN, FUSED, DETERMINISTIC = "plain", "plain fused", "plain deterministic"
DDP, DDP_DETERMINISTIC, DDP_GLOO = "ddp", "ddp deterministic", "ddp gloo"
COMPILED, REDUCED = "compile", "compile reduce-overhead"
BY_HAND = "graph by hand"
LOCKSTEP, NOT_EXACT = "lockstep", "lockstep exact=False"
CAPTURED, FLAT = "lockstep captured", "lockstep captured flat"

SIDES = (
    PLAIN, FUSED, DETERMINISTIC, DDP, DDP_DETERMINISTIC, COMPILED, REDUCED, BY_HAND,
    LOCKSTEP, NOT_EXACT, CAPTURED, FLAT,
)  # fmt: skip
"""The ways to train on one worker."""

SIDES_OF_SEVERAL = (DDP_GLOO, DDP, LOCKSTEP, NOT_EXACT, CAPTURED, FLAT)
"""The ways to train on several workers."""

USUAL_OF_SEVERAL = (DDP_GLOO, LOCKSTEP, CAPTURED)
"""NCCL refuses workers that share a GPU: "ddp", which is DDP over NCCL, is measured only where it is asked for."""

REFERENCES_IN_ORDER = (FUSED, DDP_GLOO, DDP)
"""The first of them that is there is what the others are held against."""

NEEDS_CUDA = (REDUCED, BY_HAND, CAPTURED, FLAT)
"""Sides that are CUDA graphs, and nothing else."""


@dataclass(frozen=True)
class Reference:
    """A model as a plan needs it; `steps` make a block of a few tenths of a second on a large GPU."""

    batch_size: int
    steps: int
    package: str | None = None


REFERENCES = {
    "mlp": Reference(64, steps=100),
    "gpt10m": Reference(16, steps=20),
    "gpt124m": Reference(16, steps=4),
    "resnet50": Reference(128, steps=4, package="torchvision"),
    "vit": Reference(64, steps=4, package="torchvision"),
}

ROUNDS = 8


@dataclass(frozen=True)
class Plan:
    """One model on one number of workers. `sizes` are arguments of the workload, if it is not at its reference size."""

    model: str
    workers: int
    sides: tuple[str, ...]
    steps: int
    rounds: int
    device: str = "cuda"
    sizes: dict[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _refuse_odd_sides(self.sides, self.workers)
        if self.batch_size % self.workers:
            raise BadArgument(
                f"the global batch of {self.model}, {self.batch_size} samples, cannot be cut into {self.workers} equal "
                f"shares, and DDP counts unequal ones as equal: use a number of workers that divides {self.batch_size}"
            )

    @property
    def batch_size(self) -> int:
        return self.sizes.get("batch_size", REFERENCES[self.model].batch_size)

    @property
    def title(self) -> str:
        return f"{self.model} on {self.workers} worker{'' if self.workers == 1 else 's'}, {self.device}"

    @property
    def ddp(self) -> str:
        """The baseline among the sides that is data parallel."""
        return DDP_GLOO if DDP_GLOO in self.sides else DDP

    def written(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Plan":
        """What `written` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "sides": tuple(fields["sides"])})


def make_plans(
    models: Sequence[str], workers: Sequence[int], sides: Sequence[str] | None, steps: int | None, rounds: int
) -> tuple[Plan, ...]:
    """A plan for every model on every number of workers, each once; raises before anything runs."""
    names = list(REFERENCES) if "all" in models else list(dict.fromkeys(models))
    for name in names:
        _refuse_unknown(name)
    return tuple(
        Plan(name, count, tuple(dict.fromkeys(sides or usual_sides(count))), steps or REFERENCES[name].steps, rounds)
        for name in names
        for count in dict.fromkeys(workers)
    )


def require_packages(plans: Sequence[Plan]) -> None:
    """Raises if a model comes from a package that is not installed."""
    for plan in plans:
        package = REFERENCES[plan.model].package
        if package is not None:
            require(package, plan.model)


def parse_sides(text: str) -> tuple[str, ...]:
    """Names of sides with commas between them, in the order they are given."""
    names = tuple(" ".join(word.split()) for word in text.split(","))
    known = tuple(dict.fromkeys((*SIDES, *SIDES_OF_SEVERAL)))
    for name in names:
        if name not in known:
            raise BadArgument(f"there is no side {name!r}: choose from {', '.join(known)}")
    return names


def usual_sides(num_workers: int) -> tuple[str, ...]:
    return SIDES if num_workers == 1 else USUAL_OF_SEVERAL


def order(round_number: int, sides: Sequence[str]) -> list[str]:
    """The sides in the order of one round, drawn by lot: no side always follows the same neighbour."""
    return random.Random(round_number).sample(list(sides), len(sides))


def reference_among(sides: Sequence[str]) -> str:
    """The side that the others are held against."""
    return next((side for side in REFERENCES_IN_ORDER if side in sides), sides[0])


def _refuse_unknown(model: str) -> None:
    if model not in REFERENCES:
        raise BadArgument(f"the model {model!r} is not measured on a GPU: choose from {', '.join(REFERENCES)} or all")


def _refuse_odd_sides(sides: Sequence[str], num_workers: int) -> None:
    allowed = SIDES if num_workers == 1 else SIDES_OF_SEVERAL
    odd = [side for side in sides if side not in allowed]
    if odd or not sides:
        what = f"{', '.join(odd)} cannot be measured" if odd else "there are no sides to measure"
        raise BadArgument(f"{what} on {num_workers} worker{'s' * (num_workers > 1)}: choose from {', '.join(allowed)}")
