"""Runs an all-reduce benchmark from the outside: a launch for every number of workers. Without torch."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.launch.launch import Job
from lockstep.programs.bench.allreduce.plan import Part, Plan
from lockstep.programs.bench.allreduce.result import Result
from lockstep.programs.bench.allreduce.rows import make_report, make_rows
from lockstep.programs.bench.devices import CPU
from lockstep.programs.bench.launching import ResultsDiffer, result_folder, run_to_end
from lockstep.programs.bench.result import Progress

Follow = Callable[[Part, Progress], None]
"""Is told how far a part is: when its turn comes, and after every round."""

WORKER = "lockstep.programs.bench.allreduce.worker"
WORKER_ON_GPU = "lockstep.programs.bench.allreduce.gpu.worker"


def bench_allreduce(
    plans: Sequence[Plan], follow: Follow, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Measures every plan, one after the other; gives the report. `variables` are for workers. Main thread only."""
    rows: list[dict[str, Any]] = []
    machine: dict[str, Any] = {}
    for plan in plans:
        result = measure(plan, follow, variables or {})
        rows += make_rows(plan, result)
        machine = result.machine
    where = {"device": plans[0].device, "mps": bool(variables)}
    return {**make_report(plans[0].algorithm, rows, machine), **where}


def measure(plan: Plan, follow: Follow, variables: Mapping[str, str]) -> Result:
    """The times of one plan. Raises `ResultsDiffer` if a sum was wrong."""
    follow(plan.parts[0], Progress(0, plan.rounds))
    with result_folder() as folder:
        run_to_end(_job(plan, folder, variables), lambda progress: follow(*locate(plan, progress)))
        return accept(Result.read(folder))


def accept(result: Result) -> Result:
    if result.refused is not None:
        raise ResultsDiffer(result.refused)
    return result


def locate(plan: Plan, progress: Progress) -> tuple[Part, Progress]:
    """The part that rounds counted over all parts have reached, and the rounds of that part alone."""
    number = max(0, progress.done - 1) // plan.rounds
    return plan.parts[number], Progress(progress.done - number * plan.rounds, plan.rounds)


def _job(plan: Plan, folder: Path, variables: Mapping[str, str]) -> Job:
    return Job(
        program=WORKER if plan.device == CPU else WORKER_ON_GPU,
        run_dir=folder,
        module=True,
        arguments=(plan.written(), str(folder)),
        num_workers=plan.workers,
        threads=1,
        environment=variables,
        is_run=False,
    )
