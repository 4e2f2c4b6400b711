"""From the measured noise to what to do with more workers: grow the batch, by which rule, or split the same one."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Literal

from lockstep.errors import BadArgument, LockstepError
from lockstep.optim.noise.critical_batch import steps_and_samples
from lockstep.optim.noise.estimate import LEAST_COUNT, WIDEST, Noise, positive

Position = Literal["below", "near", "beyond"]

FACTORS = (2, 4, 8)
WARM_UP_EPOCHS = 5
WARM_UP_SHARE = 5 / 90  # of all steps: Goyal et al. 2017 warm up for 5 of 90 epochs
RULES = {
    "sgd": "linear: a batch k times larger takes a learning rate k times larger",
    "adam": "square root: a batch k times larger takes a learning rate √k times larger",
    None: "linear for SGD, the square root of the growth for Adam; say optimizer= for numbers",
}


@dataclass
class TooLittle(LockstepError):  # noqa: N818
    """The noise is not known well enough to advise; the message has how much more is needed."""

    count: int
    why: str
    needed: str

    def __str__(self) -> str:
        return f"no advice from {self.count} measurements: {self.why}. {self.needed}"


@dataclass(frozen=True)
class Growth:
    """What a batch `factor` times larger would do to the steps and samples needed: 0.5 is half as many.

    `rate` is the factor on the learning rate; None where no rule holds, or the optimizer is not known.
    """

    factor: int
    batch: float
    steps: float
    samples: float
    rate: float | None
    position: Position

    def text(self) -> str:
        grown = f"  {self.factor}× the workers and the batch ({_count(self.batch)})"
        cost = f"{_percent(1 - self.steps)} fewer steps, {_percent(self.samples - 1)} more samples"
        return f"{grown}: {cost}{self._what_to_do()}"

    def _what_to_do(self) -> str:
        if self.position == "beyond":
            return "; not advised"
        return "" if self.rate is None else f"; learning rate × {self.rate:.3g}"


@dataclass(frozen=True)
class Advice:
    """How the batch compares with the critical batch, and what follows: as `text()` and as `to_json()`."""

    batch: float
    lanes: int
    optimizer: Literal["sgd", "adam"] | None
    critical_batch: float
    low: float
    high: float
    count: int
    preconditioned: bool
    position: Position
    growths: tuple[Growth, ...]
    rule: str
    warm_up_epochs: int
    warm_up_steps: int | None
    caveat: str | None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def text(self) -> str:
        lines = [self._standing(), *(growth.text() for growth in self.growths), self._verdict()]
        if self.position != "beyond":
            lines += [f"Rule, up to the critical batch: {self.rule}.", self._warm_up()]
        return "\n".join(lines + ([self.caveat] if self.caveat else []))

    def brief(self) -> tuple[str, str]:
        """The two sentences that matter most: how the batch compares, and what to do."""
        return self._standing(), self._verdict()

    def _standing(self) -> str:
        critical = f"the critical batch, about {_count(self.critical_batch)}"
        sure = f"95 % sure: {_count(self.low)} to {_count(self.high)}, from {self.count} measurements"
        return f"Batch {_count(self.batch)} is {self.position} {critical} ({sure})."

    def _verdict(self) -> str:
        if self.position == "below":
            return f"Grow the batch with the workers, up to about {_count(self.critical_batch)}."
        split = (
            f"Use more workers to split the same batch: up to {self.lanes}, one for each lane, with the same numbers."
        )
        why = "Growing passes the critical batch" if self.position == "near" else "Do not grow the batch"
        return f"{why}: it buys few steps for many samples. {split}"

    def _warm_up(self) -> str:
        steps = "" if self.warm_up_steps is None else f", or about {self.warm_up_steps:,} steps"
        return f"Warm up from the old rate to the new one over {self.warm_up_epochs} epochs{steps}."


def advise(
    noise: Noise,
    *,
    batch: float,
    lanes: int,
    optimizer: Literal["sgd", "adam"] | None = None,
    steps: int | None = None,
) -> Advice:
    """What to do at this batch, given the noise; raises TooLittle where it is not known well enough.

    `steps` is the length of the whole run, for the length of the warm-up. Adam needs the noise of preconditioned
    squares: with a plain one the advice has a caveat.
    """
    batch = positive("batch", batch)
    _refuse_nonsense(noise, lanes, optimizer, steps)
    _refuse_too_little(noise)
    critical = noise.critical_batch
    return Advice(
        batch=batch,
        lanes=lanes,
        optimizer=optimizer,
        critical_batch=critical,
        low=noise.low,
        high=noise.high,
        count=noise.count,
        preconditioned=noise.preconditioned,
        position=_position(batch, critical),
        growths=tuple(_growth(factor, batch, critical, optimizer) for factor in FACTORS),
        rule=RULES[optimizer],
        warm_up_epochs=WARM_UP_EPOCHS,
        warm_up_steps=None if steps is None else max(1, round(WARM_UP_SHARE * steps)),
        caveat=_caveat(noise, optimizer),
    )


def _position(batch: float, critical: float) -> Position:
    """Below: doubling stays within the critical batch. Near: it does not."""
    if batch > critical:
        return "beyond"
    return "below" if 2 * batch <= critical else "near"


def _growth(factor: int, batch: float, critical: float, optimizer: str | None) -> Growth:
    now, then = steps_and_samples(batch, critical), steps_and_samples(factor * batch, critical)
    position = _position(factor * batch, critical)
    rates = {"sgd": float(factor), "adam": math.sqrt(factor)}
    return Growth(
        factor=factor,
        batch=factor * batch,
        steps=then.steps / now.steps,
        samples=then.samples / now.samples,
        rate=None if position == "beyond" or optimizer is None else rates[optimizer],
        position=position,
    )


def _caveat(noise: Noise, optimizer: str | None) -> str | None:
    if optimizer == "adam" and not noise.preconditioned:
        return (
            "Only the plain noise scale is known. Adam sees the preconditioned one, which may be several times "
            "larger or smaller: measure that before you rely on this."
        )
    return None


def _refuse_nonsense(noise: Noise, lanes: int, optimizer: str | None, steps: int | None) -> None:
    if not isinstance(noise, Noise):
        raise BadArgument(f"advice needs the .noise of a NoiseScale, not {noise!r}")
    if optimizer not in RULES:
        raise BadArgument(f"optimizer must be 'sgd', 'adam' or None, not {optimizer!r}")
    if optimizer == "sgd" and noise.preconditioned:
        raise BadArgument("this noise is of preconditioned squares, which SGD does not see: give the plain one")
    for what, value in (("lanes", lanes), ("steps", 1 if steps is None else steps)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadArgument(f"{what} must be a whole number of 1 or more, not {value!r}")


def _refuse_too_little(noise: Noise) -> None:
    if noise.sure:
        return
    if noise.count < LEAST_COUNT:
        more = LEAST_COUNT - noise.count
        raise TooLittle(noise.count, f"{LEAST_COUNT} are needed", f"Measure {more} more.")
    if not 0 < noise.low <= noise.high < math.inf:
        what, other = ("gradient", "its noise") if noise.low > 0 else ("noise", "0")
        why = f"the {what} cannot be distinguished from {other}"
        raise TooLittle(noise.count, why, "Measure four times as many, or with more samples a step.")
    needed = _num_needed(noise)
    raise TooLittle(
        noise.count,
        f"the critical batch may be anything from {_count(noise.low)} to {_count(noise.high)}",
        f"About {needed:,} are needed, smoothed with a memory of {math.ceil((needed + 1) / 2):,} or more.",
    )


def _num_needed(noise: Noise) -> int:
    """How many equally weighted measurements bring high/low down to WIDEST: its logarithm shrinks as 1/√count.

    A smoothing of memory m is worth 2m − 1 of them at most.
    """
    return math.ceil(noise.effective * (math.log(noise.high / noise.low) / math.log(WIDEST)) ** 2)


def _count(value: float) -> str:
    """Whole numbers as they are; an estimate with three digits."""
    return f"{value:,.0f}" if value == round(value) else f"{float(f'{value:.3g}'):,.12g}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
