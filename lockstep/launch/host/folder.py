"""The folder of one run, which holds its logs and reports.

# Note [A full disk]
# Training does not depend on the launcher's files. Where a disk is full the launcher reports it once, goes on without
# the file, and tries again with the next output.
"""

import errno
import os
import re
from pathlib import Path

from lockstep.errors import BadArgument, BadEnvironment

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
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


def log_path(folder: Path, slot: int) -> Path:
    return folder / f"worker-{slot}.log"


def clear_earlier(folder: Path) -> None:
    """Removes what an earlier launch left in the folder: a stale report would be taken for a new failure."""
    for pattern in ("worker-*.log", "worker-*.failure.json", "worker-*.stack", "wanted", "timeline/worker-*.jsonl*"):
        for path in folder.glob(pattern):
            try:
                path.unlink()
            except OSError as error:
                raise BadEnvironment(f"{path} of an earlier run cannot be removed: {error.strerror}") from error


def open_new(path: Path) -> int:
    """A new, empty file to append to. A link in its place is refused: nothing is written outside the folder."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o644)


def write_whole(path: Path, text: str) -> None:
    """Writes the whole file, or raises and leaves nothing of it."""
    half = path.with_name(f"{path.name}.{os.getpid()}.half")
    try:
        half.write_text(text, encoding="utf-8")
        half.replace(path)
    except OSError:
        half.unlink(missing_ok=True)
        raise


def is_full(error: OSError) -> bool:
    """Whether the disk had no room. See Note [A full disk]."""
    return error.errno in _NO_ROOM
