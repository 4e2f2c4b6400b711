"""The workers' logs, and worker 0's way to the screen."""

import os
from collections.abc import Callable
from pathlib import Path

from lockstep.errors import BadEnvironment

_CHUNK_BYTES = 1 << 16


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"worker-{rank}.log"


def open_log(folder: Path, rank: int) -> int:
    """A new, empty log. A link in its place is refused: nothing is written outside the folder."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(log_path(folder, rank), flags, 0o644)
    except OSError as error:
        raise BadEnvironment(f"the log {log_path(folder, rank)} cannot be written: {error.strerror}") from error


def clear_earlier(folder: Path) -> None:
    """Removes what an earlier launch left in the folder: a stale report would be taken for a new failure."""
    for pattern in ("worker-*.log", "worker-*.failure.json"):
        for path in folder.glob(pattern):
            path.unlink()


class Tee:
    """Owns the pipe of one worker's output, which goes to its log and to `show`."""

    def __init__(self, log_fd: int, show: Callable[[bytes], None]) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._log_fd, self._show = log_fd, show

    def fileno(self) -> int:
        return self._reader

    def pump(self) -> bool:
        """Passes on what has come. False when there will never be more."""
        try:
            chunk = os.read(self._reader, _CHUNK_BYTES)
        except BlockingIOError:
            return True
        self._pass_on(chunk)
        return bool(chunk)

    def drain(self) -> None:
        """Passes on everything that is already in the pipe."""
        try:
            while chunk := os.read(self._reader, _CHUNK_BYTES):
                self._pass_on(chunk)
        except BlockingIOError:
            pass

    def _pass_on(self, chunk: bytes) -> None:
        if chunk:
            write_all(self._log_fd, chunk)
            self._show(chunk)

    def close(self) -> None:
        os.close(self._reader)


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
