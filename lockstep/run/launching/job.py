"""What to launch, as a value, and the command and variables that follow from it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.run.environments import lockstep_run
from lockstep.run.environments.lockstep_run import Bootstrap

# A launcher further out may have set these; its words are not true for our workers.
_NOT_INHERITED = (lockstep_run.LISTEN_FD, "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True)
class Job:
    """A program and the workers that shall run it. `environment` holds extra variables for all of them."""

    program: str
    run_dir: Path
    module: bool = False
    arguments: tuple[str, ...] = ()
    num_workers: int = 1
    threads: int | None = None
    lanes: int | None = None
    seed: int | None = None
    assignment: tuple[tuple[int, ...], ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self) -> list[str]:
        kind = ["--module"] if self.module else []
        return [sys.executable, "-m", "lockstep.run.launching.worker", *kind, self.program, *self.arguments]

    def variables(self, inherited: Mapping[str, str], boot: Bootstrap, port: int, free_port: int) -> dict[str, str]:
        """All variables of one worker: the user's, then the job's extra ones, then what the launch fixes."""
        kept = {name: value for name, value in inherited.items() if name not in _NOT_INHERITED}
        return {
            "OMP_NUM_THREADS": "1",  # where neither the user nor the job tells another number
            **kept,
            **self.environment,
            **self._settings(),
            **lockstep_run.variables(boot, self.num_workers, port, free_port),
        }

    def _settings(self) -> dict[str, str]:
        settings = {
            "LOCKSTEP_LANES": self.lanes,
            "LOCKSTEP_SEED": self.seed,
            "LOCKSTEP_ASSIGNMENT": None if self.assignment is None else write_assignment(self.assignment),
            "LOCKSTEP_THREADS": self.threads,
            "OMP_NUM_THREADS": self.threads,
            "MKL_NUM_THREADS": self.threads,
            "PYTHONUNBUFFERED": 1,
        }
        return {name: str(value) for name, value in settings.items() if value is not None}


def write_assignment(assignment: tuple[tuple[int, ...], ...]) -> str:
    """The text that `parse_assignment` reads back."""
    return ";".join(",".join(map(str, lanes)) for lanes in assignment)
