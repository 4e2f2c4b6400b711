"""`lockstep bench`: what this machine does, measured."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from lockstep.cli.run import Whole
from lockstep.errors import BadArgument
from lockstep.programs.bench.allreduce.algorithms import SHARED, parse_algorithm
from lockstep.programs.bench.allreduce.plan import crowding
from lockstep.programs.bench.allreduce.plan import make_plans as make_allreduce_plans
from lockstep.programs.bench.allreduce.sizes import parse_sizes
from lockstep.programs.bench.plan import REFERENCES, make_plans
from lockstep.programs.bench.recovery.plan import make_plan as make_recovery_plan


class Counts(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers from `least` on, with commas between them: "2,4"."""

    name = "numbers"

    def __init__(self, least: int) -> None:
        self.each = Whole(least)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        return tuple(self.each.convert(word.strip(), param, ctx) for word in value.split(","))


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """What a function makes of a word; what it refuses is told with the option's name."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.parse(value)
        except BadArgument as error:
            self.fail(str(error), param, ctx)


class Picture(click.ParamType):  # type: ignore[type-arg]
    """An .svg file that can be written, in a folder that exists."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if path.suffix.lower() != ".svg" or path.is_dir():
            self.fail(f"{value!r} is not allowed: name a file that ends in .svg", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"there is no folder {path.parent}: make it first, or name another", param, ctx)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            self.fail(f"{value!r} cannot be written: name another place", param, ctx)
        return path


@click.group(name="bench")
def command() -> None:
    """Measure steps, collectives and recoveries on this machine."""


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
    type=Counts(1),
    multiple=True,
    default=("2",),
    show_default=True,
    help='Workers, one process with one thread each: "2,4"; may be given several times.',
)
@click.option("--steps", type=Whole(1), help="Timed steps in a block.  [default: about a second's worth]")
@click.option("--rounds", type=Whole(1), default=10, show_default=True, help="Blocks of each side.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def step(
    models: tuple[str, ...], workers: tuple[tuple[int, ...], ...], steps: int | None, rounds: int, as_json: bool
) -> None:
    """Time a training step: lockstep, DDP over Gloo and over lockstep's backend, and a plain loop, side by side.

    The sides are first shown to compute the same. All models take several minutes, in which the machine
    should do nothing else.
    """
    from rich.console import Console

    from lockstep.programs.bench.following import following
    from lockstep.programs.bench.launching import Stopped
    from lockstep.programs.bench.step import bench_steps
    from lockstep.programs.bench.table import show

    plans = make_plans(models, [count for counts in workers for count in counts], steps, rounds)
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


@command.command()
@click.option(
    "-n",
    "--workers",
    type=Counts(2),
    multiple=True,
    default=("2",),
    show_default=True,
    help='Workers, one process with one thread each: "2,4"; may be given several times.',
)
@click.option(
    "--sizes",
    type=Parsed("sizes", parse_sizes),
    default="4KiB..128MiB",
    show_default=True,
    help='Bytes of the tensor: "4KiB,1MiB", or a range.',
)
@click.option(
    "--algorithm",
    type=Parsed("name", parse_algorithm),
    default=SHARED,
    show_default=True,
    help="How lockstep adds: in shared memory, or over Gloo by the schedule of this name (ring, direct, ...).",
)
@click.option("--rounds", type=Whole(1), default=9, show_default=True, help="Blocks of each side.")
@click.option("--svg", "picture", type=Picture(), help="Also draw times over sizes into this file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def allreduce(
    workers: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
    algorithm: str,
    rounds: int,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Time an all-reduce: lockstep and Gloo, and a copy of the same bytes, side by side in the same processes.

    The sums are first shown to be right. All sizes take about half a minute for each number of workers, in which the
    machine should do nothing else.
    """
    from rich.console import Console

    from lockstep.programs.bench.allreduce.measuring import bench_allreduce
    from lockstep.programs.bench.allreduce.plot import draw
    from lockstep.programs.bench.allreduce.table import show
    from lockstep.programs.bench.following import following
    from lockstep.programs.bench.launching import Stopped

    plans = make_allreduce_plans([count for counts in workers for count in counts], sizes, algorithm, rounds)
    if warning := crowding(plans, num_cores=len(os.sched_getaffinity(0))):
        click.echo(warning, err=True)
    try:
        with following(Console(stderr=True), [part for plan in plans for part in plan.parts]) as follow:
            report = bench_allreduce(plans, follow)
    except Stopped as stopped:
        click.echo(str(stopped), err=True)
        sys.exit(stopped.exit_code)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show(report, Console())
    if picture is not None:
        picture.write_text(draw(report), encoding="utf-8")


@command.command()
@click.option("--model", type=click.Choice([*REFERENCES]), default="mlp", show_default=True, help="What to train.")
@click.option(
    "-n",
    "--workers",
    type=Whole(2),
    default=3,
    show_default=True,
    help="Workers, one process with one thread each; one of them is killed.",
)
@click.option("--lanes", type=Whole(1), help="Lanes of the run.  [default: twice the workers]")
@click.option("--kills", type=Whole(1), default=10, show_default=True, help="Kills of each side.")
@click.option("--baseline/--no-baseline", default=True, help="Whether torchrun is measured too.  [default: yes]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def recovery(model: str, workers: int, lanes: int | None, kills: int, baseline: bool, as_json: bool) -> None:
    """Time what a killed worker costs: lockstep, lockstep with a spare, and torchrun restarting DDP, in turn.

    The bits of every disturbed run are compared with those of an undisturbed one. Every kill has a run of its own;
    all together take ten minutes or more, in which the machine should do nothing else.
    """
    from rich.console import Console

    from lockstep.observe.progress import show_progress
    from lockstep.programs.bench.launching import Stopped
    from lockstep.programs.bench.recovery.measuring import bench_recovery
    from lockstep.programs.bench.recovery.table import show

    plan = make_recovery_plan(model, workers, lanes, kills, baseline)
    try:
        with show_progress(Console(stderr=True), plan.title, plan.num_runs) as progress:
            report = bench_recovery(plan, progress.at)
    except Stopped as stopped:
        click.echo(str(stopped), err=True)
        sys.exit(stopped.exit_code)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show(report, Console())
