"""`lockstep bench`: what this machine does, measured."""

import json
import sys

import click

from lockstep.cli.run import Whole
from lockstep.programs.bench.plan import REFERENCES, make_plans


@click.group(name="bench")
def command() -> None:
    """Measure steps and collectives on this machine."""


@command.command()
@click.option(
    "--model",
    "models",
    type=click.Choice([*REFERENCES, "all"]),
    multiple=True,
    default=("all",),
    show_default=True,
    help="What to train; may be given several times.",
)
@click.option(
    "-n",
    "--workers",
    type=Whole(1),
    multiple=True,
    default=(2,),
    show_default=True,
    help="Workers, one process with one thread each; may be given several times.",
)
@click.option("--steps", type=Whole(1), help="Timed steps in a block.  [default: about a second's worth]")
@click.option("--rounds", type=Whole(1), default=8, show_default=True, help="Blocks of each side.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def step(models: tuple[str, ...], workers: tuple[int, ...], steps: int | None, rounds: int, as_json: bool) -> None:
    """Time a training step: lockstep, DDP over Gloo and a plain loop, side by side in the same processes.

    The sides are first shown to compute the same. All models take several minutes, in which the machine
    should do nothing else.
    """
    from rich.console import Console

    from lockstep.programs.bench.following import following
    from lockstep.programs.bench.step import Stopped, bench_steps
    from lockstep.programs.bench.table import show

    plans = make_plans(models, workers, steps, rounds)
    try:
        with following(Console(stderr=True), plans) as follow:
            report = bench_steps(plans, follow)
    except Stopped as stopped:
        click.echo(str(stopped), err=True)
        sys.exit(stopped.exit_code)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show(report, Console())
