"""What a run does about checkpoints by itself: as the script says, as the command line says, and when it must.

# Note [Where training begins]
# A run is taken up where its script first asks for epochs, for its step, or trains. There a newcomer is admitted, and a
# run that has to resume goes to where its checkpoint was taken. Where nobody asks for checkpoints, the
# run keeps a folder ready all the same, if its launcher has given it one: for when a signal ends it, or a loss outside
# of steps.
"""

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from lockstep.elastic.guard import Guard
from lockstep.elastic.shown_waits import shown
from lockstep.errors import BadArgument, Misuse, WorkerLost, naming_lost_worker
from lockstep.events import CheckpointSaved, Copied, Events, StepCommitted, Wait
from lockstep.launch.channels.status import NoStatus, StatusWriter
from lockstep.settings.environment import Overrides
from lockstep.settings.options import Settings
from lockstep.state.checkpoints.file import read_state
from lockstep.state.checkpoints.folder import newest_good
from lockstep.state.checkpoints.in_use import FolderUse
from lockstep.state.checkpoints.plan import AUTO, NEVER, CheckpointOptions, CheckpointPlan, Every, plan_checkpoints
from lockstep.state.checkpoints.resume import begin, restore
from lockstep.state.checkpoints.saver import AutomaticSaver, SavingWorker
from lockstep.state.checkpoints.trail import Trail, TrailFollower
from lockstep.state.run_state import RunState

SELDOM = Every(minutes=60 * 24 * 365)
"""How often a run is saved that nobody asked to save: only when it must."""

RESCUE_S = 60.0
"""How long saving may take before all workers are started anew."""


