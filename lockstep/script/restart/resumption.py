"""What of a script is not as it was, after a resume or on a newcomer: all that is put back, or compared.

A snapshot has a part of each file of this room. Where training goes on, each says what it finds.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.chance import Generators
from lockstep.data import GlobalBatch, Position
from lockstep.script.call_site import calling_frame, is_for_statement, whole_numbers
from lockstep.script.restart.attributes import ModelAttributes
from lockstep.script.restart.changes import BodyChanges
from lockstep.script.restart.counters import Moment, OutOfStep, ScriptCounters
from lockstep.script.restart.data_sets import (
    DataSetContents,
    DataSetOrigins,
    DataSetSettings,
    contents_of_data_sets,
    texts_of_data_sets,
)
from lockstep.script.restart.difference import Difference
from lockstep.script.restart.modes import ModelModes
from lockstep.script.restart.restarted_values import Changed
from lockstep.script.restart.restored_generators import RestoredGenerators, drawn_ahead
from lockstep.script.restart.restored_state import RestoredState, evaluated_again
from lockstep.script.restart.rhythm import Rhythm
from lockstep.script.restart.values import ScriptValues
from lockstep.script.restart.wrapped_passes import WrappedPasses
from lockstep.script.turns import LaneLoop
from lockstep.state.models import Models
from lockstep.state.progress import DataProgress


class Resumption:
    """What the run puts back, or compares, where a script goes on that has begun from its top."""

    def __init__(self, models: Models, progress: DataProgress) -> None:
        self._models, self._progress = models, progress
        self.rhythm, self.generators, self.counters = Rhythm(), RestoredGenerators(), ScriptCounters()
        self.restored, self.changes = RestoredState(models), BodyChanges(models, progress)
        self.wrapped, self.origins = WrappedPasses(progress), DataSetOrigins(progress)
        self._values, self._attributes, self._modes = ScriptValues(models), ModelAttributes(models), ModelModes(models)
        self._settings = DataSetSettings(lambda: texts_of_data_sets(self.origins.data_sets()))
        self._contents = DataSetContents(lambda: contents_of_data_sets(self.origins.data_sets()))
        self._passes: dict[int | None, int] = {}
        """How many passes over each loader were begun before the one under way."""
        self._found: dict[str, Difference] = {}
        """What was found on the way to the place where the script goes on."""
        self._has_joined = self._counted_epochs = False
        progress.on_begin = self._training_begins

    # -- on the way to a step -----------------------------------------------------------------------------------------

    def _training_begins(self) -> None:
        """All that the script sets before its first epoch is set; what is set in epochs counts as a change."""
        for part in (self._values, self._attributes, self._settings, self._contents):
            part.note_first()

    def epoch_begins(self) -> None:
        """The body of an epoch is about to begin. See Note [Draws that are made again] in restored_generators.py."""
        self.generators.epoch_begins()
        self.changes.epoch_begins()

    def evaluates(self, batch: GlobalBatch) -> None:
        """A batch is evaluated."""
        if self.generators.is_done_again and batch.loader is not None:
            self._found["evaluated"] = evaluated_again(batch.loader)

    def before_batch(self, number: int) -> None:
        """A loader is about to be asked for its next batch, and the run may be saved first."""
        loaders = self._progress.loaders
        if loaders[number].is_trained_on and loaders[number].position.step > 0:
            self.generators.before_batch()
        goes_on = loaders[number].is_trained_on and any(one.mid_pass and one.is_trained_on for one in loaders.values())
        if goes_on and self.generators.has_drawn_ahead and not is_for_statement(calling_frame()):
            self._found["drawn"] = drawn_ahead(number)

    def asked(self, number: int) -> bool:
        """A loader is about to load its next batch. See Note [What an epoch does at its head] in restored_state.py.

        Returns whether an epoch goes on behind the last batch of its pass.
        """
        loader, in_pass = self._progress.loaders[number], self._progress.loaders[number].position.step > 0
        self.generators.asked(in_pass=in_pass, is_trained_on=loader.is_trained_on)
        self.changes.asked(number)
        goes_on = loader.is_trained_on and self.restored.asked(at_start=not in_pass)
        return goes_on and loader.num_left == 0 and self._progress.in_epoch

    # -- where a step begins ------------------------------------------------------------------------------------------

    def enter(self, batch: GlobalBatch, loop: LaneLoop, step: int, turn: int) -> list[OutOfStep]:
        """A training loop over `batch` begins. Returns the numbers of the script that are wrong after a resume."""
        if self._has_joined and batch.loader is None and self.generators.has_drawn_ahead:
            self._found["drawn"] = drawn_ahead(None)
        self.generators.step_begins()
        self.changes.step_begins(batch)
        position = batch.position or Position()
        at = Moment(step, turn, position.step, position.epoch)
        if self._passes.setdefault(batch.loader, at.passes) != at.passes:
            self.rhythm.forget()
        return self.counters.begin(loop.numbers, at, at_start=batch.begins_pass)

    def set_anew(self, batch: GlobalBatch, loop: LaneLoop) -> Iterator[Difference]:
        """What the run put back or compares after a resume, and the script has as another. Those that are wrong cannot
        be meant."""
        at_start = batch.begins_pass
        if loop.is_step:
            yield from self.restored.changed()
        found, self._found = self._found, {}
        yield from sorted(found.values(), key=lambda one: not one.is_wrong)
        yield from self._attributes.begin(at_start=at_start)
        if loop.is_step:
            yield from self._modes.begin(str(loop.site), at_start=at_start)
        yield from self.origins.begin(batch)
        yield from self._settings.begin(at_start=at_start)
        yield from self._contents.begin(at_start=at_start, has_joined=self._has_joined)

    def restarted_values(self, batch: GlobalBatch) -> list[Changed]:
        """The values of the script that start again."""
        at_start, in_later_epoch = batch.begins_pass, self._progress.epoch > 0
        return self._values.begin(at_start=at_start, has_joined=self._has_joined, in_later_epoch=in_later_epoch)

    @property
    def is_before(self) -> bool:
        """Whether a script that counts by run.epochs was resumed, and has not come to the place where it goes on: it
        does again what it did."""
        return self.generators.is_before and self._counted_epochs

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Its part of a snapshot, with the script's numbers as they are now."""
        put_back, compared = self._attributes.changed(in_evaluation=self._in_evaluation())
        return {
            "has_epochs": self.generators.head is not None,
            "draws_between": self.generators.draws_between,
            "rhythm": list(self.rhythm.history),
            "numbers": self.counters.state(whole_numbers(calling_frame())),
            "values": self._values.state(),
            "attributes": put_back,
            "compared": compared,
            "data_sets": self._settings.state(),
            "contents": self._contents.state(),
            "data": self.origins.state(),
            "modes": self._modes.state(),
        }

    def _in_evaluation(self) -> bool:
        """Whether a loader that is not trained on is being read."""
        loaders, trained_on = self._progress.loaders, self._progress.trained_on
        return any(loader.mid_pass for number, loader in loaders.items() if number not in trained_on)

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores its part of a snapshot; an older one may have none."""
        self._counted_epochs = state.get("has_epochs", False)
        self.generators.draws_between = state.get("draws_between", False)
        self.rhythm.expect(state.get("rhythm", ()))
        self._passes = {}
        self.wrapped.loaded()
        self.counters.load(state.get("numbers", ()))
        self._values.load(state.get("values", ()))
        self._attributes.load(state.get("attributes", {}), state.get("compared", {}))
        self._settings.load(state.get("data_sets", {}))
        self._contents.load(state.get("contents", {}))
        self.origins.load(state.get("data", {}))
        self._modes.load(state.get("modes", ()))

    def joined(self) -> None:
        """The snapshot is one of a step under way: its epoch's head was done."""
        self._has_joined = True

    def generators_loaded(self, head: Generators | None) -> None:
        """A snapshot has set the generators outside of lanes."""
        self.changes.forget()
        self.generators.loaded(head)
        self.restored.loaded(has_gradients=self.rhythm.ends_with_loop)
