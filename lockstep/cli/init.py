"""`lockstep init`: the difference that turns a plain training script into a lockstep one."""

import sys
from pathlib import Path

import click

from lockstep.cli.run import check_script


@click.command(name="init")
@click.argument("script", type=click.Path(path_type=Path))
@click.pass_context
def command(ctx: click.Context, script: Path) -> None:
    """Print the difference that turns SCRIPT, a plain training loop, into a lockstep one: `| patch` applies it.

    Changes nothing. Where the source does not show how, it says why, line by line, and ends with 1.
    """
    from lockstep.programs.conversion.edits import convert, difference
    from lockstep.programs.conversion.source import CannotSee

    check_script(str(script))
    text = script.read_text(encoding="utf-8")
    try:
        conversion = convert(text)
    except CannotSee as seen:
        for obstacle in seen.obstacles:
            click.echo(f"✗ {script}, {obstacle}" if obstacle.line else f"✗ {script}: {obstacle}", err=True)
        click.echo("  docs/tutorial.md shows the lines to change by hand", err=True)
        ctx.exit(1)
    click.echo(difference(text, conversion.text, str(script)), nl=False)
    for remark in conversion.remarks:
        click.echo(f"  note: {remark}", err=True)
    sys.stdout.flush()
