"""Saves a run while it trains: copies it in memory at the right moments, writes it in a thread, keeps the newest.

# Note [Who saves]
# All workers hold the same bits after a step, so one is enough: the worker with rank 0, alone, decides that a
# checkpoint is due and writes it. Nothing is exchanged. The others advance their schedule as though they had saved, so
# that a worker that becomes rank 0 continues it. Its first save is then due at most one interval later.

# Note [Moments]
# From a snapshot the script must be able to go on as though nothing had happened. There are two such moments.
# The first: the script takes the next batch of a loader that it trains on, in the middle of a pass. Then the body of
# the training loop is done, schedules, draws and evaluations included. But no loader may have handed out anything since
# the step was committed: of two loaders that are read in turn the first may already be one batch ahead. Batches that
# were evaluated since do not matter.
# The second: an epoch's body has ended. Batches that come from no loader leave only this one.
# Where the pass of an epoch has no batch left, what is due waits for the next moment: a script that resumed there would
# go on behind a loop that has had no batch, without the names that the loop assigns. A run that is about to end is
# saved there all the same, and once more if it comes to the next moment. What is due also waits for the end of an epoch
# at whose head the script has changed some state: it would change it again, and be refused.

# Note [Errors of the writer]
# A full disk, a folder without permission, a file system that went away: the checkpoint before stays, one line reports
# what happened, and the next that is due is tried again. The line comes once for the same error in a row. Any other
# error comes from the program or its environment and will come again: it is reported once, with what it means for the
# run. The line waits in `news` for the thread that trains, so that subscribers of a run see one thread only.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.data import Position
from lockstep.events import Event, StepCommitted
from lockstep.state.checkpoints.file import write
from lockstep.state.checkpoints.folder import Retention, name_of, next_serial, remove_leftovers
from lockstep.state.checkpoints.in_memory import HostCopies, Standby
from lockstep.state.checkpoints.plan import CheckpointPlan, CheckpointSchedule
from lockstep.state.run_state import RunState
from lockstep.state.snapshot import Snapshot

LIMIT_S = 30.0


@dataclass(frozen=True)
class SavingWorker:
    """This worker's rank now, and where it reports.

    `saves` is called when a snapshot of a step was taken, with what gives its path once it is on disk; `saved` with
    that path then, and the seconds since; `goes_on` with the path of a checkpoint from which the run goes on. `claim`
    takes the folder for the training that begins, and gives what stands against it. `stands_by`: whether it keeps a
    snapshot in memory now (Note [Lost outside of steps] in in_memory.py).
    """

    rank: Callable[[], int]
    say: Callable[[str], None]
    saved: Callable[[Path, float], None] = lambda path, took_s: None
    saves: Callable[[int, Callable[[], Path | None]], None] = lambda step, place: None
    goes_on: Callable[[Path], None] = lambda path: None
    claim: Callable[[], str] = str
    stands_by: Callable[[], bool] = lambda: False


class Writer:
    """The thread that writes one snapshot at a time, and the result of its last save. No error ends the training."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.last_good: Path | None = None
        """The newest checkpoint that this worker has written."""
        self.news: deque[str] = deque()
        self.done: deque[tuple[Path, float]] = deque()
        """Checkpoints that are on disk, and how long each took."""
        self._retention = Retention(folder, keep)
        self._thread: threading.Thread | None = None
        self._last_error = ""

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, snapshot: Snapshot) -> None:
        """Starts to write `snapshot`, which must not change until `is_busy` is false. Call it only when not busy."""
        assert not self.is_busy, "one save at a time"
        # A daemon: a disk that never answers must not keep the process alive after `wait` has timed out.
        self._thread = threading.Thread(target=self._save, args=(snapshot,), name="lockstep-checkpoint", daemon=True)
        self._thread.start()

    def wait(self, limit_s: float) -> bool:
        """Waits for at most `limit_s`; returns whether the writer is idle."""
        if self._thread is not None:
            self._thread.join(max(0.0, limit_s))
        return not self.is_busy

    def _save(self, snapshot: Snapshot) -> None:
        path, began_s = self.folder / name_of(snapshot.state["step"]), time.monotonic()
        try:
            remove_leftovers(self.folder)
            digest = write(path, snapshot, next_serial(self.folder))
            self.last_good, self._last_error = path, ""
            self.done.append((path, time.monotonic() - began_s))
            self._retention.written(digest)
            self._retention.prune()
        except Exception as error:  # noqa: BLE001 - no failed save ends a training
            self._report(path.name, error)

    def _report(self, name: str, error: Exception) -> None:
        """See Note [Errors of the writer]."""
        kind = str(error.strerror) if isinstance(error, OSError) else type(error).__name__
        if kind == self._last_error:
            return
        self._last_error = kind
        if isinstance(error, OSError):
            kept = f"; {self.last_good.name} stays" if self.last_good is not None else ""
            why = f"{error.strerror or error} ({self.folder}){kept}, and the next that is due is tried again"
            self.news.append(f"{name} could not be saved: {why}")
        else:
            self.news.append(
                f"{name} could not be saved in {self.folder}: {kind}: {error}. The disk is not the cause, so every "
                "later checkpoint fails in the same way, until that is mended. Training goes on without new ones."
            )


