"""Memory: how much is free, and whether the kernel killed something when it ran out."""

import re
from collections.abc import Callable
from pathlib import Path

import psutil

from lockstep.launch.control_groups import ControlGroups

_RECENT_S = 2.0
_CGROUPS = Path("/sys/fs/cgroup")
_ALLOCATION = re.compile(
    "can't allocate memory|not enough memory|unable to allocate|out of memory|bad_alloc", re.IGNORECASE
)
_REQUESTED = re.compile(r"tried to allocate (\d+) bytes")


def free_bytes() -> int:
    """How much more this host, and the container, let a process take."""
    free, groups = int(psutil.virtual_memory().available), ControlGroups.of_this_process().memory()
    return free if groups is None else min(free, groups[1])


class MemoryKills:
    """Notices that the kernel killed a process for memory. `recent` must be called a few times a second."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count, self._counted, self._grew_s = count, count(), float("-inf")

    def recent(self, now_s: float) -> bool:
        """Whether the count has grown in the last moments: a large process takes some time to be gone."""
        before, self._counted = self._counted, self._count()
        if self._counted > before:
            self._grew_s = now_s
        return now_s - self._grew_s < _RECENT_S


def count_memory_kills() -> int:
    """How often the kernel killed a process of this control group for memory; 0 where it keeps no count.

    psutil knows no control groups.
    """
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        ours = next(line.removeprefix("0::/") for line in groups if line.startswith("0::/"))
        return _oom_kills((_CGROUPS / ours / "memory.events").read_text())
    except (OSError, StopIteration, ValueError):
        return 0


def _oom_kills(events: str) -> int:
    counts = dict(line.split() for line in events.splitlines())
    return int(counts.get("oom_kill", 0))


def with_memory_facts(kind: str, message: str) -> str:
    """The message of an exception; if memory had run out, led by how much was asked for and how much was free."""
    if kind not in ("MemoryError", "OutOfMemoryError") and not _ALLOCATION.search(message):
        return message
    requested = _REQUESTED.search(message)
    amount = f"{_gib(int(requested[1]))} asked for, " if requested else ""
    facts = f"out of memory: {amount}{_gib(psutil.virtual_memory().available)} free on this host"
    return f"{facts}. {message}" if message else facts


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
