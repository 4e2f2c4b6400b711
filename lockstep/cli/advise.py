"""`lockstep advise`: advice about more workers, from the noise of a run."""

from pathlib import Path

import click

from lockstep.cli.run import Whole


@click.command(name="advise")
@click.option(
    "--run",
    "run_dir",
    metavar="DIR",
    required=True,
    type=click.Path(path_type=Path),
    help="The folder of the run, such as runs/train-1.",
)
@click.option("--workers", metavar="N", type=Whole(1), help="Also say what to do with so many workers.")
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object instead of lines.")
def command(run_dir: Path, workers: int | None, wants_json: bool) -> None:
    """Say whether more workers should grow the batch of a run, by which rule, or split the same batch.

    Reads what the run has measured so far, and may be asked while it goes on. Ends with 1 if that is too little to
    advise from, and says how much more is needed.
    """
    from lockstep.programs.advice import report_on

    report = report_on(run_dir, workers)
    click.echo(report.to_json() if wants_json else report.text())