class Autosave:
    """The checkpoints of one run on one worker. One owner, who calls `close`."""

    def __init__(
        self,
        state: RunState,
        guard: Guard,
        settings: Settings,
        overrides: Overrides,
        events: Events,
        status: StatusWriter | NoStatus,
        trail: TrailFollower,
    ) -> None:
        self._state, self._guard, self._settings, self._overrides = state, guard, settings, overrides
        self._events, self._status, self._trail = events, status, trail
        self._saving: AutomaticSaver | None = None
        self._use: FolderUse | None = None
        self._saved_last: Path | None = None
        """What was saved because a signal ends the run."""
        self._taken_up = False

    def begin(self, asked: CheckpointOptions) -> None:
        """Collective. What the script asks for, under what the command line says."""
        if self._saving is not None:
            raise Misuse("run.checkpoints was called already: one folder takes the checkpoints of a run")
        self._save_by(plan_checkpoints(asked, self._overrides))

    def resume(self, path: Path) -> None:
        """Collective. The run goes on from this checkpoint, of which the script has said so."""
        wire = shown(self._guard.generation.wire, self._events, Wait.RESUME)
        with naming_lost_worker(self._state.steps.step, "run.resume"):
            notes = restore(self._state, path, self._settings, wire)
        self._go_on(path)
        self._guard.formation.deal()
        for note in notes:
            self._events.note(note)

    def take_up(self) -> None:
        """Collective, the first time. See Note [Where training begins]."""
        if self._taken_up:
            return
        self._taken_up = True
        if self._saving is None and self._overrides.checkpoint_folder is not None:
            self._save_as_asked()
        self._guard.formation.admit()

    def look(self) -> None:
        """The script asks where the run is: it has come to where training begins, unless it is at its beginning."""
        if not self._guard.is_member or self._must_resume:
            self.take_up()

    def train(self) -> None:
        """A script that trains without having asked where the run is cannot be put where a checkpoint was taken."""
        if self._must_resume and self._saving is None and self._overrides.checkpoint_folder is None:
            raise BadArgument(
                f"this run was asked to resume ({self._overrides.resume}), but it has no folder of checkpoints: name "
                "one by LOCKSTEP_CHECKPOINTS, or call run.checkpoints(folder) after run.replicate"
            )
        if self._must_resume and not self._taken_up and self._saving is None and self._has_checkpoint():
            raise Misuse(
                f"this run was asked to resume ({self._overrides.resume}), but its script trains from the beginning: "
                "count epochs by run.epochs, or start the loop at run.step, or call run.checkpoints after run.replicate"
            )
        self.take_up()
        self._trail.step_begins(self._state.steps.step)

    def trained(self) -> None:
        """A step is over: its gradient stands in `p.grad`."""
        self._trail.step_ends(self._state.steps.step - 1)

    def updated(self) -> None:
        """An optimizer has made an update."""
        self._trail.update_ends(self._state.steps.step - 1)
        self._guard.end_after_update()

    def loader_asks(self, loader: int) -> None:
        """A loader is about to load its next batch: a moment to save at."""
        if self._saving is not None:
            self._saving.loader_asks(loader)

    def rescue(self, lost: WorkerLost) -> NoReturn:
        """Collective, outside of steps. What a lost worker had counted is gone, and only the user's code can count it
        again: the launcher starts all anew. So those who have a snapshot in memory save it."""
        if self._saving is not None and self._guard.regroup():
            self._saving.checkpoints.save_standby(RESCUE_S)
        raise lost

    def close(self) -> None:
        """Waits for a save that is under way."""
        if self._saving is not None:
            self._saving.close()
        self._trail.close()
        if self._use is not None:
            self._use.close()

    def _has_checkpoint(self) -> bool:
        plan = plan_checkpoints(CheckpointOptions(), self._overrides)
        return plan.resume != AUTO or newest_good(plan.folder, read_state).path is not None

    @property
    def _must_resume(self) -> bool:
        return self._overrides.resume not in (None, NEVER)

    def _save_as_asked(self) -> None:
        asked = CheckpointOptions(every=None if self._overrides.saves else SELDOM, resume=NEVER)
        try:
            self._save_by(plan_checkpoints(asked, self._overrides))
        except BadArgument as cannot:
            if self._overrides.saves:
                raise
            self._events.note(f"this run can be neither saved nor joined: {cannot}")
            self._guard.admits = False

    def _save_by(self, plan: CheckpointPlan) -> None:
        """A newcomer does not resume: it is given the state of the run."""
        asked_for = self._overrides.saves or plan.every is not SELDOM
        use = self._use = FolderUse(plan.folder, self._events.note) if asked_for else None
        claim = str if use is None else use.claim
        if not self._guard.is_member:
            plan, claim = replace(plan, resume=NEVER), str
        worker = SavingWorker(
            lambda: self._guard.generation.world.rank, self._events.note, self._saved, self._trail.saved, self._go_on,
            claim, self._stands_by,
        )  # fmt: skip
        wire = shown(self._guard.generation.wire, self._events, Wait.CHECKPOINTS)
        with naming_lost_worker(self._state.steps.step, "run.checkpoints"):
            self._saving = begin(
                plan,
                self._state,
                self._settings,
                wire,
                worker,
                self._save_before_the_end,
                asked_for=asked_for,
            )
        if use is not None:
            use.join()
            self._events.subscribe(lambda _: use.join(), Copied)
        self._guard.formation.deal()
        self._events.subscribe(self._saving.on_event, StepCommitted)

    def _stands_by(self) -> bool:
        """Of the first and the last worker one is left, also where a whole host is lost. Where state is divided to save
        memory, one alone keeps all of it."""
        world, is_divided = self._guard.generation.world, self._settings.strategy != "replicated"
        keeps = world.rank == 0 or (world.rank == world.size - 1 and not is_divided)
        return keeps and world.size > 1 and self._guard.recovery is not None

    def _go_on(self, path: Path) -> None:
        """Each worker that can read the checkpoint compares; one that was sent it has no trail."""
        self._trail.go_on(None if self._overrides.trail is False else Trail.read(path))

    def _saved(self, path: Path, took_s: float) -> None:
        self._events.emit(CheckpointSaved, str(path), took_s)

    def _save_before_the_end(self) -> None:
        """All have agreed to end before the next step because of a signal: its state is saved first."""
        if self._saving is not None and self._guard.is_ending and not self._guard.has_computed_last:
            self._guard.compute_one_more()
            path = self._saving.save_now(self._guard.signals.grace_s)
            if path is not None and path != self._saved_last:
                self._saved_last = path
                self._status.saved()
                self._events.note(f"saved as {path}")
                self._warn_of(self._saving.changed_at_head)

    def _warn_of(self, changed: str | None) -> None:
        if changed is not None:
            self._events.note(
                f"the script changes {changed} at the head of an epoch's body: a run that goes on from this checkpoint "
                "would change it again, and is refused until that is done at the end of the body, for the next epoch"
            )
