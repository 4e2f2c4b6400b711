"""`lockstep advise`: advice about more workers, from the noise that a run has recorded. Without torch.

`find` reads the record, also while the run goes on; `use_of` is the best use of a number of workers.
"""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from lockstep.errors import BadArgument, BadEnvironment
from lockstep.events import NoiseMeasured
from lockstep.launch.supervision.messages import count
from lockstep.observe.noise_lines import RECENT, advice_on, seen, usual
from lockstep.observe.recorder import FILE, event_of
from lockstep.optim.noise.advice import Advice
from lockstep.optim.noise.critical_batch import steps_and_samples

RATES = {"sgd": lambda factor: factor, "adam": math.sqrt}

TAIL_BYTES = 2**18
"""How much of the record's end is read: several times RECENT lines, however long the run."""


@dataclass(frozen=True)
class UseOfWorkers:
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
    steps: float = 1.0
    samples: float = 1.0
    rate: float | None = 1.0

    def text(self) -> str:
        match self.what:
            case "split":
                lanes = count(math.ceil(self.lanes / self.workers), "lane")
                most = f"{lanes} at most, so {self.enough} are as fast"
                even = f"{lanes} each" if self.enough == self.workers else most
                use = f"split the batch of {self.batch:,.12g} ({even}), with the same numbers; nothing else changes."
            case "grow":
                rate = "" if self.rate is None else f", learning rate × {self.rate:.3g}"
                cost = f"{100 * (1 - self.steps):.0f} % fewer steps, {100 * (self.samples - 1):.0f} % more samples"
                use = f"start with lanes={self.lanes} and grow the batch to {self.batch:,.12g}{rate}: {cost}."
            case "cut":
                use = (
                    f"start with lanes={self.lanes} and keep the batch of {self.batch:,.12g}, learning rate too: one "
                    "that grew with the workers would be beyond the critical batch. Another number of lanes gives "
                    "other last bits."
                )
        return f"{count(self.workers, 'worker')}: {use}"


def use_of(workers: int, advice: Advice) -> UseOfWorkers:
    """How `workers` workers fit the run that the advice is about."""
    if workers <= advice.lanes:
        enough = math.ceil(advice.lanes / math.ceil(advice.lanes / workers))
        return UseOfWorkers(workers, "split", advice.lanes, enough, advice.batch)
    factor = workers / advice.lanes
    grown = advice.batch * factor
    if grown > advice.critical_batch:
        return UseOfWorkers(workers, "cut", workers, workers, advice.batch)
    now, then = steps_and_samples(advice.batch, advice.critical_batch), steps_and_samples(grown, advice.critical_batch)
    rate = None if advice.optimizer is None else RATES[advice.optimizer](factor)
    steps, samples = then.steps / now.steps, then.samples / now.samples
    return UseOfWorkers(workers, "grow", workers, workers, grown, steps, samples, rate)


@dataclass(frozen=True)
class AdviceReport:
    """Advice from what was measured up to `step`; `crew` is None unless a number of workers was asked about."""

    step: int
    advice: Advice
    crew: UseOfWorkers | None

    def text(self) -> str:
        lines = [f"Measured up to step {self.step:,}.", self.advice.text()]
        return "\n".join(lines + ([] if self.crew is None else [self.crew.text()]))

    def to_json(self) -> str:
        return json.dumps({"step": self.step, **asdict(self.advice), "crew": asdict(self)["crew"]})


def report_on(folder: Path, workers: int | None = None) -> AdviceReport:
    """The advice for the run in `folder`; raises TooLittle if it has not measured enough."""
    newest, batch = find(folder)
    advice = advice_on(newest, batch or 1.0)  # a batch of 0 was never measured: refused as too little
    return AdviceReport(newest.step, advice, None if workers is None else use_of(workers, advice))


def find(folder: Path) -> tuple[NoiseMeasured, float]:
    """The newest measurement of the run in `folder`, which may be under way, and the batch that it usually has.

    Raises if there is no run with a record. See Note [The record of noise] in observe/recorder.py.
    """
    try:
        lines = _last_lines(_record_in(folder))
    except OSError as error:
        raise BadEnvironment(f"{folder / FILE} cannot be read: {error.strerror}") from error
    measured = [event for event in map(_measured, lines) if event is not None]
    if not measured:
        raise BadArgument(
            f"{folder / FILE} has no line that can be read: if the run has just begun, ask again after its next "
            f"steps; if not, this lockstep did not write it: move it away and go on with the run"
        )
    # Of the measurements that the newest is made of: an earlier run in the same folder does not count.
    recent = measured[-min(RECENT, max(1, seen(measured[-1]).count)) :]
    return measured[-1], usual([seen(event).batch for event in recent])


def _record_in(folder: Path) -> Path:
    if not folder.is_dir():
        raise BadArgument(f"there is no run in {folder}: name the folder that holds its logs, such as runs/train-1")
    if not (folder / FILE).is_file():
        raise BadArgument(
            f"no noise was recorded in {folder} (there is no {FILE}): name the folder of one run, such as "
            f"runs/train-1, which `lockstep run` started with two lanes or more, and give it some steps"
        )
    return folder / FILE


def _last_lines(path: Path) -> list[bytes]:
    """The last lines, without a first one that is cut off."""
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(start)
        lines = file.read().split(b"\n")
    return lines[1:] if start else lines


def _measured(line: bytes) -> NoiseMeasured | None:
    try:
        return event_of(line)
    except (ValueError, RecursionError):  # half a line, of a worker that was killed or is writing just now
        return None
