"""Runs a step benchmark from the outside: a launch for every plan, in a folder of its own. Without torch."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.programs.bench.plan import Plan
from lockstep.programs.bench.result import Progress, Result
from lockstep.programs.bench.rows import make_report, make_row
from lockstep.run.launching.launch import Job, launch

Follow = Callable[[Plan, Progress], None]
"""Is told how far a plan is: before its workers start, when timing begins, and after every round."""

WORKER = "lockstep.programs.bench.worker"


class ResultsDiffer(LockstepError):  # noqa: N818
    """Two sides computed different things, so their times cannot be compared."""


@dataclass
class Stopped(LockstepError):  # noqa: N818
    """The workers did not come to their end; `exit_code` is the launch's."""

    told: str
    exit_code: int
    interrupted: bool

    def __str__(self) -> str:
        return self.told


def bench_steps(plans: Sequence[Plan], follow: Follow) -> dict[str, Any]:
    """Measures every plan, one after the other; gives the report. Main thread only."""
    rows = []
    machine: dict[str, Any] = {}
    for plan in plans:
        result = measure(plan, follow)
        rows.append(make_row(plan, result))
        machine = result.machine
    return make_report(rows, machine)


def measure(plan: Plan, follow: Follow) -> Result:
    """The times of one plan. Raises `ResultsDiffer` if the sides did not agree."""
    follow(plan, Progress(0, plan.rounds))
    with _folder() as folder:
        _launch(plan, folder, Lines(lambda progress: follow(plan, progress)))
        return accept(Result.read(folder))


def accept(result: Result) -> Result:
    if result.refused is not None:
        raise ResultsDiffer(result.refused)
    return result


class Lines:
    """Takes worker 0's output as it comes and hands on the lines that tell progress."""

    def __init__(self, told: Callable[[Progress], None]) -> None:
        self._told = told
        self._rest = b""

    def __call__(self, output: bytes) -> None:
        *lines, self._rest = (self._rest + output).split(b"\n")
        for line in lines:
            progress = Progress.read(line.decode(errors="replace"))
            if progress is not None:
                self._told(progress)


def _launch(plan: Plan, folder: Path, show: Callable[[bytes], None]) -> None:
    job = Job(
        program=WORKER,
        run_dir=folder,
        module=True,
        arguments=(plan.written(), str(folder)),
        num_workers=plan.workers,
        lanes=plan.workers,
        environment={"GLOO_SOCKET_IFNAME": "lo"},  # DDP's own connections stay on this host too
    )
    said: list[str] = []
    outcome = launch(job, show=show, say=said.append)
    if outcome.exit_code:
        # After an interrupt there is nothing to look up, and the folder that the launcher names goes away.
        interrupted = outcome.failure is None
        told = "✗ stopped; all workers have ended" if interrupted else "\n".join(said)
        raise Stopped(told, outcome.exit_code, interrupted)


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder that is gone afterwards, unless a worker failed: then the user is told of the logs in it."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-bench-"))
    keep = False
    try:
        yield folder
    except Stopped as stopped:
        keep = not stopped.interrupted
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
