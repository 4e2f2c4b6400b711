"""How long a step usually takes on this worker."""

import statistics
from collections import deque

REMEMBERED = 31
LEARN_EVERY = 8


class Pace:
    """The median of the last steps; nothing is said before the first few are over."""

    def __init__(self) -> None:
        self.usual_ns = 0
        self._began_s: float | None = None
        self._taken_s: deque[float] = deque(maxlen=REMEMBERED)
        self._count = 0

    def begins(self, now_s: float) -> None:
        self._began_s = now_s

    def ends(self, now_s: float) -> None:
        if self._began_s is None:
            return
        self._taken_s.append(now_s - self._began_s)
        self._began_s = None
        self._count += 1
        if self._count % LEARN_EVERY == 0:
            self.usual_ns = int(statistics.median(self._taken_s) * 1e9)
