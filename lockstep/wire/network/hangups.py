"""One thread that notices when connections of another library hang up.

# Note [Connections of another library]
# The watch polls the sockets and reads nothing from them. The library notices a hang-up by itself, closes its socket,
# and only then says whose it was. So the watch waits until the socket is closed before it reports. It also looks every
# LOOK_S which sockets are closed: one may hang up and be closed while nobody polls, and its number be used again. While
# a poll sleeps, the kernel keeps the sockets open: their owner stops the watch before it closes them.
"""

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress

from lockstep.wire.network.keepalive import Sockets

LOOK_S = 1.0
SOON_S = 0.01
"""How long the library is given at first to close a socket that has hung up; then twice as long, up to LOOK_S."""


class HangupWatch:
    """Calls `on_hangup`, on its thread, whenever some of the sockets were closed after a hang-up, or for any reason.

    One thread for any number of sockets. Its owner calls `close` before it closes the sockets.
    """

    def __init__(self, sockets: Sockets, on_hangup: Callable[[], None]) -> None:
        self._open = dict(sockets)
        self._on_hangup = on_hangup
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="lockstep-hangups", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. May be called twice, not by the thread itself."""
        if self._thread.is_alive():
            os.eventfd_write(self._stop, 1)
            self._thread.join()
        if self._stop >= 0:
            os.close(self._stop)
            self._stop = -1

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        for number in self._open:
            poll.register(number, select.POLLRDHUP)
        hung: set[int] = set()
        wait_s = LOOK_S
        while self._stop not in (ready := {number for number, _ in poll.poll(wait_s * 1000)}):
            for number in ready:
                poll.unregister(number)  # it is ready for ever, and others can be noticed still
            hung = (hung | ready) & self._open.keys()
            if closed := self._closed():
                for number in closed - hung:
                    poll.unregister(number)
                hung -= closed
                self._on_hangup()
            wait_s = min(LOOK_S, SOON_S if ready else 2 * wait_s) if hung else LOOK_S

    def _closed(self) -> set[int]:
        """Those that are not open any more; they are forgotten."""
        closed = {number for number, identity in self._open.items() if not _is_open(number, identity)}
        for number in closed:
            del self._open[number]
        return closed


def _is_open(number: int, identity: int) -> bool:
    with suppress(OSError):
        return os.fstat(number).st_ino == identity
    return False
