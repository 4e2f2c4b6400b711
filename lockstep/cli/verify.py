"""`lockstep verify`: the same script on several numbers of workers, compared step by step."""

import sys
from pathlib import Path
from typing import Any

import click

from lockstep.cli.run import (
    FOLDER,
    Device,
    StrategyName,
    Whole,
    WorkerCounts,
    check_module,
    check_script,
    make_folder,
    note_misplaced_workers,
)
from lockstep.settings.environment import STRATEGIES
from lockstep.settings.limits import MOST_LANES, MOST_SEED, MOST_THREADS


def _something_to_compare(ctx: click.Context, param: click.Parameter, counts: tuple[int, ...]) -> tuple[int, ...]:
    if counts == (1,):
        raise click.BadParameter("1 alone leaves nothing to compare: give several numbers of workers, such as 1,2")
    return counts


@click.command(name="verify", context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--workers",
    "counts",
    type=WorkerCounts(),
    callback=_something_to_compare,
    default="1,2,3,4",
    show_default=True,
    help="Numbers of workers to compare, such as 1,2,3 or 1-4.",
)
@click.option(
    "--lanes",
    type=Whole(1, MOST_LANES),
    default=8,
    show_default=True,
    help="Lanes of every run, over what the script says.",
)
@click.option("--steps", type=Whole(1), help="Stop each run after this many steps.  [default: all of the script's]")
@click.option("--seed", type=Whole(0, MOST_SEED), help="Seed of every run, over what the script says.")
@click.option("--threads", type=Whole(1, MOST_THREADS), default=1, show_default=True, help="Threads per worker.")
@click.option(
    "--device",
    type=Device(),
    metavar="cpu|cuda|cuda:K",
    help="Where workers compute, over what the script says.",
)
@click.option(
    "--strategy",
    type=StrategyName(),
    metavar="|".join(STRATEGIES),
    help="What a step means, over what the script says.",
)
@click.option(
    "--distance/--no-distance",
    default=True,
    show_default=True,
    help="Measure the distance to one lane on one worker too.",
)
@click.option(
    "--faults/--no-faults",
    default=True,
    show_default=True,
    help="Also run it with a worker killed, and stopped and resumed, and compare.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--run-dir", type=FOLDER, help="Folder for logs and traces.  [default: runs/NAME-K]")
@click.option("-m", "module", is_flag=True, help="PROGRAM is a module, as in python -m.")
@click.argument("program", metavar="PROGRAM")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(as_json: bool, run_dir: Path | None, program: str, module: bool, **options: Any) -> None:
    """Run PROGRAM, a training script, on several numbers of workers and compare the bits after every step.

    Then once more with a worker killed in the middle of an epoch and replaced by a copy of another, once with one
    replaced by a new process, and once stopped and resumed on another number of workers.

    Everything after PROGRAM is the program's own; what it prints goes to logs. Exit code 0: all the same.
    """
    from lockstep.programs.verification.report import present
    from lockstep.programs.verification.runs import Request

    (check_module if module else check_script)(program)
    note_misplaced_workers(program, options["arguments"])
    folder = make_folder(run_dir, f"verify-{Path(program).stem}")
    request = Request(program=program, module=module, folder=folder, **options)
    sys.exit(present(request, as_json))
