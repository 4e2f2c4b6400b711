"""What to do with a given number of workers: split the batch as it is, grow it, or cut it finer."""

import math
from dataclasses import dataclass
from typing import Literal

from lockstep.optim.noise.advice import Advice
from lockstep.optim.noise.critical_batch import steps_and_samples

RATES = {"sgd": lambda factor: factor, "adam": math.sqrt}


@dataclass(frozen=True)
class Crew:
    """What `workers` workers are best used for; `steps` and `samples` against now, 0.5 is half as many.

    "split": the same lanes and batch, and so the same numbers. "grow": a lane for every worker, each as large as now.
    "cut": a lane for every worker, of the same batch. `rate` is the factor on the learning rate, None if the optimizer
    is not known. `enough` workers would be as fast.
    """

    workers: int
    what: Literal["split", "grow", "cut"]
    lanes: int
    enough: int
    batch: float
    steps: float
    samples: float
    rate: float | None

    def text(self) -> str:
        use = {"split": self._split, "grow": self._grow, "cut": self._cut}[self.what]
        return f"{self.workers} worker{'' if self.workers == 1 else 's'}: {use()}"

    def _split(self) -> str:
        most = math.ceil(self.lanes / self.workers)
        lanes = f"{most} lane{'' if most == 1 else 's'}"
        even = f"{lanes} each" if self.enough == self.workers else f"{lanes} at most, so {self.enough} are as fast"
        return f"split the batch of {self.batch:,.12g} ({even}), with the same numbers; nothing else changes."

    def _grow(self) -> str:
        rate = "" if self.rate is None else f", learning rate × {self.rate:.3g}"
        cost = f"{100 * (1 - self.steps):.0f} % fewer steps, {100 * (self.samples - 1):.0f} % more samples"
        return f"start with lanes={self.lanes} and grow the batch to {self.batch:,.12g}{rate}: {cost}."

    def _cut(self) -> str:
        return (
            f"start with lanes={self.lanes} and keep the batch of {self.batch:,.12g}, learning rate too: one that grew "
            "with the workers would be beyond the critical batch. Another number of lanes gives other last bits."
        )


def crew_of(workers: int, advice: Advice) -> Crew:
    """How `workers` workers fit the run that the advice is about."""
    if workers <= advice.lanes:
        enough = math.ceil(advice.lanes / math.ceil(advice.lanes / workers))
        return Crew(workers, "split", advice.lanes, enough, advice.batch, 1.0, 1.0, 1.0)
    factor = workers / advice.lanes
    grown = advice.batch * factor
    if grown > advice.critical_batch:
        return Crew(workers, "cut", workers, workers, advice.batch, 1.0, 1.0, 1.0)
    now, then = steps_and_samples(advice.batch, advice.critical_batch), steps_and_samples(grown, advice.critical_batch)
    rate = None if advice.optimizer is None else RATES[advice.optimizer](factor)
    steps, samples = then.steps / now.steps, then.samples / now.samples
    return Crew(workers, "grow", workers, workers, grown, steps, samples, rate)
