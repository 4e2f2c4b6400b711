"""`lockstep demo`: shows lockstep at work in about a minute; with `--kill`, also while workers are killed."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from lockstep.cli.run import Device, Whole, WorkerCounts
from lockstep.observe.page.report import write_report
from lockstep.programs.demo.demonstration import DidNotFinish, demonstrate
from lockstep.programs.demo.recipe import Recipe
from lockstep.programs.demo.report import as_json, show_report


@click.command(name="demo")
@click.option("--steps", type=Whole(1), default=Recipe.steps, show_default=True, help="Steps of training in each run.")
@click.option(
    "--workers", type=WorkerCounts(), default="1,2,3", show_default=True, help="How many workers, run after run."
)
@click.option(
    "--device",
    type=Device(),
    default="cpu",
    show_default=True,
    metavar="cpu|cuda|cuda:K",
    help="Where workers compute.",
)
@click.option(
    "--kill",
    is_flag=True,
    help="Then train once more, on the most workers, while one after the other is killed by SIGKILL.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default="demo-report",
    show_default=True,
    help="Folder for the report.",
)
@click.option("--json", "wants_json", is_flag=True, help="One JSON object on stdout; progress on stderr.")
def command(steps: int, workers: tuple[int, ...], device: str, kill: bool, out: Path, wants_json: bool) -> None:
    """Train one small GPT on one, two and three workers, and see that it is the same model to the last bit.

    It learns the text of Python's own standard library: nothing is downloaded.
    """
    console = Console(stderr=wants_json)
    try:
        demo = demonstrate(replace(Recipe(), steps=steps, device=device), workers, out, console, kill=kill)
    except DidNotFinish as end:
        sys.exit(end.exit_code)
    report = write_report(demo.folders, out / "report.html")
    show_report(demo, console)
    console.print(f"Report: {report}", markup=False, highlight=False, soft_wrap=True)
    if wants_json:
        click.echo(json.dumps(as_json(demo)))
    sys.exit(0 if demo.equal else 1)
