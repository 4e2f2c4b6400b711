"""The checkpoints of one run as one worker holds them: due, copied, written, kept.

# Note [Who saves]
# All workers hold the same bits after a step, so one is enough: the worker with rank 0, alone, decides that a
# checkpoint is due and writes it. Nothing is exchanged. The others keep the time as though they had saved, so
# that whoever becomes rank 0 goes on with the schedule. Its first save is then due at most one interval later.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from lockstep.errors import BadArgument
from lockstep.state.checkpoints.buffers import Buffers
from lockstep.state.checkpoints.file import Snapshot
from lockstep.state.checkpoints.folder import Retention, name_of
from lockstep.state.checkpoints.schedule import Every, Schedule
from lockstep.state.checkpoints.writer import Writer

LIMIT_S = 30.0


@dataclass(frozen=True)
class Who:
    """What the checkpoints need of the run: this worker's rank now, and a way to tell the user something."""

    rank: Callable[[], int]
    say: Callable[[str], None]


class Checkpoints:
    """Saves the run to `folder` while it trains. One owner, who calls `between_steps` and `close`."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep: int = 3,
        *,
        who: Who,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = checked_folder(folder)
        self.stall_s = 0.0
        """For how long the last save kept the training waiting: the time of its copy in memory."""
        self._who = who
        self._clock = clock
        self._schedule = Schedule(Every(every_steps, every_minutes), 0, clock())
        self._writer = Writer(self.folder, Retention(self.folder, checked_keep(keep)))
        self._buffers = Buffers()
        self._put_off_was_said = False

    @property
    def last_good(self) -> Path | None:
        """The newest checkpoint that this worker has written."""
        return self._writer.last_good

    def starts_at(self, step: int) -> None:
        """The run stands at `step`, in which nothing needs to be saved: it begins or was resumed there."""
        self._schedule.done(step, self._clock())

    def due(self, step: int, now_s: float) -> bool:
        """Whether this worker should save `step` now. Decided here alone. See Note [Who saves]."""
        if not self._schedule.due(step, now_s):
            return False
        if self._who.rank() != 0:
            self._schedule.done(step, now_s)
            return False
        return True

    def between_steps(self, step: int, capture: Callable[[], Snapshot]) -> None:
        """Called where a step is wholly done and the next has not begun. If due, `capture()` is copied, and written
        by a thread; the training waits for the copy only. If a save is under way, this one is put off."""
        self._tell_news()
        now_s = self._clock()
        if not self.due(step, now_s):
            return
        if self._writer.is_busy:
            self._say_put_off(step)
            return
        self._writer.start(self._buffers.copied(capture()))
        self._schedule.done(step, now_s)
        self.stall_s = self._clock() - now_s

    def save_now(self, step: int, capture: Callable[[], Snapshot], limit_s: float = LIMIT_S) -> Path | None:
        """Saves `step` and waits for it: the checkpoint's path; None if it could not be written within `limit_s`, or
        on a worker that does not save. For a run that is asked to end."""
        if self._who.rank() != 0:
            return None
        deadline_s = self._clock() + limit_s
        if self._written_by(deadline_s) and not self._has(step):
            self._writer.start(self._buffers.copied(capture()))
            self._schedule.done(step, self._clock())
            self._written_by(deadline_s)
        self._tell_news()
        return self.last_good if not self._writer.is_busy and self._has(step) else None

    def close(self, limit_s: float = LIMIT_S) -> None:
        """Waits for the writer, for at most `limit_s`. What it has not finished by then becomes a checkpoint only if
        the process lives on long enough. May be called twice."""
        if not self._writer.wait(limit_s):
            self._who.say(f"a checkpoint was still being written to {self.folder} after {limit_s:g} s: not waited for")
        self._tell_news()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _written_by(self, deadline_s: float) -> bool:
        return self._writer.wait(deadline_s - self._clock())

    def _has(self, step: int) -> bool:
        return self.last_good is not None and self.last_good.name == name_of(step)

    def _tell_news(self) -> None:
        while self._writer.news:
            self._who.say(self._writer.news.popleft())

    def _say_put_off(self, step: int) -> None:
        if not self._put_off_was_said:
            self._put_off_was_said = True
            self._who.say(
                f"the checkpoint of step {step} waits: the one before is still being written to {self.folder}. "
                "Checkpoints are due more often than this disk takes them; this is said once."
            )


def checked_keep(keep: int) -> int:
    if type(keep) is not int or keep < 1:
        raise BadArgument(f"keep is how many checkpoints stay, 1 or more, not {keep!r}")
    return keep


def checked_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder as a path; it need not exist yet."""
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise BadArgument(f"{path} is not a folder, so no checkpoints can be kept in it")
    return path
