"""Whether a run has come to its end: a file in its folder says so, for those who see only exit codes.

# Note [Exit codes of others]
# srun ends with the highest code of its tasks. A run that lost a task and went on to its end has one that was killed,
# so srun says 137, as if nothing had come of it. Therefore the run's first worker writes down that it came to its end.
# A code by which no worker is lost, such as 1 for an error in the script, is never turned into 0.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.events import Closed, Event, Started
from lockstep.launch.channels.exits import LEFT_OUT, MISPLACED, TERMINATED

FILE = "finished.json"

_OF_LOST_WORKERS = (LEFT_OUT, MISPLACED, *(128 + number for number in range(1, 65) if 128 + number != TERMINATED))


@dataclass(frozen=True)
class Finish:
    """The end of a run, on `num_workers` workers."""

    step: int
    num_workers: int


class FinishMark:
    """Removes the file when a run starts, and writes it when the run has `ended_well`; the first worker does.

    Where that fails, `say` is called, and the run ends as it would have.
    """

    def __init__(
        self,
        folder: Path,
        is_first: Callable[[], bool],
        ended_well: Callable[[], Finish | None],
        say: Callable[[str], None],
    ) -> None:
        self._path = folder.absolute() / FILE  # the script may change its working folder
        self._is_first, self._ended_well, self._say = is_first, ended_well, say

    def __call__(self, event: Event) -> None:
        try:
            if isinstance(event, Started) and self._is_first():
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.unlink(missing_ok=True)
            elif isinstance(event, Closed) and self._is_first() and (finish := self._ended_well()) is not None:
                _write(self._path, finish)
        except OSError as error:
            self._say(
                f"{self._path} cannot be written: {error.strerror}. `lockstep finished` will not know of this run"
            )


def read_finish(folder: Path) -> Finish | None:
    """The end of the run in this folder; None if it has not come to one."""
    try:
        return Finish(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def verdict(folder: Path, code: int) -> tuple[int, str]:
    """The exit code of a job whose launcher ended with `code`, and why. See Note [Exit codes of others]."""
    finish = read_finish(folder)
    if code == TERMINATED:
        return code, f"the run in {folder} was asked to end: started again, it goes on from its newest checkpoint"
    if not folder.is_dir():
        return code or 1, f"there is no folder {folder}"
    if finish is None:
        return code or 1, f"the run in {folder} has not come to its end"
    done = f"the run in {folder} has come to its end, at step {finish.step} on {finish.num_workers} workers"
    if code in (0, *_OF_LOST_WORKERS):
        return 0, done if code == 0 else f"{done}; code {code} is that of a worker that was lost on the way"
    return code, f"{done}, but its launcher ended with code {code}, which is not that of a lost worker"


def _write(path: Path, finish: Finish) -> None:
    """Whole or not at all: nothing is left where it cannot be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(asdict(finish)) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
