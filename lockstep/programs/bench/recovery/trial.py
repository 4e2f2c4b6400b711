"""Runs a recovery benchmark: trials, one at a time, each a run of one side from start to end. Without torch."""

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from lockstep.launch.host.orphans import OrphanGuard
from lockstep.launch.host.processes import await_end, process_state
from lockstep.launch.host.signals import SCALE, LauncherSignals
from lockstep.programs.bench.launch import STOPPED, BenchStopped, ResultsDiffer, result_folder, start_program
from lockstep.programs.bench.recovery import log
from lockstep.programs.bench.recovery import plan as kills
from lockstep.programs.bench.recovery.log import TrainingResult, TrainingTask
from lockstep.programs.bench.recovery.plan import PlannedKill, RecoveryPlan, RecoverySide, RecoveryTimes
from lockstep.programs.bench.rounds import Follow, RoundsDone
from lockstep.settings.environment import process_environment

WORKER = "lockstep.programs.bench.recovery.worker"

VARIABLES = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""For all sides. docs/bench.md says why torchrun's store is not shared."""

START_S = 120.0  # how long workers may take to be ready
STEPS_S = 240.0  # how long a run may take then
LOOK_S = 0.02
END_S = 10.0
QUIET_S = 0.5
_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
_SPARE = "lockstep.launch.worker.spare"


@dataclass(frozen=True)
class TrialResult:
    """The result of a run's training, the time of a step, and the recovery if a worker was killed."""

    training: TrainingResult
    step_s: float
    recovery: RecoveryTimes | None


def bench_recovery(plan: RecoveryPlan, follow: Follow) -> dict[str, Any]:
    """Measures the plan; returns the report. Main thread only.

    Raises `ResultsDiffer` if a loss changed lockstep's bits.
    """
    follow(RoundsDone(plan.title, 0, plan.rounds))
    with result_folder() as folder, LauncherSignals() as signals, OrphanGuard() as guard:
        trials = Trials(plan, folder, SignalWatch(signals), guard, process_environment())
        return RecoveryBench(plan, trials, follow).run()


@dataclass
class RecoveryBench:
    """Runs the trials of a plan. `expected` holds the digests of undisturbed runs, once they are known."""

    plan: RecoveryPlan
    trials: "Trials"
    follow: Follow
    expected: dict[bool, str] = field(default_factory=dict)
    baseline_agrees: bool = True
    runs: int = 0

    def run(self) -> dict[str, Any]:
        probe = self._try(kills.SURVIVORS, kills.PROBE_STEPS)
        steps = {side.name: kills.num_steps(side, probe.step_s) for side in self.plan.sides}
        for side in (kills.SURVIVORS, kills.RESTART) if self.plan.baseline else (kills.SURVIVORS,):
            self.expected[side.is_lockstep] = self._try(side, steps[side.name]).training.digest
        checking, *rounds = kills.make_rounds(self.plan)
        self._round(checking, steps)
        measured = [self._round(each, steps) for each in rounds]
        agrees = self.baseline_agrees if self.plan.baseline else None
        return kills.make_report(self.plan, rounds, measured, steps, agrees, probe.training.machine)

    def _round(self, kill: PlannedKill, steps: Mapping[str, int]) -> kills.Measured:
        """The sides' recoveries, by name, in the order of the plan."""
        times = {side.name: self._recover(side, steps[side.name], kill) for side in kill.order}
        return {side.name: times[side.name] for side in self.plan.sides}

    def _recover(self, side: RecoverySide, steps: int, kill: PlannedKill) -> RecoveryTimes:
        """Raises if lockstep's result is wrong. A wrong result of the baseline is reported, and its times are kept."""
        trial = self._try(side, steps, kill)
        if trial.training.digest != self.expected[side.is_lockstep]:
            if side.is_lockstep:
                raise ResultsDiffer(
                    f"{side.title}: worker {kill.victim} was killed after step {kill.step}, and the run ended with "
                    "other bits than an undisturbed one. Nothing is reported"
                )
            self.baseline_agrees = False
        assert trial.recovery is not None
        return trial.recovery

    def _try(self, side: RecoverySide, steps: int, kill: PlannedKill | None = None) -> TrialResult:
        trial = self.trials.run(side, steps, kill)
        self.runs += 1
        facts = f"undisturbed, {1000 * trial.step_s:.0f} ms a step"
        if trial.recovery is not None:
            facts = f"next step after {trial.recovery.next_s:.2f} s"
        doing = f"run {self.runs} of {self.plan.rounds}, {side.title}: {facts}"
        self.follow(RoundsDone(self.plan.title, self.runs, self.plan.rounds, doing))
        return trial


