"""Passes the workers' output on to their logs and to the screen."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from lockstep.errors import BadEnvironment
from lockstep.launch.channels.failure import Failure
from lockstep.launch.host.folder import is_full, log_path, open_new

_CHUNK_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20


class OutputSink(Protocol):
    """What takes a worker's output."""

    def write(self, output: bytes) -> None: ...

    def end(self, report: Failure | None) -> None:
        """The worker has ended, with this report."""


class Log:
    """Owns the log of one slot. See Note [A full disk] in folder.py."""

    def __init__(self, folder: Path, slot: int, report: Callable[[OSError], None]) -> None:
        """`report` is called for every write that failed."""
        self._folder, self._slot, self._report = folder, slot, report
        self._fd: int | None = None
        self._has_gap = False

    def open(self) -> None:
        """Raises BadEnvironment if the log cannot be opened, except on a full disk."""
        try:
            self._fd = open_new(log_path(self._folder, self._slot))
        except OSError as error:
            if not is_full(error):
                path = log_path(self._folder, self._slot)
                raise BadEnvironment(f"the log {path} cannot be written: {error.strerror}") from error
            self._miss(error)

    def write(self, output: bytes) -> None:
        """Appends the output, after a line that marks the gap if earlier output is missing."""
        gap = b"--- here some output is missing: there was no room for it ---\n" if self._has_gap else b""
        try:
            if self._fd is None:
                self._fd = open_new(log_path(self._folder, self._slot))
            _write_all(self._fd, gap + output)
            self._has_gap = False
        except OSError as error:
            self._miss(error)

    def end(self, report: Failure | None) -> None:
        """Appends the traceback. It goes to the log alone: the screen gets the launcher's short message."""
        if report is not None:
            self.write(report.traceback.encode(errors="backslashreplace"))

    def close(self) -> None:
        if self._fd is not None:
            with suppress(OSError):  # an error of a delayed write
                os.close(self._fd)

    def _miss(self, error: OSError) -> None:
        self._has_gap = True
        self._report(error)


class Logs:
    """Owns the logs of a run, one for each slot; they are opened when a slot is first used."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._logs: dict[int, Log] = {}
        self._has_reported = False

    def of(self, slot: int) -> Log:
        """The log of the slot. A line separates the output of a new worker from that of the one before."""
        if slot in self._logs:
            self._logs[slot].write(b"--- here another process takes over as this worker ---\n")
            return self._logs[slot]
        log = Log(self._folder, slot, self._report)
        log.open()
        self._logs[slot] = log
        return log

    def close(self) -> None:
        for log in self._logs.values():
            log.close()

    def _report(self, error: OSError) -> None:
        """Once for all logs."""
        if not self._has_reported:
            self._has_reported = True
            self._say(
                f"! the logs in {self._folder} cannot be written: {error.strerror}. Training goes on, and its output "
                "still comes to the screen; the logs go on when they can"
            )


class Tee:
    """Owns the pipe of one worker's output, which goes to its log and, while it is `shown`, to the screen.

    Without a log (a spare has none yet) output stays in the pipe.
    """

    def __init__(self, show: Callable[[bytes], None], log: OutputSink | None = None) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.log, self._show, self.shown = log, show, False

    def fileno(self) -> int:
        return self._reader

    def writer(self) -> int:
        """The end that the worker writes to, and inherits: `close_worker_end` closes it in the launcher."""
        return self._writer

    def close_worker_end(self) -> None:
        os.close(self._writer)

    def pump(self) -> bool:
        """Passes on one chunk of output. False at the end of the pipe."""
        chunk = self._read()
        if chunk:
            self._pass_on(chunk)
        return chunk is None or bool(chunk)

    def drain(self) -> None:
        """Passes on everything that is already in the pipe, which children of an ended worker may hold open.

        No more than a pipe can hold: such a child may write faster than this reads.
        """
        for _ in range(_PIPE_BYTES // _CHUNK_BYTES):
            if self.log is None or not (chunk := self._read()):
                break
            self._pass_on(chunk)

    def end(self, report: Failure | None) -> None:
        """Passes on the rest, when the worker has ended with this report."""
        self.drain()
        if self.log is not None:
            self.log.end(report)

    def _read(self) -> bytes | None:
        """None if the pipe is empty now; no bytes at its end."""
        try:
            return os.read(self._reader, _CHUNK_BYTES)
        except BlockingIOError:
            return None

    def _pass_on(self, chunk: bytes) -> None:
        if self.log is not None:
            self.log.write(chunk)
            if self.shown:
                self._show(chunk)

    def close(self) -> None:
        os.close(self._reader)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
