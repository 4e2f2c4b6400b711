"""Running a job: its workers to their end, their failures into one story and one exit code. Without torch."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.launch.crew import Crew
from lockstep.launch.exits import CTRL_C, DONE, ENVIRONMENT, TERMINATED, USER_ERROR, WORKER_LOST
from lockstep.launch.failure import Failure
from lockstep.launch.job import Job
from lockstep.launch.messages import render, tell_apart
from lockstep.launch.output import log_path
from lockstep.launch.supervision import Over
from lockstep.launch.supervisor import Supervisor
from lockstep.settings.environment import process_environment

__all__ = ["Job", "Outcome", "launch"]


@dataclass(frozen=True)
class Outcome:
    """How a launch ended; `failure` is the first failure, if the run failed.

    `saved`: workers that were asked to end have saved the run first. `turned_away` says why new workers could not take
    part, and `obstacles` why others could not be copied.
    """

    exit_code: int
    failure: Failure | None
    seconds: float
    saved: bool = False
    turned_away: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = ()


def launch(job: Job, *, show: Callable[[bytes], None], say: Callable[[str], None]) -> Outcome:
    """Runs the job to its end; afterwards no process of it is left.

    The output of the worker with rank 0 goes to `show` as it comes, and what the launcher itself has to tell to `say`.
    The folder `job.run_dir` must exist. Main thread only: Ctrl-C and SIGTERM end the workers, not this function.
    """
    began_s = time.monotonic()
    with Crew(job, process_environment(), show, say) as crew:
        supervisor = Supervisor(job, crew, say)
        end = supervisor.run()
        if isinstance(end, Over):
            _tell(job, end, supervisor.num_well(end), say)
            supervisor.end_others()
        saved = crew.has_saved
        ran_apart = end is None and supervisor.ran_apart
    if crew.unshown is not None and not isinstance(end, Over):
        say(_tell_unshown(job, crew.unshown, supervisor.num_workers))
        return Outcome(ENVIRONMENT, None, time.monotonic() - began_s, saved)
    if ran_apart:
        say(tell_apart(supervisor.num_workers))
        return Outcome(USER_ERROR, None, time.monotonic() - began_s)
    if isinstance(end, signal.Signals):
        say(_tell_interrupt(job, end, supervisor.num_workers))
    return Outcome(
        _exit_code(end),
        end.first if isinstance(end, Over) else None,
        time.monotonic() - began_s,
        saved,
        supervisor.turned_away,
        tuple(crew.obstacles),
    )


def exit_code_of(failure: Failure) -> int:
    if failure.is_loss or failure.kind == "WorkerLost":
        return WORKER_LOST
    return ENVIRONMENT if failure.kind == "BadEnvironment" else USER_ERROR


def _exit_code(end: signal.Signals | Over | None) -> int:
    if isinstance(end, Over):
        return WORKER_LOST if end.why else exit_code_of(end.first)
    return DONE if end is None else CTRL_C if end == signal.SIGINT else TERMINATED


def _tell(job: Job, over: Over, num_well: int, say: Callable[[str], None]) -> None:
    too = sum(not failure.secondary for failure in over.others)
    say(render(over.first, num_well, log_path(job.run_dir, over.first.rank), num_failed_too=too, why=over.why))


def _tell_interrupt(job: Job, signum: signal.Signals, num_workers: int) -> str:
    by = "Ctrl-C" if signum == signal.SIGINT else signum.name
    return f"✗ stopped by {by}; {_all(num_workers)} ended. Logs: {job.run_dir}"


def _tell_unshown(job: Job, error: OSError, num_workers: int) -> str:
    return f"✗ the output cannot be written: {error.strerror}; {_all(num_workers)} ended. Logs: {job.run_dir}"


def _all(num_workers: int) -> str:
    return "the worker has" if num_workers == 1 else f"all {num_workers} workers have"