@dataclass(frozen=True)
class Trials:
    """Runs the sides of a plan, one run at a time; their files are in `folder`."""

    plan: RecoveryPlan
    folder: Path
    watch: "SignalWatch"
    guard: OrphanGuard
    inherited: Mapping[str, str]

    def run(self, side: RecoverySide, steps: int, kill: PlannedKill | None = None) -> TrialResult:
        """Raises `BenchStopped` if the run did not finish; its output is then kept."""
        place, workers, killed_s = self.folder / side.name, self.plan.workers, 0.0
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        command = command_of(side, self.plan, TrainingTask(self.plan.model, steps, str(place), side.save_every))
        launcher = LauncherProcess(command, {**self.inherited, **VARIABLES}, place / "output.log", self.guard)
        with log.shut_gate(place) as open_gate, launcher as program:
            wait_for = partial(self._wait_for, side, program)
            everyone, quiet = set(range(workers)), Quiet()
            wait_for("the workers", START_S, lambda: log.read_workers(place).keys() == everyone)
            pids = log.read_workers(place)
            for pid in pids.values():
                program.note(pid)
            wait_for("the spare", START_S, lambda: are_warm(program.pid, side.spares, quiet))
            open_gate()
            if kill is not None:
                victim, step = pids[kill.victim], kill.step
                wait_for(f"step {step}", STEPS_S, lambda: log.last_step(log.read_commits(place)) >= step)
                self.watch.rest(kill.fraction * kills.usual_step_s(log.read_commits(place)))
                killed_s = time.monotonic()
                os.kill(victim, signal.SIGKILL)
            wait_for("the end of the run", STEPS_S, lambda: program.exit_code is not None)
        commits = log.read_commits(place)
        recovery = None if kill is None else kills.recovery_from(commits, killed_s, workers)
        return TrialResult(TrainingResult.find(place), kills.usual_step_s(commits), recovery)

    def _wait_for(
        self,
        side: RecoverySide,
        program: "LauncherProcess",
        awaited: str,
        within_s: float,
        is_there: Callable[[], bool],
    ) -> None:
        """Raises if the launcher ends before, or with a failure."""
        self.watch.until(lambda: program.exit_code is not None or is_there(), within_s, f"{side.title}: {awaited}")
        if program.exit_code or not is_there():
            ended = f"the run ended with exit code {program.exit_code} before {awaited}"
            raise BenchStopped(f"✗ {side.title}: {ended}. Its output: {program.output}", 1, interrupted=False)


def command_of(side: RecoverySide, plan: RecoveryPlan, task: TrainingTask) -> list[str]:
    """What a user would type. torchrun polls its workers, and sleeps in between."""
    options: dict[str, object]
    if side.is_lockstep:
        program, flag = ["lockstep", "run"], "--copies" if side.copies else "--no-copies"
        options = {"--workers": plan.workers, "--lanes": plan.lanes, "--threads": 1, "--spares": side.spares}
        options["--run-dir"] = task.place / "run"
    else:
        program, flag = ["torch.distributed.run"], "--standalone"
        options = {"--nproc-per-node": plan.workers, "--max-restarts": 3, "--monitor-interval": 0.1}
    words = [str(word) for option in options.items() for word in option]
    return [sys.executable, "-m", *program, *words, flag, "-m", WORKER, task.written()]


# -- processes --------------------------------------------------------------------------------------------------


class LauncherProcess:
    """A launcher, lockstep's or torchrun, which writes to `output`. Neither it nor any of its descendants outlives it.

    They are also ended if this process is killed: by the guard, which knows of the launcher and of those noted.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], output: Path, guard: OrphanGuard
    ) -> None:
        self.output, self._guard, self._noted = output, guard, set[int]()
        self._process = start_program(command, environment, output)
        self.pid = self._process.pid
        self.note(self.pid)

    def __enter__(self) -> "LauncherProcess":
        return self

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def note(self, group: int) -> None:
        """The guard kills the process group if this process ends: for workers that would outlive their launcher."""
        self._noted.add(group)
        self._guard.note(group)

    def __exit__(self, *_: object) -> None:
        """Both launchers end their workers when they get SIGTERM; what does not end is killed."""
        if self._process.poll() is None:
            family = [self.pid, *descendants(self.pid)]
            self._process.send_signal(signal.SIGTERM)
            await_end([self.pid], END_S)
            family += [pid for pid in descendants(self.pid) if pid not in family]
            if not await_end(family, 1.0):
                for pid in family:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await_end(family, 1.0)
            self._process.wait()
        for group in self._noted:
            self._guard.clear(group)


class SignalWatch:
    """Waits for what other processes do; a signal or too long a wait ends the benchmark with `BenchStopped`."""

    def __init__(self, signals: LauncherSignals, clock: Callable[[], float] = time.monotonic) -> None:
        self._signals, self._clock = signals, clock

    def until(self, is_reached: Callable[[], object], within_s: float, awaited: str) -> None:
        """Returns when `is_reached()`; looks fifty times a second."""
        deadline_s = self._clock() + within_s
        while not is_reached():
            if self._clock() > deadline_s:
                raise BenchStopped(f"✗ {awaited} did not come within {within_s:.0f} s", 1, interrupted=False)
            self.rest(LOOK_S)

    def rest(self, seconds: float) -> None:
        select.select([self._signals], [], [], seconds)
        for signum in self._signals.take():
            if signum != SCALE:
                raise BenchStopped(STOPPED, _EXIT_CODES[signum], interrupted=True)


class Quiet:
    """Whether a value has not changed for QUIET_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: object = None
        self._since_s = clock()

    def at(self, seen: object) -> bool:
        if seen != self._seen:
            self._seen, self._since_s = seen, self._clock()
        return self._clock() - self._since_s >= QUIET_S


def are_warm(launcher_pid: int, num_spares: int, quiet: Quiet) -> bool:
    """Whether all spares of a launcher have loaded torch, and now wait without computing."""
    if not num_spares:
        return True
    spares = {
        pid: process_state(pid) for pid in descendants(launcher_pid) if _SPARE in _read(pid, "cmdline").split("\0")
    }
    is_quiet = quiet.at(spares)
    sleeping = [pid for pid, state in spares.items() if state is not None and state.state == "S"]
    loaded = [pid for pid in sleeping if "libtorch_python" in _read(pid, "maps")] if is_quiet else []
    return len(loaded) == len(spares) == num_spares


def descendants(pid: int) -> list[int]:
    """The processes that `pid` has started, those that these have, and so on."""
    with suppress(psutil.NoSuchProcess):
        return [process.pid for process in psutil.Process(pid).children(recursive=True)]
    return []


def _read(pid: int, name: str) -> str:
    """Empty if the process is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    return ""
