"""Memory: how much is free, and whether the kernel killed something when it ran out."""

from collections.abc import Callable

import psutil

from lockstep.launch.host.control_groups import ControlGroups

_RECENT_S = 2.0


def free_bytes() -> int:
    """How much more this host, and the container, let a process take."""
    free, groups = int(psutil.virtual_memory().available), ControlGroups.of_this_process().memory()
    return free if groups is None else min(free, groups[1])


class MemoryKills:
    """Notices that the kernel killed a process for memory. `recent` must be called a few times a second."""

    def __init__(self, count: Callable[[], int] = lambda: ControlGroups.of_this_process().memory_kills()) -> None:
        self._count, self._counted, self._grew_s = count, count(), float("-inf")

    def recent(self, now_s: float) -> bool:
        """Whether the count has grown in the last moments: a large process takes some time to be gone."""
        before, self._counted = self._counted, self._count()
        if self._counted > before:
            self._grew_s = now_s
        return now_s - self._grew_s < _RECENT_S
