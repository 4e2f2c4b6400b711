"""What the script and the command line say about checkpoints, settled into one plan."""

import os
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import BadArgument, BadEnvironment
from lockstep.settings.environment import Overrides
from lockstep.state.checkpoints.checkpoints import checked_folder, checked_keep
from lockstep.state.checkpoints.schedule import Every, parse_every

AUTO, NEVER = "auto", "never"
USUAL_KEEP = 3


@dataclass(frozen=True)
class Asked:
    """Words of one side, None where it said nothing. `resume` is "auto", "never" or the path of a checkpoint."""

    folder: str | os.PathLike[str] | None = None
    every: Every | None = None
    keep: int | None = None
    resume: str | os.PathLike[str] | None = None


@dataclass(frozen=True)
class CheckpointPlan:
    """What holds for this run."""

    folder: Path
    every: Every
    keep: int
    resume: str

    @property
    def facts(self) -> dict[str, object]:
        """What must be equal on all workers. The folder need not be: hosts may have no folder in common."""
        return {
            "resume": self.resume,
            "checkpoints every (steps)": self.every.steps,
            "checkpoints every (minutes)": self.every.minutes,
            "checkpoints kept": self.keep,
        }


def asked_by_script(
    folder: str | os.PathLike[str] | None,
    every_steps: int | None,
    every_minutes: float | None,
    keep: int | None,
    resume: str | os.PathLike[str] | None,
) -> Asked:
    """The words of `run.checkpoints(...)`."""
    every = None if every_steps is None and every_minutes is None else Every(every_steps, every_minutes)
    return Asked(folder, every, keep, resume)


def asked_on_the_line(overrides: Overrides) -> Asked:
    """The words of the command line."""
    try:
        every = None if overrides.checkpoint_every is None else parse_every(overrides.checkpoint_every)
    except BadArgument as error:
        raise BadEnvironment(f"LOCKSTEP_CHECKPOINT_EVERY cannot be used: {error}") from error
    return Asked(overrides.checkpoints, every, overrides.checkpoint_keep, overrides.resume)


def settle(asked: Asked, overrides: Overrides) -> CheckpointPlan:
    """The command line goes over the script. If neither names a folder it is `checkpoints` beside the run's logs."""
    line = asked_on_the_line(overrides)
    beside_logs = None if overrides.run_dir is None else overrides.run_dir / "checkpoints"
    folder = _first(line.folder, asked.folder, beside_logs)
    if folder is None:
        raise BadArgument("run.checkpoints needs a folder to keep them in: run.checkpoints('checkpoints')")
    return CheckpointPlan(
        folder=checked_folder(folder),
        every=_first(line.every, asked.every) or Every(),
        keep=checked_keep(_first(line.keep, asked.keep, USUAL_KEEP)),
        resume=os.fspath(_first(line.resume, asked.resume, AUTO)),
    )


def _first(*values):  # type: ignore[no-untyped-def]
    return next((value for value in values if value is not None), None)
