"""Progress of a step benchmark: a bar on a terminal, a line for every model elsewhere."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from lockstep.programs.bench.plan import Plan
from lockstep.programs.bench.result import Progress
from lockstep.programs.bench.step import Follow


@contextmanager
def following(console: Console, plans: Sequence[Plan]) -> Iterator[Follow]:
    """What it yields shows on `console` how far the plans are."""
    if not console.is_terminal:
        yield lambda plan, progress: _tell(console, plan, progress)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=sum(plan.rounds for plan in plans))
        yield lambda plan, progress: bar.update(
            task, description=_named(plan), completed=_rounds_before(plans, plan) + progress.done
        )


def _tell(console: Console, plan: Plan, progress: Progress) -> None:
    if progress.done == progress.total:
        console.print(f"{_named(plan)}: done", highlight=False)


def _named(plan: Plan) -> str:
    return f"{plan.model} on {plan.workers} worker{'' if plan.workers == 1 else 's'}"


def _rounds_before(plans: Sequence[Plan], plan: Plan) -> int:
    return sum(earlier.rounds for earlier in plans[: plans.index(plan)])
