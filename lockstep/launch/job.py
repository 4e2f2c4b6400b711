"""What to launch, as a value, and the command and variables that follow from it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.settings.environments import lockstep_run
from lockstep.settings.environments.lockstep_run import Bootstrap

# A launcher further out may have set these; they are not true for our workers.
_NOT_INHERITED = (
    lockstep_run.LISTEN_FD,
    lockstep_run.STATUS_FD,
    lockstep_run.ENDPOINTS,
    lockstep_run.CONTROL_FD,
    lockstep_run.FORKS,
    lockstep_run.MASTER_ADDR,
    lockstep_run.LOCAL_RANK,
    lockstep_run.LOCAL_SIZE,
    lockstep_run.SECRET,
    *lockstep_run.TORCH_DISTRIBUTED,
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
)
FAULT_BUDGET = 16
"""How many lost workers are borne without progress, where nobody says another number."""

HANG_S = 300.0
"""For how long a worker that others wait for may show no sign of work, where nobody says another time."""

RESUME = "LOCKSTEP_RESUME"
ASSIGNMENT = "LOCKSTEP_ASSIGNMENT"
STRATEGY = "LOCKSTEP_STRATEGY"


@dataclass(frozen=True)
class Job:
    """A program and the workers that run it. `environment` holds extra variables for all of them.

    The run survives `fault_budget` lost workers, and each new step gives one back; `spares` processes wait to replace
    them. A worker that others wait for is ended when it has shown no sign of work for `hang_s`. `resume` ("auto",
    "never" or a path) and the options of checkpoints override the script. With `torch_distributed`, workers have
    the variables with which a script opens a process group of its own.
    """

    program: str
    run_dir: Path
    module: bool = False
    arguments: tuple[str, ...] = ()
    num_workers: int = 1
    threads: int | None = None
    lanes: int | None = None
    seed: int | None = None
    device: str | None = None
    strategy: str | None = None
    assignment: tuple[tuple[int, ...], ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    fault_budget: int = 0
    hang_s: float = HANG_S
    copies: bool = True
    """Whether a worker may be replaced by a copy of another. See Note [Replacement by a copy] in control.py."""
    load_once: bool | None = None
    """Whether workers are forked from the first, which loads torch; None: if the strategy is a sharded one. See Note
    [Loaded once] in load_once.py."""
    spares: int = 0
    resume: str | None = None
    checkpoints: Path | None = None
    checkpoint_every: str | None = None
    checkpoint_keep: int | None = None
    torch_distributed: bool = False
    rebalance: bool | None = None
    """Whether lanes move away from a slow worker; None leaves that to the script."""
    timeline: bool = False
    """Whether workers write a timeline of all steps into `run_dir`."""
    is_run: bool = True
    """Whether the launcher reports an error if several workers never call `lockstep.start`."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "lockstep.launch.worker", *self._program()]

    def spare_command(self, part_fd: int) -> list[str]:
        return [sys.executable, "-m", "lockstep.launch.worker.spare", str(part_fd), *self._program()]

    def variables_of_all(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The variables that every worker has: the user's, then the job's extra ones, then what the launch fixes."""
        kept = {name: value for name, value in inherited.items() if name not in _NOT_INHERITED}
        return {
            "PYTHONHASHSEED": "0",  # a set of words has the same order on every worker, and after a resume
            "OMP_NUM_THREADS": "1",  # where neither the user nor the job sets another number
            "TORCH_CPP_LOG_LEVEL": "FATAL",  # its store logs a trace for every lost worker; ours is shorter
            **kept,
            **self.environment,
            **self._settings(),
        }

    def loads_once(self, inherited: Mapping[str, str]) -> bool:
        strategy = self.variables_of_all(inherited).get(STRATEGY, "")
        return strategy.startswith("sharded") if self.load_once is None else self.load_once

    def variables_of_one(self, boot: Bootstrap, num_workers: int, port: int, free_port: int) -> dict[str, str]:
        """The variables of one worker among `num_workers`. An `assignment` holds only for the job's `num_workers`."""
        variables = lockstep_run.variables(boot, num_workers, port)
        if self.torch_distributed:
            variables |= lockstep_run.torch_distributed(boot, num_workers, free_port)
        fits = self.assignment is None or num_workers == self.num_workers
        return variables if fits else {**variables, ASSIGNMENT: ""}

    def _program(self) -> list[str]:
        return [*(["--module"] if self.module else []), self.program, *self.arguments]

    def _settings(self) -> dict[str, str]:
        settings = {
            "LOCKSTEP_LANES": self.lanes,
            "LOCKSTEP_SEED": self.seed,
            "LOCKSTEP_DEVICE": self.device,
            STRATEGY: self.strategy,
            ASSIGNMENT: None if self.assignment is None else write_assignment(self.assignment),
            "LOCKSTEP_THREADS": self.threads,
            "OMP_NUM_THREADS": self.threads,
            "MKL_NUM_THREADS": self.threads,
            RESUME: self.resume,
            "LOCKSTEP_REBALANCE": None if self.rebalance is None else int(self.rebalance),
            "LOCKSTEP_TIMELINE": int(self.timeline) or None,
            "LOCKSTEP_CHECKPOINTS": None if self.checkpoints is None else self.checkpoints.absolute(),
            "LOCKSTEP_CHECKPOINT_EVERY": self.checkpoint_every,
            "LOCKSTEP_CHECKPOINT_KEEP": self.checkpoint_keep,
            "PYTHONUNBUFFERED": 1,
        }
        return {name: str(value) for name, value in settings.items() if value is not None}


def write_assignment(assignment: tuple[tuple[int, ...], ...]) -> str:
    """The text that `parse_assignment` reads back."""
    return ";".join(",".join(map(str, lanes)) for lanes in assignment)
