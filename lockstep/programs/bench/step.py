"""Runs a step benchmark from the outside: a launch for every plan, in a folder of its own. Without torch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.launch.launch import Job
from lockstep.programs.bench.launching import ResultsDiffer, result_folder, run_to_end
from lockstep.programs.bench.plan import Plan
from lockstep.programs.bench.result import Progress, Result
from lockstep.programs.bench.rows import make_report, make_row

Follow = Callable[[Plan, Progress], None]
"""Is told how far a plan is: before its workers start, when timing begins, and after every round."""

WORKER = "lockstep.programs.bench.worker"


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
    with result_folder() as folder:
        run_to_end(_job(plan, folder), lambda progress: follow(plan, progress))
        return accept(Result.read(folder))


def accept(result: Result) -> Result:
    if result.refused is not None:
        raise ResultsDiffer(result.refused)
    return result


def _job(plan: Plan, folder: Path) -> Job:
    return Job(
        program=WORKER,
        run_dir=folder,
        module=True,
        arguments=(plan.written(), str(folder)),
        num_workers=plan.workers,
        lanes=plan.workers,
        environment={"GLOO_SOCKET_IFNAME": "lo"},  # DDP's own connections stay on this host too
    )
