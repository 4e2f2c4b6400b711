"""One run of one side from start to end, with a worker killed on the way or none. Without torch."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.launch.orphans import OrphanGuard
from lockstep.programs.bench.launching import Stopped
from lockstep.programs.bench.recovery.command import VARIABLES, command_of
from lockstep.programs.bench.recovery.commits import last_step, read_commits, read_workers
from lockstep.programs.bench.recovery.gate import Gate
from lockstep.programs.bench.recovery.plan import Kill, Plan, Side
from lockstep.programs.bench.recovery.program import Program, Watch
from lockstep.programs.bench.recovery.readiness import Warmth
from lockstep.programs.bench.recovery.recovery import Recovery, recovery_from, usual_step_s
from lockstep.programs.bench.recovery.task import Result, Task

START_S = 120.0
"""How long workers may take to be ready."""

STEPS_S = 240.0
"""How long a run may take then."""


@dataclass(frozen=True)
class Trial:
    """What a run gave: the result of its training, the time of a step, and the recovery if a worker was killed."""

    result: Result
    step_s: float
    recovery: Recovery | None


class Trials:
    """Makes trials, one at a time, below `folder`."""

    def __init__(
        self, plan: Plan, folder: Path, watch: Watch, guard: OrphanGuard, inherited: Mapping[str, str]
    ) -> None:
        self._plan, self._folder, self._watch, self._guard = plan, folder, watch, guard
        self._environment = {**inherited, **VARIABLES}

    def run(self, side: Side, steps: int, kill: Kill | None = None) -> Trial:
        """Raises `Stopped` if the run did not come to its end; what it wrote is then kept."""
        place = self._folder / side.name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        task = Task(self._plan.model, steps, str(place), side.save_every)
        command = command_of(side, self._plan, task, place / "run")
        killed_s = None
        with Gate(place) as gate, Program(command, self._environment, place / "output.log", self._guard) as program:
            self._make_ready(side, program, place)
            gate.open()
            if kill is not None:
                killed_s = self._kill(side, kill, program, place)
            self._follow(side, program, STEPS_S, "the end of the run", lambda: program.exit_code is not None)
        return self._learn(place, killed_s)

    def _make_ready(self, side: Side, program: Program, place: Path) -> None:
        """All workers wait at the gate, and all spares are warm."""
        everyone = set(range(self._plan.workers))
        self._follow(side, program, START_S, "the workers", lambda: read_workers(place).keys() == everyone)
        for pid in read_workers(place).values():
            program.note(pid)
        warmth = Warmth(program.pid, side.spares)
        self._follow(side, program, START_S, "the spare", warmth.reached)

    def _kill(self, side: Side, kill: Kill, program: Program, place: Path) -> float:
        """The victim is dead; when it was killed."""
        victim = read_workers(place)[kill.victim]
        reached = f"step {kill.step}"
        self._follow(side, program, STEPS_S, reached, lambda: last_step(read_commits(place)) >= kill.step)
        self._watch.rest(kill.fraction * usual_step_s(read_commits(place)))
        killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        return killed_s

    def _follow(self, side: Side, program: Program, within_s: float, awaited: str, reached: Callable[[], bool]) -> None:
        """Waits until `reached()`. A launcher that ends in any way but well has failed."""
        self._watch.until(lambda: program.exit_code is not None or reached(), within_s, f"{side.title}: {awaited}")
        if program.exit_code or not reached():
            raise Stopped(
                f"✗ {side.title}: the run ended with exit code {program.exit_code} before {awaited}. "
                f"Its output: {program.output}",
                1,
                interrupted=False,
            )

    def _learn(self, place: Path, killed_s: float | None) -> Trial:
        commits = read_commits(place)
        recovery = None if killed_s is None else recovery_from(commits, killed_s, self._plan.workers)
        return Trial(Result.read(place), usual_step_s(commits), recovery)
