"""What the kernel says of processes: what they do, from /proc, which belong to a group, and when they have ended.

psutil has neither signal masks, nor the wakes of each thread, nor a start time that stays the same when the clock is
set. The rest is read by hand too, because the launcher reads it all the time: `activity` by psutil's processor times
and bytes took 1.3 to 1.5 times as long (2 processes, 300 looks, on a busy machine).
"""

import os
import select
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from signal import Signals

import psutil

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_WAKES = b"voluntary_ctxt_switches:"
_HANDLED = (b"SigIgn:", b"SigCgt:")


@dataclass(frozen=True)
class ProcessState:
    """A process as the kernel shows it. `state` is a letter: R runs, S sleeps, D waits for a disk, T is stopped."""

    state: str
    cpu_s: float
    start_ticks: int
    """When it started, since the host did: together with its id it identifies a process for good."""


@dataclass(frozen=True)
class Activity:
    """What processes have done until now; the difference of two is what they did between."""

    cpu_s: float = 0.0
    io_bytes: int = 0
    """Read and written, files and pipes alike."""
    processes: frozenset[int] = frozenset()
    wakes: Mapping[int, int] = field(default_factory=dict)
    """By thread: how often it has gone to sleep, and so was woken."""


def process_state(pid: int) -> ProcessState | None:
    """None if there is no such process."""
    stat = _read(f"/proc/{pid}/stat")
    if not stat:
        return None
    fields = stat.rpartition(b")")[2].split()  # the name before may hold anything
    return ProcessState(fields[0].decode(), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, int(fields[19]))


def activity(pids: Iterable[int]) -> Activity:
    """What the processes have done until now, as far as the kernel shows it."""
    alive = {pid: state for pid in pids if (state := process_state(pid)) is not None}
    return Activity(
        cpu_s=sum(state.cpu_s for state in alive.values()),
        io_bytes=sum(map(_io_bytes, alive)),
        processes=frozenset(alive),
        wakes={thread: wakes for pid in alive for thread, wakes in _wakes(pid)},
    )


def survives_signal(pid: int, signum: Signals) -> bool:
    """Whether the process would survive the signal because it catches or ignores it."""
    bit = 1 << (signum - 1)
    return any(int(mask, 16) & bit for mask in _values(_read(f"/proc/{pid}/status"), *_HANDLED))


def members(groups: Collection[int]) -> list[int]:
    """The processes that belong to the groups now, their leaders included. psutil has no process groups."""
    return [pid for pid in psutil.pids() if _group(pid) in groups] if groups else []


def await_end(pids: Collection[int], within_s: float) -> bool:
    """True once all processes have ended; False when `within_s` has passed first."""
    deadline = time.monotonic() + within_s
    with ExitStack() as opened:
        poll, waiting = select.poll(), set()
        for pid in pids:
            with suppress(ProcessLookupError):
                waiting.add(fd := os.pidfd_open(pid))
                opened.callback(os.close, fd)
                poll.register(fd, select.POLLIN)
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(left_s * 1000):
                poll.unregister(fd)
                waiting.remove(fd)
    return not waiting


def _io_bytes(pid: int) -> int:
    return sum(map(int, _values(_read(f"/proc/{pid}/io"), b"rchar:", b"wchar:")))


def _wakes(pid: int) -> Iterator[tuple[int, int]]:
    threads: list[str] = []
    with suppress(OSError):
        threads = os.listdir(f"/proc/{pid}/task")
    for thread in threads:
        for wakes in _values(_read(f"/proc/{pid}/task/{thread}/status"), _WAKES):
            yield int(thread), int(wakes)


def _values(text: bytes, *names: bytes) -> list[bytes]:
    return [line.split()[1] for line in text.splitlines() if line.startswith(names)]


def _read(path: str) -> bytes:
    """Nothing if the process has ended, or may not be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _group(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None
