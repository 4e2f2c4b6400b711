"""The workers' logs, and the way of their output into them and to the screen."""

import os
from collections.abc import Callable
from pathlib import Path

from lockstep.errors import BadEnvironment

_CHUNK_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20


def log_path(folder: Path, slot: int) -> Path:
    return folder / f"worker-{slot}.log"


def open_log(folder: Path, slot: int) -> int:
    """A new, empty log. A link in its place is refused: nothing is written outside the folder."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(log_path(folder, slot), flags, 0o644)
    except OSError as error:
        raise BadEnvironment(f"the log {log_path(folder, slot)} cannot be written: {error.strerror}") from error


def clear_earlier(folder: Path) -> None:
    """Removes what an earlier launch left in the folder: a stale report would be taken for a new failure."""
    for pattern in ("worker-*.log", "worker-*.failure.json", "worker-*.stack", "wanted"):
        for path in folder.glob(pattern):
            path.unlink()


class Logs:
    """Owns the logs of a run, one for each slot; they are opened when a slot is first used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fds: dict[int, int] = {}

    def of(self, slot: int) -> int:
        """The log of the slot. Whoever comes later than the first is told from it by a line between."""
        if slot in self._fds:
            write_all(self._fds[slot], b"--- here another process takes over as this worker ---\n")
        else:
            self._fds[slot] = open_log(self._folder, slot)
        return self._fds[slot]

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)


class Tee:
    """Owns the pipe of one worker's output, which goes to its log and, while it is `shown`, to the screen.

    Without a log (a spare has none yet) what comes stays in the pipe.
    """

    def __init__(self, show: Callable[[bytes], None], log_fd: int | None = None) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.log_fd, self._show, self.shown = log_fd, show, False

    def fileno(self) -> int:
        return self._reader

    def writer(self) -> int:
        """The end that the worker writes to, to be handed down to it once: `handed_down` closes it here."""
        return self._writer

    def handed_down(self) -> None:
        os.close(self._writer)

    def pump(self) -> bool:
        """Passes on what has come. False when there will never be more."""
        chunk = self._read()
        if chunk:
            self._pass_on(chunk)
        return chunk is None or bool(chunk)

    def drain(self) -> None:
        """Passes on everything that is already in the pipe, which children of an ended worker may hold open.

        No more than a pipe can hold: such a child may write faster than this reads.
        """
        for _ in range(_PIPE_BYTES // _CHUNK_BYTES):
            if self.log_fd is None or not (chunk := self._read()):
                break
            self._pass_on(chunk)

    def _read(self) -> bytes | None:
        """None if nothing is there now; no bytes if there will never be more."""
        try:
            return os.read(self._reader, _CHUNK_BYTES)
        except BlockingIOError:
            return None

    def _pass_on(self, chunk: bytes) -> None:
        if self.log_fd is not None:
            write_all(self.log_fd, chunk)
            if self.shown:
                self._show(chunk)

    def close(self) -> None:
        os.close(self._reader)


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
