"""The launcher's signals, as a file to wait for instead of interrupts."""

import signal
import socket
from types import FrameType

SCALE = signal.SIGUSR1
WATCHED = (signal.SIGINT, signal.SIGTERM, SCALE)


class LauncherSignals:
    """While it is open, SIGINT, SIGTERM and SIGUSR1 only make `fileno()` readable. Main thread only."""

    def __enter__(self) -> "LauncherSignals":
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = {signum: signal.signal(signum, _do_nothing) for signum in WATCHED}
        return self

    def fileno(self) -> int:
        return self._reader.fileno()

    def add(self, signum: signal.Signals) -> None:
        """Acts as if this process had received the signal."""
        self._writer.send(bytes([signum]))

    def take(self) -> list[signal.Signals]:
        """The signals that have come since the last call, in order."""
        try:
            return [signal.Signals(number) for number in self._reader.recv(64) if number in WATCHED]
        except BlockingIOError:
            return []

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Python writes the number to the socket only where a handler exists."""
