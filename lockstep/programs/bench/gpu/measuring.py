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
"""Is told how far a plan is: before its processes start, when timing begins, and after every round."""


def bench_gpu_steps(plans: Sequence[Plan], follow: Follow, variables: Mapping[str, str]) -> dict[str, Any]:
    """Measures every plan, one after the other; gives the report. `variables` are for every process."""
    rows = []
    machine: dict[str, Any] = {}
    for plan in plans:
        outcome = measure(plan, follow, variables)
        rows.append(make_row(plan, outcome))
        machine = outcome.machine or machine
    return make_report(rows, machine, mps=bool(variables))


def measure(plan: Plan, follow: Follow, variables: Mapping[str, str]) -> Outcome:
    """What became of the sides of one plan; none of their processes is left."""
    follow(plan, Progress(0, plan.rounds))
    with result_folder() as folder, hired(plan, folder, variables) as children:
        return take_turns(plan, children, lambda done: follow(plan, Progress(done, plan.rounds)))
