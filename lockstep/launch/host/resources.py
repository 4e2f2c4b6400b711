"""What this host, and the container, let processes use, and whether the kernel killed one when memory ran out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path, PurePosixPath

import psutil

UNLIMITED = 2**60
"""Version 1 writes "no limit" as a number of about this size or more."""
RECENT_S = 2.0


@dataclass(frozen=True)
class ControlGroups:
    """The control groups that this process is in, of either version.

    A limit holds for everything below it, so the tightest from the group up to the root counts. `paths` is
    /proc/self/cgroup; `root` is where the groups are mounted.
    """

    paths: str
    root: Path

    @classmethod
    def of_this_process(cls) -> "ControlGroups":
        return cls(_read(Path("/proc/self/cgroup")) or "", Path("/sys/fs/cgroup"))

    def cpu_quota(self) -> float | None:
        """How many cores' time may be used; None without a limit."""
        return min((quota for folder in self._folders("cpu") if (quota := _quota(folder)) is not None), default=None)

    def memory(self) -> tuple[int, int] | None:
        """The limit that will be met first, and what is left below it; None without one."""
        limits = [both for folder in self._folders("memory") if (both := _memory(folder)) is not None]
        return min(limits, key=lambda both: both[1], default=None)

    def memory_kills(self) -> int:
        """How often the kernel has killed a process of this group for memory; 0 where it keeps no count."""
        own = next(self._folders("memory"), self.root)
        return _field(own / "memory.events", "oom_kill")

    def processes_left(self) -> float | None:
        """How many more may be started; None without a limit."""
        limits = [left for folder in self._folders("pids") if (left := _processes_left(folder)) is not None]
        return min(limits, default=None)

    def _folders(self, controller: str) -> Iterator[Path]:
        """The process's group for a controller and those above it, as far as they can be seen from here."""
        for line in self.paths.splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if number == "0" or controller in controllers.split(","):
                base = self.root / controller if controllers else self.root
                group = PurePosixPath(path.lstrip("/"))
                yield from (base / above for above in (group, *group.parents) if (base / above).is_dir())


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
        return now_s - self._grew_s < RECENT_S


def _quota(folder: Path) -> float | None:
    words = (_read(folder / "cpu.max") or "").split()
    if len(words) != 2:
        words = [_read(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    try:
        quota, period = int(words[0]), int(words[1])
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def _memory(folder: Path) -> tuple[int, int] | None:
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None and limit < UNLIMITED:
            reclaimable = _field(folder / "memory.stat", cache_name)
            return int(limit), max(int(limit - used) + reclaimable, 0)
    return None


def _processes_left(folder: Path) -> float | None:
    most, now = _number(folder / "pids.max"), _number(folder / "pids.current")
    return most - now if most is not None and now is not None else None


def _number(file: Path) -> float | None:
    text = _read(file)
    if text == "max":
        return inf
    return int(text) if text is not None and text.isdecimal() else None


def _field(file: Path, name: str) -> int:
    rows = (line.split() for line in (_read(file) or "").splitlines())
    return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == name and row[1].isdecimal()), 0)


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
