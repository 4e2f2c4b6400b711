"""What a recovery benchmark kills, and when, as a value. Without torch, so that a wrong word is refused at once.

# Note [A run for every kill]
# Every kill has a run of its own, and only one run is there at a time: no side computes while another is measured,
# every kill finds all workers there, and the bits at the end of every disturbed run are compared with those of an
# undisturbed one. In a round each side loses the same worker in the same step, at the same point of its own step.
"""

import math
import random
from dataclasses import dataclass

from lockstep.errors import BadArgument
from lockstep.programs.bench.plan import REFERENCES

NUM_BATCHES = 4
"""How many batches the data has; a run goes through all of them in every epoch."""

BEFORE = 5
WINDOW = 10
"""A worker is killed after BEFORE steps at least, in any of the WINDOW steps that follow."""

AFTER = 10
"""So many steps follow at least."""

AFTER_S = 6.0
"""A run of lockstep goes on for about so long after the kill, for the replacement to come."""

PROBE_STEPS = 16
"""From so many steps it is learned how long one takes."""


@dataclass(frozen=True)
class Side:
    """A way to bear the loss: lockstep, with copies or `spares`; or torchrun, which saves every `save_every` steps."""

    name: str
    title: str
    copies: bool = True
    spares: int = 0
    save_every: int | None = None

    @property
    def is_lockstep(self) -> bool:
        return self.save_every is None


SURVIVORS = Side("survivors", "lockstep")
ANEW = Side("anew", "lockstep --no-copies", copies=False)
SPARE = Side("spare", "lockstep --no-copies --spares 1", copies=False, spares=1)
RESTART = Side("restart", "torchrun, saved every step", save_every=1)
RESTART_10 = Side("restart_10", "torchrun, saved every 10", save_every=10)
LOCKSTEP_SIDES = (SURVIVORS, ANEW, SPARE)
SIDES = (*LOCKSTEP_SIDES, RESTART, RESTART_10)


@dataclass(frozen=True)
class Plan:
    """`kills` kills of each side, on one model. See Note [A run for every kill]."""

    model: str
    workers: int
    lanes: int
    kills: int
    baseline: bool = True
    after_s: float = AFTER_S
    seed: int = 0

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise BadArgument(f"{self.workers} worker is too few: 2 or more are needed, so that one is left to go on")
        batch_size = REFERENCES[self.model].batch_size
        if self.lanes < self.workers:
            raise BadArgument(f"{self.lanes} lanes leave some of {self.workers} workers idle: give as many or more")
        if self.lanes > batch_size:
            raise BadArgument(
                f"a batch of {self.model} has {batch_size} samples, too few for {self.lanes} lanes: "
                f"use {batch_size} or fewer, and no more workers than lanes"
            )

    @property
    def sides(self) -> tuple[Side, ...]:
        return SIDES if self.baseline else LOCKSTEP_SIDES

    @property
    def title(self) -> str:
        return f"{self.model} on {self.workers} workers"

    @property
    def num_runs(self) -> int:
        """The probe, one undisturbed run of each kind, then all rounds: the first one is not timed."""
        undisturbed = 2 if self.baseline else 1
        return 1 + undisturbed + (self.kills + 1) * len(self.sides)


@dataclass(frozen=True)
class Kill:
    """Worker `victim` gets SIGKILL once `step` is committed, when `fraction` of the next step's usual time is over."""

    victim: int
    step: int
    fraction: float


@dataclass(frozen=True)
class Round:
    """One kill, suffered by every side in turn, in this order."""

    kill: Kill
    order: tuple[Side, ...]


def make_plan(model: str, workers: int, lanes: int | None, kills: int, baseline: bool = True) -> Plan:
    """Raises before anything runs."""
    return Plan(model, workers, default_lanes(model, workers) if lanes is None else lanes, kills, baseline)


def default_lanes(model: str, workers: int) -> int:
    """Two for each worker, so that a lost worker's can go to different ones, as far as there are samples."""
    return max(workers, min(2 * workers, REFERENCES[model].batch_size))


def make_rounds(plan: Plan) -> tuple[Round, ...]:
    """All rounds, the untimed one first: victims, moments and orders by lot, the same ones for the same seed."""
    lots = random.Random(plan.seed)
    return tuple(_make_round(plan, lots) for _ in range(plan.kills + 1))


def _make_round(plan: Plan, lots: random.Random) -> Round:
    kill = Kill(lots.randrange(plan.workers), lots.randrange(BEFORE, BEFORE + WINDOW), lots.random())
    return Round(kill, tuple(lots.sample(plan.sides, len(plan.sides))))


def num_steps(side: Side, step_s: float, after_s: float) -> int:
    """How long a run of the side is, in whole epochs.

    A replacement takes seconds to come, during which lockstep goes on; the baseline goes on only when all are there.
    """
    after = max(AFTER, math.ceil(after_s / step_s)) if side.is_lockstep else AFTER
    return NUM_BATCHES * math.ceil((BEFORE + WINDOW + after) / NUM_BATCHES)
