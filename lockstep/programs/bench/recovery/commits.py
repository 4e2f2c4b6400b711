"""When each step was committed: every worker writes it to a file of its own, the driver reads them all. Without torch.

The first line of a file says who writes it: the worker's rank, and its process, for whoever wants to kill it. Times are
those of the host's monotonic clock, which all its processes share.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_FOLDER = "commits"


@dataclass(frozen=True)
class Commit:
    """Step `step` was done, counted from 1, as the worker with this `rank` of `size` workers saw it.

    `generation` rises when the group of workers is formed anew.
    """

    time_s: float
    step: int
    rank: int
    size: int
    generation: int

    def written(self) -> str:
        return f"{self.time_s!r} {self.step} {self.rank} {self.size} {self.generation}\n"

    @classmethod
    def read(cls, line: str) -> "Commit":
        time_s, *numbers = line.split()
        return cls(float(time_s), *map(int, numbers))


class CommitLog:
    """A worker's own file. One write for every step, and nothing else that costs time."""

    def __init__(self, folder: Path, rank: int) -> None:
        place = folder / _FOLDER
        place.mkdir(exist_ok=True)
        self._fd = os.open(place / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(self._fd, f"{rank} {os.getpid()}\n".encode())

    def committed(self, step: int, rank: int, size: int, generation: int) -> None:
        """The step is committed now."""
        os.write(self._fd, Commit(time.monotonic(), step, rank, size, generation).written().encode())

    def __enter__(self) -> "CommitLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def read_workers(folder: Path) -> dict[int, int]:
    """The process of each rank, of the workers that have come so far. Only true before anybody was replaced."""
    headers = (lines[0].split() for lines in _files(folder) if lines)
    return {int(rank): int(pid) for rank, pid in headers}


def read_commits(folder: Path) -> list[Commit]:
    """All commits of all workers, in order of time."""
    return sorted((Commit.read(line) for lines in _files(folder) for line in lines[1:]), key=lambda one: one.time_s)


def last_step(commits: Iterable[Commit]) -> int:
    """The highest step that is committed; 0 for none."""
    return max((commit.step for commit in commits), default=0)


def _files(folder: Path) -> list[list[str]]:
    """The whole lines of every file; the last one may be under way."""
    paths = sorted((folder / _FOLDER).glob("*"))
    return [path.read_text(encoding="ascii").split("\n")[:-1] for path in paths]
