"""`lockstep report`: the page of runs as one file."""

from pathlib import Path

import click

from lockstep.observe.page.entries import check_folder
from lockstep.observe.page.report import write_report


@click.command(name="report")
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="[default: report.html in RUN_DIR]")
def command(run_dirs: tuple[Path, ...], out: Path | None) -> None:
    """Write what `lockstep page` shows of the runs in these folders as one HTML file, to keep or to send."""
    for folder in run_dirs:
        check_folder(folder)
    click.echo(str(write_report(run_dirs, out or run_dirs[0] / "report.html")))
