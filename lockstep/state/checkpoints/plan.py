"""The checkpoint options of the script and the command line, as one plan; and when the next one is due. No torch."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import BadArgument, BadEnvironment
from lockstep.settings.environment import Overrides, first_given
from lockstep.settings.limits import as_whole
from lockstep.settings.paths import as_path

AUTO, NEVER = "auto", "never"
USUAL_KEEP = 3
USUAL_MINUTES = 10.0

_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_MINUTES = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1 / 60),
    **dict.fromkeys(("min", "minute", "minutes"), 1.0),
    **dict.fromkeys(("h", "hour", "hours"), 60.0),
}


@dataclass(frozen=True)
class Every:
    """How often; with both, whichever comes first. With neither it is every ten minutes."""

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and (type(self.steps) is not int or self.steps < 1):
            raise BadArgument(f"checkpoints come every so many whole steps, 1 or more, not every {self.steps!r}")
        number = type(self.minutes) in (int, float)
        if self.minutes is not None and not (number and 0 < self.minutes < float("inf")):
            raise BadArgument(f"checkpoints come every so many minutes, more than 0, not every {self.minutes!r}")
        if self.steps is None and self.minutes is None:
            object.__setattr__(self, "minutes", USUAL_MINUTES)


def parse_every(text: str) -> Every:
    """`100 steps`, `10 min`, or both with a comma between them."""
    values: dict[str, float] = {}
    for part in text.lower().split(","):
        kind, value = _parsed(text, part.strip())
        if kind in values:
            raise BadArgument(f"{text!r} says twice after how many {kind} a checkpoint is due: say it once")
        values[kind] = value
    steps = values.get("steps")
    return Every(None if steps is None else int(steps), values.get("minutes"))


def _parsed(text: str, part: str) -> tuple[str, float]:
    match = _PART.fullmatch(part)
    number, unit = match.groups() if match else ("", "")
    if unit in _MINUTES:
        return "minutes", float(number) * _MINUTES[unit]
    if unit not in ("step", "steps"):
        where = f"{text[:60]!r}: {part[:60]!r}" if part != text.strip() else repr(text[:60])
        raise BadArgument(
            f"{where} does not say how often: write '100 steps', '10 min', or both as '100 steps, 10 min'"
        )
    steps = as_whole(number)
    if steps is None:
        raise BadArgument(f"{text[:60]!r}: steps are whole, and {number[:60]} is not, or is too many")
    return "steps", steps


@dataclass
class CheckpointSchedule:
    """Counts from the last checkpoint. Steps are those of the run, seconds those of any clock."""

    every: Every
    step: int
    now_s: float

    def due(self, step: int, now_s: float) -> bool:
        """Whether a checkpoint of `step` is due. Never twice for one step.

        Steps are due at multiples, so that those that are saved do not depend on where a run was resumed.
        """
        steps, minutes = self.every.steps, self.every.minutes
        by_steps = steps is not None and step // steps > self.step // steps
        by_time = minutes is not None and now_s - self.now_s >= minutes * 60
        return step > self.step and (by_steps or by_time)

    def done(self, step: int, now_s: float) -> None:
        """Counts from here on."""
        self.step, self.now_s = step, now_s


@dataclass(frozen=True)
class CheckpointOptions:
    """The options of the script, or of the command line; None where one is not given.

    `resume` is "auto", "never" or the path of a checkpoint.
    """

    folder: str | os.PathLike[str] | None = None
    every: Every | None = None
    keep: int | None = None
    resume: str | os.PathLike[str] | None = None


@dataclass(frozen=True)
class CheckpointPlan:
    """The options of this run. The folder need not exist yet; `plan_checkpoints` makes it absolute, since a script may
    go to another working folder while it trains."""

    folder: Path
    every: Every = Every()
    keep: int = USUAL_KEEP
    resume: str = AUTO

    def __post_init__(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise BadArgument(f"{self.folder} is not a folder, so no checkpoints can be kept in it")
        if type(self.keep) is not int or self.keep < 1:
            raise BadArgument(f"keep is how many checkpoints stay, 1 or more, not {self.keep!r}")

    @property
    def facts(self) -> dict[str, object]:
        """What must be equal on all workers. The folder need not be: hosts may have no folder in common."""
        return {
            "resume": self.resume,
            "checkpoints every (steps)": self.every.steps,
            "checkpoints every (minutes)": self.every.minutes,
            "checkpoints kept": self.keep,
        }


def script_options(
    folder: str | os.PathLike[str] | None,
    every_steps: int | None,
    every_minutes: float | None,
    keep: int | None,
    resume: str | os.PathLike[str] | None,
) -> CheckpointOptions:
    """The arguments of `run.checkpoints(...)`."""
    every = None if every_steps is None and every_minutes is None else Every(every_steps, every_minutes)
    return CheckpointOptions(folder, every, keep, resume)


def plan_checkpoints(script: CheckpointOptions, overrides: Overrides) -> CheckpointPlan:
    """The command line overrides the script. If neither names a folder it is `checkpoints` beside the run's logs."""
    try:
        every = None if overrides.checkpoint_every is None else parse_every(overrides.checkpoint_every)
    except BadArgument as error:
        raise BadEnvironment(f"LOCKSTEP_CHECKPOINT_EVERY cannot be used: {error}") from error
    folder = script.folder if overrides.checkpoints is None else None
    folder = first_given(folder, overrides.checkpoint_folder)
    if folder is None:
        raise BadArgument("run.checkpoints needs a folder to keep them in: run.checkpoints('checkpoints')")
    return CheckpointPlan(
        folder=as_path("run.checkpoints(folder=...)", folder).absolute(),
        every=first_given(every, script.every, Every()),
        keep=first_given(overrides.checkpoint_keep, script.keep, USUAL_KEEP),
        resume=str(as_path("run.checkpoints(resume=...)", first_given(overrides.resume, script.resume, AUTO))),
    )
