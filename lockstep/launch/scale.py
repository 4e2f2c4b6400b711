"""How another process finds the launcher of a run, and sets its number of workers.

While a run goes on, `launcher.json` in its folder names the launcher's process. `lockstep scale` writes the number of
workers into `wanted` beside it and wakes the launcher with a signal.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.errors import BadArgument, BadEnvironment
from lockstep.launch.channels.status import MAX_SLOTS
from lockstep.launch.host.folder import is_full, write_whole
from lockstep.launch.host.processes import process_state
from lockstep.launch.host.signals import SCALE
from lockstep.settings.limits import as_whole


@contextmanager
def registered(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, `launcher.json` names this process as the launcher of the run in `folder`.

    On a full disk the run goes on without the file; see Note [A full disk] in folder.py.
    """
    if (pid := find_launcher(folder)) is not None:
        raise BadArgument(f"a run is under way in {folder} (pid {pid}): give another --run-dir, or end it")
    ours = process_state(os.getpid())
    try:
        card = {"pid": os.getpid(), "start_time": None if ours is None else ours.start_ticks}
        write_whole(_card(folder), json.dumps(card))
    except OSError as error:
        why = f"nothing can be written in {folder}: {error.strerror}"
        if not is_full(error):
            raise BadEnvironment(why) from error
        say(f"! {why}. The run goes on; `lockstep scale` does not reach it")
    try:
        yield
    finally:
        with suppress(OSError):
            _card(folder).unlink()


def ask_for(folder: Path, num_workers: int) -> None:
    """Asks the launcher of the run in `folder` for `num_workers` workers; raises if there is none."""
    if not 1 <= num_workers <= MAX_SLOTS:
        raise BadArgument(f"a run cannot have {num_workers} workers: ask for 1 to {MAX_SLOTS}")
    if not folder.is_dir():
        raise BadArgument(f"there is no run in {folder}: name the folder that holds its logs, such as runs/train-1")
    pid = find_launcher(folder)
    if pid is None:
        raise BadArgument(f"the run in {folder} is not running any more, or never was: start it with `lockstep run`")
    try:
        write_whole(_wanted(folder), str(num_workers))
        os.kill(pid, SCALE)
    except OSError as error:
        raise BadEnvironment(f"the launcher of {folder} (pid {pid}) cannot be reached: {error.strerror}") from error


def read_wanted(folder: Path) -> int | None:
    """The number of workers that was asked for; None if there is no valid request."""
    try:
        text = _wanted(folder).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    number = as_whole(text)
    return number if number is not None and 1 <= number <= MAX_SLOTS else None


def find_launcher(folder: Path) -> int | None:
    """The process that runs the launch in `folder` now; None if it has ended."""
    try:
        fields = json.loads(_card(folder).read_text(encoding="utf-8"))
        pid, start_time = int(fields["pid"]), fields["start_time"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    there = process_state(pid)
    return pid if there is not None and there.state != "Z" and there.start_ticks == start_time else None


def _card(folder: Path) -> Path:
    return folder / "launcher.json"


def _wanted(folder: Path) -> Path:
    return folder / "wanted"
