"""Follows what a worker's script does, and makes the place of each step from it (place.py)."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from lockstep.chance import Generators
from lockstep.data import GlobalBatch
from lockstep.gradients.fingerprint import combined, fingerprints
from lockstep.script.place import (
    COUNTER,
    ENTRY,
    EPOCH,
    LINE,
    LOADERS,
    LOOP,
    STATE,
    UPDATES,
    Groups,
    StepPlace,
    batch_facts,
)
from lockstep.script.random_streams import Streams
from lockstep.script.restart import rhythm
from lockstep.script.restart.counters import OutOfStep
from lockstep.script.restart.resumption import Resumption
from lockstep.script.turns import LaneLoop, Turn
from lockstep.state.models import Models
from lockstep.state.progress import DataProgress


class Places:
    """Follows what this worker's script does, and makes the place of each step from it.

    It is the script's part of a snapshot too. What differs from a snapshot after a resume is found by `resumption`.
    """

    def __init__(self, models: Models, progress: DataProgress) -> None:
        self._models, self._progress = models, progress
        self.resumption = Resumption(models, progress)
        self.turn, self.streams, self._groups = Turn(), Streams(), Groups(models)
        self.updates: dict[str, int] = {}
        """How many updates each optimizer has made, by its label."""
        self._loop: LaneLoop | None = None
        self._updated, self._carries_over = False, True

    # -- what the script does -----------------------------------------------------------------------------------------

    @property
    def begins_turn(self) -> bool:
        """Whether the loop under way is the first of a turn."""
        return self._loop is not None and self._loop.is_step and len(self.turn.sites) == 1

    def enter(self, batch: GlobalBatch, loop: LaneLoop, step: int) -> list[OutOfStep]:
        """A loop over `batch` begins. Returns the numbers of the script that are wrong after a resume."""
        self._loop = loop
        if not loop.is_step:
            return []
        self.turn.enter(batch, loop.site, sum(self.updates.values()))
        return self.resumption.enter(batch, loop, step, self.turn.number)

    def looped(self, loop: LaneLoop) -> str | None:
        """A loop has begun. Returns what was due instead, if the script is out of its rhythm."""
        return self.resumption.rhythm.saw(rhythm.loop(str(loop.site))) if loop.is_step else None

    def updated(self, optimizer: Optimizer) -> str | None:
        """An optimizer is about to make an update. Returns what was due instead, if the script is out of its rhythm."""
        label = self._label_of(optimizer)
        if label is None:
            return None
        self.updates[label] = self.updates.get(label, 0) + 1
        self._updated = True
        return self.resumption.rhythm.saw(rhythm.update(label))

    def rate_set_anew(self, optimizer: Optimizer) -> str | None:
        """Its rate, if the script has set another one after a resume than was restored, in words."""
        label = self._label_of(optimizer)
        return None if label is None else self.resumption.restored.at_update(label)

    def _label_of(self, optimizer: Optimizer) -> str | None:
        return next((label for label, known in self._models.optimizers.items() if known is optimizer), None)

    def begins(self, has_gradients: bool) -> None:
        """A step begins; `has_gradients`: some `p.grad` is set."""
        if self._updated:
            self._carries_over = has_gradients

    def committed(self, batch: GlobalBatch) -> None:
        """The step that trained on `batch` is committed."""
        self._updated, self._progress.has_committed = False, True
        self.resumption.changes.forget()
        for number, loader in self._progress.loaders.items():
            loader.committed(batch.position if number == batch.loader else None)

    def epoch_begins(self) -> None:
        self.resumption.epoch_begins()

    def epochs_are_over(self) -> None:
        self.resumption.generators.epochs_are_over()

    def before_batch(self, number: int) -> None:
        self.resumption.before_batch(number)

    def asked(self, number: int) -> bool:
        return self.resumption.asked(number)

    # -- snapshots ----------------------------------------------------------------------------------------------------

    @property
    def keeps_gradients(self) -> bool:
        """Whether the gradients in `p.grad` now belong to the run: no update has used them, or they outlast updates."""
        return not self._updated or self._carries_over

    @property
    def changes_at_head(self) -> bool:
        return self.resumption.changes.changes_at_head

    @property
    def changed_at_head(self) -> str | None:
        return self.resumption.changes.changed_at_head

    @property
    def head(self) -> Generators | None:
        return self.resumption.generators.head

    def generators(self) -> Generators:
        return self.resumption.changes.generators()

    def state(self) -> dict[str, Any]:
        """Its part of a snapshot."""
        return {
            "updates": dict(self.updates),
            "turns": self.turn.number + bool(self.turn.sites),
            "owners": dict(self.streams.owners),
            **self.resumption.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores its part of a snapshot; an older one may have none."""
        self.updates = dict(state.get("updates", {}))
        self.turn.number = state.get("turns", 0)
        self.streams.owners = dict(state.get("owners", {}))
        self.resumption.load(state)

    def joined(self) -> None:
        self.resumption.joined()

    def generators_loaded(self, head: Generators | None) -> None:
        """A snapshot has set the generators outside of lanes: their states do not come from draws of this script."""
        self.streams.look(Generators.now())
        self.resumption.generators_loaded(head)

    # -- the place of a step ------------------------------------------------------------------------------------------

    def of_step(self, batch: GlobalBatch, now: Generators, slot: int, step: int, *, closely: bool) -> StepPlace:
        """The place of the step that begins now, with the generators as they are outside of its lanes.

        A batch that is the script's own is compared as a whole in the first step, later by some of its contents. With
        `closely`, all of it is compared, and the state of everything that is trained.
        """

        self.resumption.generators.at_lanes(now, is_own_batch=batch.loader is None)

        def facts() -> dict[str, str]:
            self.streams.look(now)
            of_state = {STATE: combined(fingerprints(self._models.held())).hex()} if closely else {}
            return self._facts(batch, closely or step == 0) | self.streams.facts(slot) | of_state

        def details() -> dict[str, str]:
            return self.streams.details(slot) | self._numbers() | (self._entries() if closely else {})

        return StepPlace(facts, details, self.streams)

    def _facts(self, batch: GlobalBatch, looks_at_all: bool) -> dict[str, str]:
        assert self._loop is not None
        positions = [loader.position for loader in self._progress.present()]
        return {
            LINE: str(self._loop.site),
            LOOP: str(len(self.turn.sites)),
            **batch_facts(batch, looks_at_all),
            EPOCH: str(self._progress.epoch),
            **{UPDATES.format(label=label): str(count) for label, count in self.updates.items()},
            **self._groups.facts(),
            **(self.resumption.origins.facts() if looks_at_all or batch.begins_pass else {}),
            LOADERS: " ".join(f"{position.epoch}:{position.step}" for position in positions),
        }

    def _numbers(self) -> dict[str, str]:
        """Those of the script's numbers that have changed since it began to train."""
        assert self._loop is not None
        learned = self.resumption.counters.learned(self._loop.numbers)
        return {f"{COUNTER}`{number.name}` ({number.file})": str(number.value) for number in learned}

    def _entries(self) -> dict[str, str]:
        """The fingerprint of every tensor, so that the first that differs can be named."""
        held = self._models.held()
        return {f"{ENTRY}{name}": str(int(entry)) for name, entry in zip(sorted(held), fingerprints(held), strict=True)}
