"""Runs a job to its end, and turns its workers' failures into one message and one exit code. Without torch."""

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lockstep.events import Events, Subscriber
from lockstep.launch.channels.exits import CTRL_C, DONE, ENVIRONMENT, TERMINATED, USER_ERROR, WORKER_LOST
from lockstep.launch.channels.failure import Failure
from lockstep.launch.events import LAUNCHER, LaunchBegan, LaunchEnded, OutputLost, RanApart, RunFailed, RunInterrupted
from lockstep.launch.host.folder import clear_earlier, log_path
from lockstep.launch.host.signals import LauncherSignals
from lockstep.launch.job import Job
from lockstep.launch.pool import OpenPool
from lockstep.launch.pools.local_pool import LocalPool
from lockstep.launch.scale import registered
from lockstep.launch.supervision.decisions import Over
from lockstep.launch.supervision.messages import LauncherConsole
from lockstep.launch.supervision.supervisor import Supervisor
from lockstep.settings.environment import process_environment
from lockstep.settings.environments.stop_signals import launcher_ends

__all__ = ["Job", "LaunchOutcome", "launch"]


@dataclass(frozen=True)
class LaunchOutcome:
    """How a launch ended; `failure` is the first failure, if the run failed.

    `num_steps` were committed by those that took part to the end. `saved`: the workers saved the run before they ended;
    `at_once`: a second signal has ended them before they could. `turned_away` are the reasons why new workers could not
    take part, `obstacles` those why others could not be copied.
    """

    exit_code: int
    failure: Failure | None
    seconds: float
    saved: bool = False
    turned_away: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = ()
    num_steps: int = 0
    at_once: bool = False


class ShownOutput:
    """Passes output on to `show`. When that fails, `error` is set, and the launch ends as by SIGTERM."""

    def __init__(self, show: Callable[[bytes], None], signals: LauncherSignals) -> None:
        self._show, self._signals = show, signals
        self.error: OSError | None = None

    def __call__(self, output: bytes) -> None:
        if self.error is None:
            try:
                self._show(output)
            except OSError as error:
                self.error = error
                self._signals.add(signal.SIGTERM)


def launch(
    job: Job,
    *,
    show: Callable[[bytes], None],
    say: Callable[[str], None],
    open_pool: OpenPool = LocalPool,
    readers: Iterable[Subscriber] = (),
) -> LaunchOutcome:
    """Runs the job to its end; afterwards no process of it is left.

    The output of the worker with rank 0 goes to `show` as it comes, and the launcher's own messages to `say`; `readers`
    receive the events from which they are made. The folder `job.run_dir` must exist. Main thread only: Ctrl-C and
    SIGTERM end the workers, not this function.
    """
    began_s, events = time.monotonic(), Events(LAUNCHER)
    events.subscribe(LauncherConsole(say))
    for reader in readers:
        events.subscribe(reader)
    of_engine = launcher_ends(process_environment())
    with LauncherSignals(of_engine) as signals, registered(job.run_dir, events.note):
        clear_earlier(job.run_dir)
        events.emit(LaunchBegan, job.program, job.num_workers)
        shown = ShownOutput(show, signals)
        with open_pool(job, shown, events.note, signals) as pool:
            supervisor = Supervisor(job, pool, signals, events)
            end = supervisor.run()
            if isinstance(end, Over):
                events.publish(_failure_of_run(job, end, supervisor.num_well(end)))
                supervisor.end_others()
            rows = list(pool.rows().values())
            saved, num_steps = any(row.saved for row in rows), max((row.step for row in rows), default=0)
            ran_apart = end is None and supervisor.ran_apart
            events.step = supervisor.num_steps
    first = end.first if isinstance(end, Over) else None
    exit_code, obstacles = _exit_code(end), tuple(pool.obstacles)
    if shown.error is not None and first is None:
        exit_code = ENVIRONMENT
        events.emit(OutputLost, shown.error.strerror or str(shown.error), supervisor.num_workers, str(job.run_dir))
    elif ran_apart:
        exit_code = USER_ERROR
        events.emit(RanApart, supervisor.num_workers)
    elif isinstance(end, signal.Signals):
        events.emit(RunInterrupted, end.name, supervisor.num_workers, str(job.run_dir))
    at_once, seconds = len(supervisor.interrupts) > 1, time.monotonic() - began_s
    events.emit(LaunchEnded, exit_code, seconds)
    return LaunchOutcome(exit_code, first, seconds, saved, supervisor.turned_away, obstacles, num_steps, at_once)


def _exit_code(end: signal.Signals | Over | None) -> int:
    if isinstance(end, Over):
        first = end.first
        if end.why or first.is_loss or first.kind == "WorkerLost":
            return WORKER_LOST
        return ENVIRONMENT if first.kind == "BadEnvironment" else USER_ERROR
    return DONE if end is None else CTRL_C if end == signal.SIGINT else TERMINATED


def _failure_of_run(job: Job, over: Over, num_well: int) -> RunFailed:
    first = over.first
    path = str(log_path(job.run_dir, first.rank))
    return RunFailed(first, over.others, over.why, num_well, path, worker=first.rank, step=first.step or 0)
