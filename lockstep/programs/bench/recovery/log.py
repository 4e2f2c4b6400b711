"""What the workers of a trial are given, and what they write: a log of commits, and a result. Without torch."""

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.programs.bench.plan import BenchRecord

_COMMITS, _GATE = "commits", "gate"


@dataclass(frozen=True)
class TrainingTask(BenchRecord):
    """Train `model` for `steps` steps; the log of commits, the gate and the result are in `folder`.

    `save_every` is for the baseline: so many steps are between its checkpoints.
    """

    model: str
    steps: int
    folder: str
    save_every: int | None = None

    @property
    def place(self) -> Path:
        return Path(self.folder)


@dataclass(frozen=True)
class TrainingResult(BenchRecord):
    """What the worker with rank 0 leaves at the end: a digest of everything trained, and where that was."""

    digest: str
    machine: dict[str, Any]


@dataclass(frozen=True)
class CommitEntry:
    """Step `step` was done, counted from 1, as the worker with this `rank` of `size` workers saw it.

    `generation` rises when a new group of workers is formed. Times are those of the host's monotonic clock, which
    all its processes share.
    """

    time_s: float
    step: int
    rank: int
    size: int
    generation: int


@contextmanager
def open_log(folder: Path, rank: int) -> Iterator[Callable[[int, int, int, int], None]]:
    """Yields the function that records that a step is committed now: `committed(step, rank, size, generation)`.

    Each worker has a file of its own. The first line has its rank and its process. Every step costs one write, and
    nothing else.
    """
    (folder / _COMMITS).mkdir(exist_ok=True)
    fd = os.open(folder / _COMMITS / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def committed(step: int, rank: int, size: int, generation: int) -> None:
        os.write(fd, f"{time.monotonic()!r} {step} {rank} {size} {generation}\n".encode())

    try:
        os.write(fd, f"{rank} {os.getpid()}\n".encode())
        yield committed
    finally:
        os.close(fd)


def read_workers(folder: Path) -> dict[int, int]:
    """The process of each rank that has started so far. Valid only before a worker was replaced."""
    headers = (lines[0].split() for lines in _files(folder) if lines)
    return {int(rank): int(pid) for rank, pid in headers}


def read_commits(folder: Path) -> list[CommitEntry]:
    """All commits of all workers, in order of time."""
    entries = (line.split() for lines in _files(folder) for line in lines[1:])
    commits = (CommitEntry(float(time_s), *map(int, numbers)) for time_s, *numbers in entries)
    return sorted(commits, key=lambda one: one.time_s)


def last_step(commits: Iterable[CommitEntry]) -> int:
    """The highest step that is committed; 0 for none."""
    return max((commit.step for commit in commits), default=0)


def _files(folder: Path) -> list[list[str]]:
    """The whole lines of every file; the last one may be under way."""
    paths = sorted((folder / _COMMITS).glob("*"))
    return [path.read_text(encoding="ascii").split("\n")[:-1] for path in paths]


@contextmanager
def shut_gate(folder: Path) -> Iterator[Callable[[], None]]:
    """Holds the workers before their first step until the function that it yields is called, or the context ends.

    The gate is a locked file. Workers wait in the kernel, without computing; when it is open, or when this process has
    died, they pass at once.
    """
    with (folder / _GATE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield lambda: fcntl.flock(file, fcntl.LOCK_UN)


def pass_gate(folder: Path) -> None:
    with (folder / _GATE).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
