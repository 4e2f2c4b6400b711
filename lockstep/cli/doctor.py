"""`lockstep doctor`: which properties of this machine will hinder a run."""

import json
from pathlib import Path

import click

from lockstep.cli.run import Whole
from lockstep.errors import BadArgument


@click.command(name="doctor")
@click.option(
    "-n",
    "--workers",
    "num_workers",
    metavar="WORKERS",
    type=Whole(1),
    help="How many the run shall have.  [default: one a core]",
)
@click.option(
    "--runs",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    help="The folder of runs.  [default: runs]",
)
@click.option("--gpus", "tries_gpus", is_flag=True, help="Also measure the links between GPUs, and NCCL over them.")
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object instead of lines.")
@click.pass_context
def command(ctx: click.Context, num_workers: int | None, runs: Path, tries_gpus: bool, wants_json: bool) -> None:
    """Look for what will get in the way of a run on this machine, and say what to type against it.

    Changes nothing. Ends with 0 if nothing stops a run (warnings may hinder it), with 3 if something does.
    """
    from lockstep.programs.doctor.checks import diagnose
    from lockstep.programs.doctor.gpu_links import try_gpus
    from lockstep.programs.doctor.machine import gather
    from lockstep.settings.environment import process_environment

    if runs.exists() and not runs.is_dir():
        raise BadArgument(f"--runs {runs} is no folder: name the one that holds the folders of runs")
    diagnosis = diagnose(gather(num_workers, runs, process_environment()))
    if tries_gpus:
        diagnosis = diagnosis.with_results(try_gpus())
    click.echo(json.dumps(diagnosis.as_json()) if wants_json else "\n".join(diagnosis.lines()))
    ctx.exit(diagnosis.exit_code)
