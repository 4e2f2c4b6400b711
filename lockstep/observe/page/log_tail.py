"""The end of a worker's log, as text."""

import os
from pathlib import Path

from lockstep.launch.host.folder import log_path

TAIL_BYTES = 64 << 10


def log_tail(folder: Path, slot: int, most_bytes: int = TAIL_BYTES) -> str:
    """The last lines of the worker's log; empty if there is none. A link in its place is not followed."""
    try:
        with os.fdopen(os.open(log_path(folder, slot), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            text = file.read(most_bytes).decode("utf-8", "replace")
    except OSError:
        return ""
    return text if size <= most_bytes else text.partition("\n")[2]