class Checkpoints:
    """Saves the run to the plan's folder while it trains, from `step` on. Its owner calls `close`."""

    def __init__(
        self, plan: CheckpointPlan, worker: SavingWorker, step: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder = plan.folder
        self._worker, self._clock = worker, clock
        self._schedule = CheckpointSchedule(plan.every, step, clock())
        self._writer = Writer(plan.folder, plan.keep)
        self._copies, self._standby = HostCopies(), Standby(worker.say, clock)
        self._said_put_off = self._said_head = False

    def between_steps(self, step: int, capture: Callable[[], Snapshot], changed_at_head: str | None = None) -> None:
        """Called when a step is wholly done and the next has not begun. If due, copies `capture()`, which a thread
        writes; the training waits for the copy only. If a save is under way, this one is postponed, and so is one in
        the middle of an epoch that has `changed_at_head` some state."""
        self._say_news()
        now_s = self._clock()
        if not self._schedule.due(step, now_s):
            return
        if changed_at_head is not None:
            self._say_head(changed_at_head)
            return
        if self._worker.rank() == 0 and self._writer.is_busy:
            self._say_put_off(step)
            return
        if self._worker.rank() == 0:
            self._start(step, capture)
        self._schedule.done(step, now_s)  # on every worker: see Note [Who saves]

    def stand_by(self, capture: Callable[[], Snapshot], *, is_end: bool) -> None:
        """The run can be saved now. `is_end`: a pass has one batch left, or an epoch has ended."""
        if self._worker.stands_by():
            self._standby.look(capture, is_end=is_end)

    def save_standby(self, limit_s: float = LIMIT_S) -> None:
        """Writes the snapshot that this worker has kept in memory, unless one is on disk that is as new. Another worker
        may write one too."""
        snapshot, saved, deadline_s = self._standby.snapshot, self._schedule.step, self._clock() + limit_s
        step = -1 if snapshot is None else snapshot.state["step"]
        is_newer = step > saved or (step == saved and not (self.folder / name_of(step)).exists())
        if snapshot is not None and is_newer and self._writer.wait(limit_s):
            self._writer.start(snapshot)
            self._writer.wait(deadline_s - self._clock())
        self._say_news()

    def save_now(
        self, step: int, capture: Callable[[], Snapshot], limit_s: float = LIMIT_S, *, again: bool = False
    ) -> Path | None:
        """Saves `step` and waits for it: the checkpoint's path; None if it could not be written within `limit_s`, or
        on a worker that does not save. For a run that is about to end. `again`: in place of one of the same step."""
        if self._worker.rank() != 0:
            return None
        deadline_s = self._clock() + limit_s
        if self._writer.wait(limit_s) and (again or not self._has(step)):
            self._start(step, capture)
            self._schedule.done(step, self._clock())
            self._writer.wait(deadline_s - self._clock())
        self._say_news()
        return self._writer.last_good if not self._writer.is_busy and self._has(step) else None

    def close(self, limit_s: float = LIMIT_S) -> None:
        """Waits for the writer, for at most `limit_s`. What it has not finished by then becomes a checkpoint only if
        the process lives on long enough. May be called twice."""
        if not self._writer.wait(limit_s):
            self._worker.say(
                f"a checkpoint was still being written to {self.folder} after {limit_s:g} s: not waited for"
            )
        self._say_news()

    def _start(self, step: int, capture: Callable[[], Snapshot]) -> None:
        self._writer.start(self._copies.copied(capture()))
        self._worker.saves(step, lambda: self._writer.last_good if self._has(step) else None)

    def _has(self, step: int) -> bool:
        return self._writer.last_good is not None and self._writer.last_good.name == name_of(step)

    def _say_news(self) -> None:
        while self._writer.done:
            self._worker.saved(*self._writer.done.popleft())
        while self._writer.news:
            self._worker.say(self._writer.news.popleft())

    def _say_head(self, changed: str) -> None:
        if not self._said_head:
            self._said_head = True
            self._worker.say(
                f"checkpoints are saved at the ends of epochs only: the script changes {changed} at the head of an "
                "epoch's body, before its first batch, and a run that went on in the middle of the epoch would change "
                "it again. To have them in between, do it at the end of the body, for the next epoch."
            )

    def _say_put_off(self, step: int) -> None:
        if not self._said_put_off:
            self._said_put_off = True
            self._worker.say(
                f"the checkpoint of step {step} waits: the one before is still being written to {self.folder}. "
                "Checkpoints are due more often than this disk takes them; this is said once."
            )


class AutomaticSaver:
    """Saves what is due at the moments at which one worker's run can be saved. See Note [Moments].

    `at_moment` is called at every moment, after what was due is saved: there a run that is about to end calls
    `save_now`. It must not end the run itself: it may be called from inside of a loader, which cannot be closed there.
    Unless checkpoints were `asked_for`, a script without moments gets no note. Its owner calls `close`.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        parts: RunState,
        say: Callable[[str], None],
        at_moment: Callable[[], None] = lambda: None,
        *,
        asked_for: bool = True,
    ) -> None:
        self.checkpoints = checkpoints
        self._parts, self._say, self._at_moment = parts, say, at_moment
        self._may_say_no_moment = asked_for
        self._at_commit: dict[int, Position] | None = None
        self._is_early = self._was_early = False
        parts.progress.on_epoch_end = self._epoch_has_ended

    def on_event(self, event: Event) -> None:
        """A subscriber of the run's events."""
        if isinstance(event, StepCommitted):
            self._at_commit = {n: loader.position for n, loader in self._parts.progress.loaders.items()}
            self._say_if_there_is_no_moment()

    def loader_asks(self, index: int) -> None:
        """Loader number `index` is about to load its next batch."""
        loader = self._parts.progress.loaders[index]
        may_be = loader.is_trained_on and loader.position.step > 0
        if self._at_commit is not None and may_be and self._nothing_is_pending(self._at_commit):
            self._at_commit = None
            in_epoch = self._parts.progress.in_epoch
            self._moment(is_early=in_epoch, saves=not (in_epoch and loader.num_left == 0))
            self._stand_by(loader.num_left)

    @property
    def changed_at_head(self) -> str | None:
        """What the script has changed in the epoch under way that a run which goes on from now would change again."""
        return self._parts.places.changed_at_head if self._parts.progress.in_epoch else None

    def save_now(self, limit_s: float = LIMIT_S) -> Path | None:
        """Saves this moment and waits for it. Only `at_moment` may call it."""
        again, self._was_early = self._was_early, self._is_early
        return self.checkpoints.save_now(self._parts.steps.step, self._parts.capture, limit_s, again=again)

    def close(self, limit_s: float = LIMIT_S) -> None:
        """Waits for a save that is under way."""
        self._parts.progress.on_epoch_end = None
        self.checkpoints.close(limit_s)

    def _nothing_is_pending(self, at_commit: dict[int, Position]) -> bool:
        """Whether every batch that was handed out since the commit was evaluated."""
        passes = {number: loader for number, loader in self._parts.progress.loaders.items() if loader.mid_pass}
        return all(loader.position in (at_commit.get(n), loader.evaluated) for n, loader in passes.items())

    def _epoch_has_ended(self) -> None:
        self._moment()
        self.checkpoints.stand_by(self._parts.capture, is_end=True)

    def _moment(self, *, is_early: bool = False, saves: bool = True) -> None:
        """`is_early`: the pass under way may have no batch left. What is due is saved if it `saves`."""
        self._is_early = is_early
        if saves:
            self.checkpoints.between_steps(self._parts.steps.step, self._parts.capture, self.changed_at_head)
        self._at_moment()

    def _stand_by(self, num_left: int | None) -> None:
        """In the middle of a pass. What the script has done in the epoch, a run that went on from here would do again.
        So it has changed nothing before this pass, and this is the first one."""
        if num_left != 0 and not self._parts.places.changes_at_head and not self._parts.progress.spent():
            self.checkpoints.stand_by(self._parts.capture, is_end=num_left == 1)

    def _say_if_there_is_no_moment(self) -> None:
        progress = self._parts.progress
        if self._may_say_no_moment and progress.trained_on == {None} and not progress.in_epoch:
            self._may_say_no_moment = False
            self._say(
                "no checkpoint is saved by itself: the batches come from no loader of run.shard, and the loop is not "
                "in run.epochs, at whose ends it could be. Use one of them, or call run.save yourself."
            )
