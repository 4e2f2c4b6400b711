"""Knows the moments at which a run can be saved while its script goes on, and saves there what is due.

# Note [Moments]
# A snapshot must be one from which the script can go on as though nothing had happened. There are two such moments.
# When a loader that is trained on is asked for its next batch in the middle of its pass, the body of the training loop
# is done, schedules, draws and evaluations included; but no loader may have handed out anything since the step was
# committed, for of two loaders that are read in turn the first may have gone on already. Batches that were evaluated
# since do not matter.
# And when an epoch's body has ended. Batches that come from no loader leave the second moment only.
"""

from collections.abc import Callable
from pathlib import Path

from lockstep.data import Position
from lockstep.events import Event, StepCommitted
from lockstep.state.checkpoints.checkpoints import LIMIT_S, Checkpoints
from lockstep.state.run_state import RunState


class Saving:
    """One worker's automatic checkpoints. The run tells it what happens; one owner, who calls `close`."""

    def __init__(self, checkpoints: Checkpoints, parts: RunState, say: Callable[[str], None]) -> None:
        self.checkpoints = checkpoints
        self.at_moment: Callable[[], None] | None = None
        """Called at every moment, after what was due is saved: the place for `save_now` when a run is to end. It must
        not end the run itself, for it may be called from inside of a loader, which cannot be closed there."""
        self.is_asked_for = True
        """Whether somebody relies on it: if not, nobody is told where it cannot save."""
        self._parts = parts
        self._say = say
        self._at_commit: dict[int, Position] | None = None
        self._said_no_moment = False
        parts.progress.on_epoch_end = self._moment

    def on_event(self, event: Event) -> None:
        """To be subscribed to the run's events."""
        if isinstance(event, StepCommitted):
            self._at_commit = {n: loader.position for n, loader in self._parts.progress.loaders.items()}
            self._say_if_there_is_no_moment()

    def loader_asks(self, index: int) -> None:
        """Loader number `index` is about to load its next batch. See Note [Moments]."""
        loader = self._parts.progress.loaders[index]
        may_be = loader.is_trained_on and loader.position.step > 0
        if self._at_commit is not None and may_be and self._nothing_is_pending():
            self._at_commit = None
            self._moment()

    def save_now(self, limit_s: float = LIMIT_S) -> Path | None:
        """Saves this moment and waits for it. Only to be called by `at_moment`."""
        return self.checkpoints.save_now(self._parts.steps.step, self._parts.capture, limit_s)

    def close(self, limit_s: float = LIMIT_S) -> None:
        """Waits for a save that is under way."""
        self._parts.progress.on_epoch_end = None
        self.checkpoints.close(limit_s)

    def _nothing_is_pending(self) -> bool:
        """Whether every batch that was handed out since the commit was evaluated."""
        assert self._at_commit is not None
        passes = {number: loader for number, loader in self._parts.progress.loaders.items() if loader.mid_pass}
        return all(loader.position in (self._at_commit.get(n), loader.evaluated) for n, loader in passes.items())

    def _moment(self) -> None:
        self.checkpoints.between_steps(self._parts.steps.step, self._parts.capture)
        if self.at_moment is not None:
            self.at_moment()

    def _say_if_there_is_no_moment(self) -> None:
        progress = self._parts.progress
        nowhere = progress.trained_on == {None} and not progress.in_epoch
        if nowhere and self.is_asked_for and not self._said_no_moment:
            self._said_no_moment = True
            self._say(
                "no checkpoint is saved by itself: the batches come from no loader of run.shard, and the loop is not "
                "in run.epochs, at whose ends it could be. Use one of them, or call run.save yourself."
            )
