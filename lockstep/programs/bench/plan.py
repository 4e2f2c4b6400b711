"""What a step benchmark measures, as a value. Without torch, so that a wrong word is refused at once."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lockstep.errors import BadArgument

LOCKSTEP, DDP, ON_BACKEND = "lockstep", "ddp", "ddp_on_lockstep"
ONE_THREAD, ALL_THREADS = "plain_one_thread", "plain_all_threads"
SIDES = (LOCKSTEP, DDP, ON_BACKEND, ONE_THREAD, ALL_THREADS)


@dataclass(frozen=True)
class Reference:
    """A reference model as a plan needs it; `steps` make a block of about a second."""

    batch_size: int
    steps: int


REFERENCES = {
    "mlp": Reference(64, steps=20),
    "wide": Reference(256, steps=15),
    "gpt": Reference(8, steps=3),
    "cnn": Reference(64, steps=5),
}


@dataclass(frozen=True)
class Plan:
    """One model on one number of workers; every round has one block of `steps` timed steps for each side."""

    model: str
    workers: int
    steps: int
    rounds: int

    def __post_init__(self) -> None:
        batch_size = REFERENCES[self.model].batch_size
        if batch_size % self.workers:
            raise BadArgument(
                f"the global batch of {self.model}, {batch_size} samples, cannot be cut into {self.workers} "
                "equal shares, and DDP counts unequal ones as equal: "
                f"use {_listed(_divisors(batch_size))} workers"
            )

    @property
    def title(self) -> str:
        return f"{self.model} on {self.workers} worker{'' if self.workers == 1 else 's'}"

    def written(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Plan":
        """What `written` wrote."""
        return cls(**json.loads(text))


def make_plans(models: Sequence[str], workers: Sequence[int], steps: int | None, rounds: int) -> tuple[Plan, ...]:
    """A plan for every model on every number of workers, each once; raises before anything runs."""
    names = list(REFERENCES) if "all" in models else list(dict.fromkeys(models))
    return tuple(
        Plan(name, count, steps or REFERENCES[name].steps, rounds) for name in names for count in dict.fromkeys(workers)
    )


def order(round_number: int) -> tuple[str, ...]:
    """The sides in the order of one round.

    In ten rounds every side stands twice in every place, and follows another as often as that follows it.
    So neither a slow drift of the machine nor what a neighbour left in the caches favours one of them.
    """
    shift = round_number // 2 % len(SIDES)
    turned = SIDES[shift:] + SIDES[:shift]
    return turned[::-1] if round_number % 2 else turned


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
