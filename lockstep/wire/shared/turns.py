"""A fair lock."""

import threading
from types import TracebackType


class Turns:
    """A lock whose busy holder lets waiting threads have it by `pass_on`, and a condition on it.

    A thread that releases a plain lock and acquires it again at once mostly gets it before those that wait. Here a
    thread that waits holds a second lock, the entrance, so the one that comes back is behind it.
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
        """Releases the lock, if this thread has it: an interrupted `acquire` may have left it without."""
        if self._holder == threading.get_ident():
            self._holder = None
            self._lock.release()

    def wait(self) -> None:
        """Releases the lock until another thread calls `notify_all`, and acquires it again."""
        self._holder = None
        try:
            self._changed.wait()
        finally:
            self._holder = threading.get_ident()

    def notify_all(self) -> None:
        if self._holder == threading.get_ident():
            self._changed.notify_all()

    @property
    def is_awaited(self) -> bool:
        """Whether a thread waits to acquire the lock."""
        return self._entrance.locked()

    def pass_on(self) -> None:
        """Lets a waiting thread have the lock, and acquires it again."""
        if self.is_awaited:
            self.release()
            self.acquire()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
