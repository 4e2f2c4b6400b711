"""A lock that is handed on in turn."""

import threading
from types import TracebackType


class Turns:
    """A lock whose busy holder lets others in by `pass_on`, and a condition on it for those who wait for more.

    A plain lock that is released and taken again at once mostly stays where it is. Here a thread that waits holds the
    entrance, and the one that comes back stands behind it.
    """

    def __init__(self) -> None:
        self._entrance = threading.Lock()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._holder: int | None = None

    def acquire(self) -> None:
        with self._entrance:
            self._lock.acquire()
        self._holder = threading.get_ident()

    def release(self) -> None:
        """Lets go, if this thread has it: an interrupt while it waited to come in leaves it without."""
        if self._holder == threading.get_ident():
            self._holder = None
            self._lock.release()

    def wait(self) -> None:
        """Lets go until another thread calls `notify_all`, and comes in again."""
        self._holder = None
        try:
            self._changed.wait()
        finally:
            self._holder = threading.get_ident()

    def notify_all(self) -> None:
        if self._holder == threading.get_ident():
            self._changed.notify_all()

    @property
    def wanted(self) -> bool:
        """Whether a thread is waiting to come in."""
        return self._entrance.locked()

    def pass_on(self) -> None:
        """A thread that has been waiting to come in has had its turn."""
        if self.wanted:
            self.release()
            self.acquire()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
