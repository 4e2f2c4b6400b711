"""`lockstep scale`: sets the number of workers of a run under way."""

from pathlib import Path

import click

from lockstep.cli.run import Whole
from lockstep.launch.scale import ask_for


@click.command(name="scale")
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.argument("workers", metavar="N", type=Whole(1))
def command(run_dir: Path, workers: int) -> None:
    """Give the run in RUN_DIR, which `lockstep run` started on this host, N workers.

    New workers are given the state by the others and carry lanes from the next step on; those that are too many
    leave after a step. The result stays the same to the last bit.
    """
    ask_for(run_dir, workers)
    click.echo(f"{run_dir} was asked for {workers} {'worker' if workers == 1 else 'workers'}.")
