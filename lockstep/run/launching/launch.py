"""Running a job: its workers to their end, their failures into one story and one exit code. Without torch."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.run.environment import process_environment
from lockstep.run.launching.crew import Crew
from lockstep.run.launching.failure import EXITED, KILLED, Failure, first_failure, read_report
from lockstep.run.launching.job import Job
from lockstep.run.launching.memory import count_memory_kills
from lockstep.run.launching.output import log_path
from lockstep.run.launching.process import WorkerProcess
from lockstep.run.launching.telling import render

__all__ = ["Job", "Outcome", "launch"]

DONE, USER_ERROR, USAGE, ENVIRONMENT, WORKER_LOST, CTRL_C, TERMINATED = 0, 1, 2, 3, 4, 130, 143

# Others that fail because of the first get this long to say so, which only makes the story better.
GRACE_S = 0.3
END_S = 1.0
INTERRUPT_S = 2.0


@dataclass(frozen=True)
class Outcome:
    """How a launch ended; `failure` is the first failure, if a worker failed."""

    exit_code: int
    failure: Failure | None
    seconds: float


def launch(job: Job, *, show: Callable[[bytes], None], say: Callable[[str], None]) -> Outcome:
    """Runs the job to its end; afterwards no process of it is left.

    Worker 0's output goes to `show` as it comes, and what the launcher itself has to tell to `say`. The
    folder `job.run_dir` must exist. Main thread only: Ctrl-C and SIGTERM end the workers, not this function.
    """
    began_s = time.monotonic()
    memory_kills = count_memory_kills()
    with Crew(job, process_environment(), show) as crew:
        crew.until(lambda: not crew.running or crew.failed or crew.interrupts)
        if crew.failed and not crew.interrupts:
            crew.until(lambda: not crew.running or crew.interrupts, GRACE_S)
        failure = None
        if crew.interrupts:
            exit_code = _end_interrupted(crew)
        elif crew.failed:
            failure = _end_failed(job, crew, memory_kills, say)
            exit_code = exit_code_of(failure)
        else:
            exit_code = DONE
    if crew.interrupts and failure is None:
        say(_tell_interrupt(job, crew.interrupts[0]))
    return Outcome(exit_code, failure, time.monotonic() - began_s)


def exit_code_of(failure: Failure) -> int:
    if failure.how == KILLED or failure.kind == "WorkerLost":
        return WORKER_LOST
    return ENVIRONMENT if failure.kind == "BadEnvironment" else USER_ERROR


def _end_interrupted(crew: Crew) -> int:
    """Hands the signal on to the workers, so that `finally` blocks run; a second one ends the wait."""
    signum = crew.interrupts[0]
    for worker in crew.running:
        worker.send(signum)
    crew.until(lambda: not crew.running or len(crew.interrupts) > 1, INTERRUPT_S)
    return CTRL_C if signum == signal.SIGINT else TERMINATED


def _end_failed(job: Job, crew: Crew, memory_kills: int, say: Callable[[str], None]) -> Failure:
    """Tells of the first failure, then ends the others. Workers that reported are leaving by themselves."""
    failures = [_failure(job, worker, memory_kills) for worker in crew.failed]
    first = first_failure(failures)
    others = [failure for failure in failures if failure is not first]
    too = sum(not failure.secondary for failure in others)
    well = len(others) - too + sum(worker not in crew.failed for worker in crew.running)
    say(render(first, well, log_path(job.run_dir, first.rank), num_failed_too=too))
    for worker in crew.running:
        if worker.rank not in crew.reported:
            worker.send(signal.SIGTERM)
    crew.until(lambda: not crew.running or crew.interrupts, END_S)
    return first


def _failure(job: Job, worker: WorkerProcess, memory_kills: int) -> Failure:
    """The worker's own report, or what its exit status says when it left none."""
    report = read_report(job.run_dir, worker.rank)
    if report is not None:
        return report
    # A worker whose report was announced and then lost may still be on its way out, with code 1.
    status = 1 if worker.exit_status is None else worker.exit_status
    killed = status < 0
    kind = _signal_name(-status) if killed else str(status)
    for_memory = kind == "SIGKILL" and count_memory_kills() > memory_kills
    return Failure(
        rank=worker.rank,
        step=None,
        kind=kind,
        message="out of memory, says the kernel" if for_memory else "",
        frames=(),
        secondary=False,
        time_s=worker.ended_s,
        how=KILLED if killed else EXITED,
        pid=worker.popen.pid,
    )


def _signal_name(number: int) -> str:
    return next((signum.name for signum in signal.Signals if signum == number), f"signal {number}")


def _tell_interrupt(job: Job, signum: signal.Signals) -> str:
    by = "Ctrl-C" if signum == signal.SIGINT else signum.name
    workers = "the worker has" if job.num_workers == 1 else f"all {job.num_workers} workers have"
    return f"✗ stopped by {by}; {workers} ended. Logs: {job.run_dir}"
