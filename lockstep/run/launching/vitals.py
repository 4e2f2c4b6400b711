"""What the kernel says of a process, from /proc."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Vitals:
    """A process as the kernel shows it. `state` is a letter: R runs, S sleeps, D waits for a disk, T is stopped."""

    state: str
    cpu_s: float
    start_ticks: int
    """When it started, since the host did: with the number it names a process for good."""


def vitals(pid: int) -> Vitals | None:
    """None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before may hold anything
    except OSError:
        return None
    return Vitals(fields[0].decode(), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, int(fields[19]))


def cpu_s(pids: Iterable[int]) -> float:
    """The processor time that the processes have used until now."""
    return sum(found.cpu_s for found in map(vitals, pids) if found is not None)
