"""`lockstep finished`: says whether a run has come to its end."""

from pathlib import Path

import click

from lockstep.cli.run import Whole
from lockstep.observe.finish import verdict


@click.command(name="finished")
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option("--code", type=Whole(0), default=0, show_default=True, help="The exit code of what started the workers.")
def command(run_dir: Path, code: int) -> None:
    """Say whether the run whose workers had LOCKSTEP_RUN_DIR=RUN_DIR has come to its end.

    The exit code is 0 if it has, and CODE is 0 or that of a worker that was lost; else it is CODE, or 1 if that is 0.
    srun ends with 137 although the workers that were left have come to the end: so a batch script ends with

    srun --kill-on-bad-exit=0 --no-kill python train.py; lockstep finished $LOCKSTEP_RUN_DIR --code $?
    """
    found, sentence = verdict(run_dir, code)
    click.echo(sentence)
    raise SystemExit(found)
