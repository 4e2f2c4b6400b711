"""Places on a disk that people name."""

import os
from pathlib import Path
from typing import Any

from lockstep.errors import BadArgument


def as_path(what: str, path: Any) -> Path:
    """The path that `what` was given; it need not exist."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise BadArgument(f"{what} takes a path, not {type(path).__name__}")
    if "\0" in os.fspath(path):
        raise BadArgument(f"{what} takes a path, and no path has a NUL byte: {os.fspath(path)!r:.60}")
    return Path(path)
