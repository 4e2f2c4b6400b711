"""The launcher's signals, as a file to wait for instead of interrupts.

# Note [A launcher inside an engine's job]
# Slurm sends the signals of Note [Signals of an engine] to every process of a step: to the launcher and to its workers.
# So there they mean to the launcher what they mean to a worker that Slurm has started itself: all save and end. They
# come once, however often they are sent, and only Slurm ends who takes too long. `lockstep scale` has a signal that
# nobody else sends.

# Note [A terminal that is closed]
# The kernel sends SIGHUP to the launcher, and its shell may send it again: it is SIGTERM, once. Under nohup it is
# ignored, and stays so.
"""

import signal
import socket
from collections.abc import Sequence
from types import FrameType

SCALE = signal.SIGRTMIN
STOPS = (signal.SIGINT, signal.SIGTERM)


class LauncherSignals:
    """While it is open, signals only make `fileno()` readable. Main thread only.

    They are Ctrl-C, SIGTERM and SCALE. Each of `of_engine` is as SIGTERM: see Note [A launcher inside an engine's job].
    So is SIGHUP: see Note [A terminal that is closed].
    """

    def __init__(self, of_engine: Sequence[signal.Signals] = ()) -> None:
        self.of_engine = tuple(of_engine)
        self._has_ended = False

    def __enter__(self) -> "LauncherSignals":
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        watched = {*STOPS, *self.of_engine, *hangup, SCALE}
        self._before = {signum: signal.signal(signum, _do_nothing) for signum in watched}
        return self

    def fileno(self) -> int:
        return self._reader.fileno()

    def add(self, signum: signal.Signals) -> None:
        """Acts as if this process had received the signal."""
        self._writer.send(bytes([signum]))

    def take(self) -> list[signal.Signals]:
        """The signals that have come since the last call, in order."""
        try:
            come = [signal.Signals(number) for number in self._reader.recv(64) if number in self._before]
        except BlockingIOError:
            return []
        return [meant for signum in come if (meant := self._meaning(signum)) is not None]

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    def _meaning(self, signum: signal.Signals) -> signal.Signals | None:
        if signum not in (*self.of_engine, signal.SIGHUP):
            return signum
        comes_again, self._has_ended = self._has_ended, True
        return None if comes_again else signal.SIGTERM


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Python writes the number to the socket only where a handler exists."""
