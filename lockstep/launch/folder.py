"""The folder of one run, which holds its logs and reports."""

import os
import re
from pathlib import Path

from lockstep.errors import BadArgument, BadEnvironment

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def new_run_folder(base: Path, name: str) -> Path:
    """Creates `base/<name>-<k>` with the next free k; two launchers at once get two folders.

    The last step is a plain mkdir, which fails on anything that exists, links included: no link leads out of `base`.
    """
    check_name(name)
    try:
        base.mkdir(parents=True, exist_ok=True)
        return _make_next(base, name)
    except OSError as error:
        raise BadEnvironment(f"no run folder can be made in {base}: {error.strerror}; give another one") from error


def check_name(name: str) -> None:
    """Raises unless `name` is safe as part of a file name."""
    if not _NAME.fullmatch(name):
        raise BadArgument(
            f"{name!r} cannot name a run: use letters, digits, '.', '_' and '-', "
            "and start with a letter, a digit or '_'"
        )


def name_from(program: str) -> str:
    """A name that `check_name` accepts, made from a script's path or a module's name."""
    stem = Path(program).name.removesuffix(".py")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-")
    return name or "run"


def _make_next(base: Path, name: str) -> Path:
    taken = re.compile(re.escape(name) + r"-(\d+)")
    numbers = [int(match[1]) for match in map(taken.fullmatch, os.listdir(base)) if match]
    k = max(numbers, default=0) + 1
    while True:
        folder = base / f"{name}-{k}"
        try:
            folder.mkdir()
        except FileExistsError:
            k += 1
        else:
            return folder
