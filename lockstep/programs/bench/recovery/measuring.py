"""Runs a recovery benchmark: are the bits the same after a loss, and how long does a loss take? Without torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.launch.orphans import OrphanGuard
from lockstep.launch.signals import LauncherSignals
from lockstep.programs.bench.launching import ResultsDiffer, result_folder
from lockstep.programs.bench.recovery.plan import (
    LOCKSTEP_SIDES,
    PROBE_STEPS,
    RESTART,
    SURVIVORS,
    Kill,
    Plan,
    Round,
    Side,
    make_rounds,
    num_steps,
)
from lockstep.programs.bench.recovery.program import Watch
from lockstep.programs.bench.recovery.recovery import Recovery
from lockstep.programs.bench.recovery.rows import make_report
from lockstep.programs.bench.recovery.trial import Trial, Trials
from lockstep.settings.environment import process_environment

Follow = Callable[[int, str], None]
"""Is told how many runs are done, and a few words on the last one."""

Measured = dict[str, Recovery]
"""The recovery of every side in one round."""


def bench_recovery(plan: Plan, follow: Follow) -> dict[str, Any]:
    """Measures the plan; gives the report. Main thread only.

    Raises `ResultsDiffer` if a loss changed lockstep's bits.
    """
    with result_folder() as folder, LauncherSignals() as signals, OrphanGuard() as guard:
        trials = Trials(plan, folder, Watch(signals), guard, process_environment())
        return Benchmark(plan, trials, follow).run()


@dataclass
class Benchmark:
    """Goes through a plan. `expected` holds the digests of undisturbed runs, once they are known."""

    plan: Plan
    trials: Trials
    follow: Follow
    expected: dict[bool, str] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)
    runs: int = 0

    def run(self) -> dict[str, Any]:
        probe = self._try(SURVIVORS, PROBE_STEPS)
        steps = {side.name: num_steps(side, probe.step_s, self.plan.after_s) for side in self.plan.sides}
        self._learn_what_is_right(steps)
        checking, *rounds = make_rounds(self.plan)
        self._round(checking, steps)
        measured = [self._round(each, steps) for each in rounds]
        agrees = not self.differing if self.plan.baseline else None
        return make_report(self.plan, rounds, measured, steps, agrees, probe.result.machine)

    def _learn_what_is_right(self, steps: dict[str, int]) -> None:
        for side in (SURVIVORS, RESTART) if self.plan.baseline else (SURVIVORS,):
            self.expected[side.is_lockstep] = self._try(side, steps[side.name]).result.digest

    def _round(self, each: Round, steps: dict[str, int]) -> Measured:
        """The sides' recoveries, by name, in the order of the plan."""
        found = {side.name: self._recover(side, steps[side.name], each.kill) for side in each.order}
        return {side.name: found[side.name] for side in self.plan.sides}

    def _recover(self, side: Side, steps: int, kill: Kill) -> Recovery:
        trial = self._try(side, steps, kill)
        if trial.result.digest != self.expected[side.is_lockstep]:
            self._object(side, kill)
        assert trial.recovery is not None
        return trial.recovery

    def _object(self, side: Side, kill: Kill) -> None:
        """A faster wrong answer is worth nothing. That the baseline's is wrong is told, and its times are kept."""
        if side in LOCKSTEP_SIDES:
            raise ResultsDiffer(
                f"{side.title}: worker {kill.victim} was killed after step {kill.step}, and the run ended with other "
                "bits than an undisturbed one. Nothing is reported"
            )
        self.differing.append(side.name)

    def _try(self, side: Side, steps: int, kill: Kill | None = None) -> Trial:
        trial = self.trials.run(side, steps, kill)
        self.runs += 1
        self.follow(self.runs, _facts(side, trial))
        return trial


def _facts(side: Side, trial: Trial) -> str:
    if trial.recovery is None:
        return f"{side.title}: undisturbed, {1000 * trial.step_s:.0f} ms a step"
    return f"{side.title}: next step after {trial.recovery.next_s:.2f} s"
