"""Launches the workers of a benchmark and listens to worker 0. Without torch."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.launch.launch import Job, launch
from lockstep.programs.bench.result import Progress


class ResultsDiffer(LockstepError):  # noqa: N818
    """Two sides computed different things, so their times cannot be compared."""


@dataclass
class Stopped(LockstepError):  # noqa: N818
    """The workers did not come to their end; `exit_code` is the launch's."""

    told: str
    exit_code: int
    interrupted: bool

    def __str__(self) -> str:
        return self.told


class Lines:
    """Takes worker 0's output as it comes and hands on the lines that tell progress."""

    def __init__(self, told: Callable[[Progress], None]) -> None:
        self._told = told
        self._rest = b""

    def __call__(self, output: bytes) -> None:
        *lines, self._rest = (self._rest + output).split(b"\n")
        for line in lines:
            progress = Progress.read(line.decode(errors="replace"))
            if progress is not None:
                self._told(progress)


def run_to_end(job: Job, told: Callable[[Progress], None]) -> None:
    """All workers have done their part, and none is left; raises `Stopped` otherwise. Main thread only."""
    said: list[str] = []
    outcome = launch(job, show=Lines(told), say=said.append)
    if outcome.exit_code:
        # After an interrupt there is nothing to look up, and the folder that the launcher names goes away.
        interrupted = outcome.failure is None
        text = "✗ stopped; all workers have ended" if interrupted else "\n".join(said)
        raise Stopped(text, outcome.exit_code, interrupted)


@contextmanager
def result_folder() -> Iterator[Path]:
    """A folder that is gone afterwards, unless a worker failed: then the user is told of the logs in it."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-bench-"))
    keep = False
    try:
        yield folder
    except Stopped as stopped:
        keep = not stopped.interrupted
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
