"""`lockstep timeline`: puts the timeline of a run together, while it goes on or afterwards."""

from pathlib import Path

import click

from lockstep.observe.timeline.file import write_trace


@click.command(name="timeline")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="[default: RUN_DIR/timeline.json]")
def command(run_dir: Path, out: Path | None) -> None:
    """Write what the workers of the run in RUN_DIR did as one trace, which Perfetto and chrome://tracing open.

    `lockstep run` does so at its end. This is for a run that goes on, was killed, or was started by others.
    """
    click.echo(f"{write_trace(run_dir, out)}: open it in ui.perfetto.dev, or in chrome://tracing")
