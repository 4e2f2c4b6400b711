"""The `lockstep` command. Imports a subcommand only when it is called, so that help comes at once."""

import importlib
import io
import sys

import click

from lockstep.cli.streams import CannotWrite, Output, complain, discard_output
from lockstep.errors import BadArgument, BadEnvironment, LockstepError
from lockstep.launch.channels.exits import CTRL_C
from lockstep.version import VERSION

COMMANDS = {
    "init": "Print what to change in a plain script.",
    "run": "Start a script on one or more workers.",
    "scale": "Give a run that goes on another number of workers.",
    "roster": "Keep a roster, where workers on other hosts find a run.",
    "finished": "Say whether a run has come to its end, where exit codes do not.",
    "advise": "Say whether more workers should grow the batch of a run, or split it.",
    "verify": "Show that a run gives the same bits on any number of workers.",
    "bench": "Measure steps, collectives and recoveries on this machine.",
    "watch": "Show a run in the terminal, live.",
    "page": "Show runs in the browser, live or afterwards.",
    "report": "Write what the page shows of runs as one HTML file.",
    "timeline": "Put the timeline of a run together, for Perfetto.",
    "explain": "Show how a collective works, or where the time of a run's steps went.",
    "doctor": "Look for what gets in the way of a run on this machine.",
    "demo": "See it work, from nothing, in a minute.",
}
"""Each is the `command` of the module in this folder that has its name."""


class LazyGroup(click.Group):
    """A group that knows its commands' names and help without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"lockstep.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def show_version(ctx: click.Context, param: click.Parameter, is_given: bool) -> None:
    if is_given:
        click.echo(f"lockstep {installed_version()}")
        ctx.exit()


def installed_version() -> str:
    from importlib import metadata  # takes longer to import than help may

    try:
        return metadata.version("torch-lockstep")
    except metadata.PackageNotFoundError:
        return VERSION


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=show_version,
    help="Show it and exit.",
)
def lockstep() -> None:
    """Data-parallel training for PyTorch: the same script, the same bits, on any number of workers."""


def main() -> None:
    """Runs the command line; an error of lockstep is one sentence and an exit code, never a traceback.

    Ctrl-C ends every command with 130, as shells expect.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = Output.over(sys.stdout)
    try:
        sys.exit(lockstep.main(prog_name="lockstep", standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(CTRL_C)
    except CannotWrite as error:
        discard_output()
        complain(f"✗ {error}")
        sys.exit(3)
    except LockstepError as error:
        complain(f"✗ {error}")
        sys.exit(2 if isinstance(error, BadArgument) else 3 if isinstance(error, BadEnvironment) else 1)
