"""The noise of a run in words: when a line is worth showing, and the advice at the end."""

import math
import shlex
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from lockstep.events import Closed, Event, NoiseMeasured
from lockstep.optim.noise import Noise
from lockstep.optim.noise.advice import Advice, advise

RECENT = 100
"""Over how many measurements the usual batch is taken: about as many as the noise is smoothed over."""

OPTIMIZERS: dict[str, Literal["sgd", "adam"]] = {"sgd": "sgd", "adam": "adam"}


class NoiseLines:
    """Makes the lines for each event; it must get every event. `run_dir` is where the record is.

    A line when the noise is first known well enough, another whenever it has doubled or halved since the last one, and
    advice at the end.
    """

    def __init__(self, run_dir: Path | None) -> None:
        self._run_dir = None if run_dir is None else run_dir.absolute()
        self._batches: deque[float] = deque(maxlen=RECENT)
        self._newest: NoiseMeasured | None = None
        self._shown: float | None = None

    def lines(self, event: Event) -> list[str]:
        match event:
            case NoiseMeasured():
                self._newest = event
                self._batches.append(seen(event).batch)
                return self._news(seen(event))
            case Closed():
                return self._farewell()
        return []

    @property
    def words(self) -> str:
        """The newest measurement in words; nothing before the first."""
        return "" if self._newest is None else in_words(self._newest, usual(self._batches))

    def _news(self, noise: Noise) -> list[str]:
        if not _is_known(noise) or (
            self._shown is not None and self._shown / 2 < noise.critical_batch < self._shown * 2
        ):
            return []
        self._shown = noise.critical_batch
        return [f"  {self.words}"]

    def _farewell(self) -> list[str]:
        if self._newest is None or not _is_known(seen(self._newest)):
            return []
        advice = advice_on(self._newest, usual(self._batches))
        standing, *rest = advice.brief() + ((advice.caveat,) if advice.caveat else ())
        if self._run_dir is not None:
            rest.append(f"More: lockstep advise --run {shlex.quote(str(self._run_dir))}")
        return [f"  advice: {standing}", *(f"    {line}" for line in rest)]


def seen(event: NoiseMeasured) -> Noise:
    """The noise that the optimizer of the run sees; the plain one where no other is known."""
    noise: Noise = event.plain if event.optimizer != "adam" or event.preconditioned is None else event.preconditioned
    return noise


def usual(batches: Sequence[float]) -> float:
    """The middle one of some batches, the larger of two: the last batch of an epoch, often a small one, is not it."""
    return sorted(batches)[len(batches) // 2]


def advice_on(event: NoiseMeasured, batch: float) -> Advice:
    """What to do at this batch; raises TooLittle where the noise is not known well enough."""
    return advise(seen(event), batch=batch, lanes=event.num_lanes, optimizer=OPTIMIZERS.get(event.optimizer))


def in_words(event: NoiseMeasured, batch: float) -> str:
    """`noise: critical batch about 812 (610 to 1,090, 40 measurements); the batch is 256`

    Both batches are in the unit of the lanes' weights, samples or tokens, which is not known here.
    """
    noise = seen(event)
    measurements = f"{noise.count} measurement{'' if noise.count == 1 else 's'}"
    interval = f"{_about(noise.low)} to {_about(noise.high)}, {measurements}{'' if noise.sure else ', not sure yet'}"
    critical = f"critical batch{_sight(event)} about {_about(noise.critical_batch)}"
    return f"noise: {critical} ({interval}); the batch is {batch:,.12g}"


def _sight(event: NoiseMeasured) -> str:
    if event.optimizer != "adam":
        return ""
    return " as Adam sees it" if seen(event).preconditioned else " (plain, not as Adam sees it)"


def _is_known(noise: Noise) -> bool:
    """Whether it is known well enough, and finite: formatting must not raise in a training."""
    return noise.sure and math.isfinite(noise.critical_batch) and math.isfinite(noise.high)


def _about(value: float) -> str:
    """An estimate with three digits."""
    return f"{float(f'{value:.3g}'):,.12g}".replace("inf", "infinity")
