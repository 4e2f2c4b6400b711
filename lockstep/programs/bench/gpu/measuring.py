"""Runs a step benchmark on a GPU from the outside. Without torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.programs.bench.gpu.children import hired
from lockstep.programs.bench.gpu.plan import Plan
from lockstep.programs.bench.gpu.rows import make_report, make_row
from lockstep.programs.bench.gpu.turns import Outcome, take_turns
from lockstep.programs.bench.launching import result_folder
from lockstep.programs.bench.result import Progress

Follow = Callable[[Plan, Progress], None]
"""Is told how far a plan is: what is done before timing, when that begins, and after every round."""

Take = Callable[[dict[str, Any]], None]
"""Is given the row of a plan as soon as it is measured."""


def bench_gpu_steps(plans: Sequence[Plan], follow: Follow, take: Take, variables: Mapping[str, str]) -> dict[str, Any]:
    """Measures every plan, one after the other; gives the report. `variables` are for every process.

    After Ctrl-C the report has what was measured until then, and says that it was stopped.
    """
    rows: list[dict[str, Any]] = []
    machine: dict[str, Any] = {}
    stopped = False
    for plan in plans:
        try:
            outcome = measure(plan, follow, variables)
        except KeyboardInterrupt:
            stopped = True
            break
        machine, stopped = outcome.machine or machine, outcome.stopped
        rows.append(make_row(plan, outcome))
        take(rows[-1])
        if stopped:
            break
    return make_report(rows, machine, mps=bool(variables), stopped=stopped)


def measure(plan: Plan, follow: Follow, variables: Mapping[str, str]) -> Outcome:
    """What became of the sides of one plan; none of their processes is left."""
    follow(plan, Progress(0, plan.rounds, "starting its processes"))
    with result_folder() as folder, hired(plan, folder, variables) as children:
        return take_turns(plan, children, lambda progress: follow(plan, progress))
