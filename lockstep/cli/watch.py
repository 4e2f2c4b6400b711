"""`lockstep watch`: a run in the terminal."""

import threading
from contextlib import suppress
from pathlib import Path

import click

from lockstep.observe.page.entries import check_folder, read_entries
from lockstep.observe.page.view import make_view

EVERY_S = 1.0


@click.command(name="watch")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Show it as it is now, and end.")
def command(run_dir: Path, once: bool) -> None:
    """Show the run in RUN_DIR in the terminal, until it is over or Ctrl-C is pressed."""
    from rich.console import Console
    from rich.live import Live

    from lockstep.observe.watch import picture

    check_folder(run_dir)
    console, waiting = Console(), threading.Event()
    view = make_view(read_entries(run_dir))
    if once or not console.is_terminal:
        console.print(picture(view, console.width))
        return
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            view = make_view(read_entries(run_dir))
            live.update(picture(view, console.width), refresh=True)
            if not view["is_running"]:
                break
            waiting.wait(EVERY_S)
