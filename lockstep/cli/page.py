"""`lockstep page`: runs in the browser, live or afterwards."""

import signal
import threading
from pathlib import Path

import click

from lockstep.observe.page.entries import check_folder
from lockstep.observe.page.server import PageServer


@click.command(name="page")
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="[default: one that is free]")
def command(run_dirs: tuple[Path, ...], port: int) -> None:
    """Show the runs in these folders in the browser: curves, workers, what happened, logs; several over each other.

    The page is for this host alone, and only for who has its address. It changes nothing. Ctrl-C ends it.
    """
    for folder in run_dirs:
        check_folder(folder)
    with PageServer(run_dirs, port) as server:
        click.echo(f"{server.address}\n  Open it in a browser on this host. Ctrl-C ends the page, not the run.")
        until_interrupted()


def until_interrupted() -> None:
    over = threading.Event()
    before = {signum: signal.signal(signum, lambda *_: over.set()) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        over.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
