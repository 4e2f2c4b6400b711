"""Follows what a worker's script does, and makes the place of each step from it (place.py)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from lockstep.chance import Generators
from lockstep.data import GlobalBatch, Position, ShardedLoader
from lockstep.gradients.fingerprint import combined, fingerprints
from lockstep.script import rhythm
from lockstep.script.attributes import ModelAttributes, Renewed
from lockstep.script.call_site import calling_frame, is_for_statement, whole_numbers
from lockstep.script.changes import Marks, changed, marks_of
from lockstep.script.counters import Moment, Number, OutOfStep, ScriptCounters, out_of_step
from lockstep.script.data_sets import (
    DataSetContents,
    DataSetSettings,
    OtherContents,
    Unset,
    contents_of_data_sets,
    texts_of_data_sets,
)
from lockstep.script.modes import ModelModes, OtherModes
from lockstep.script.place import (
    COUNTER,
    DATA,
    ENTRY,
    EPOCH,
    LINE,
    LOADERS,
    LOOP,
    SEED_DATA,
    STATE,
    UPDATES,
    Groups,
    StepPlace,
    batch_facts,
)
from lockstep.script.random_streams import Streams
from lockstep.script.restored_generators import DrawnAhead, RestoredGenerators
from lockstep.script.restored_state import ChangedState, EvaluatedAgain, RestoredState
from lockstep.script.rhythm import Rhythm
from lockstep.script.turns import LaneLoop, Turn
from lockstep.script.unsaved import restarted_iterator
from lockstep.script.values import Changed, Values, changed_since, restarted_values, values
from lockstep.state.models import Models
from lockstep.state.progress import DataProgress


@dataclass(frozen=True)
class OtherData:
    """Something of a data set that is not as in the snapshot; `is_wrong` if the run goes on in the middle of a pass."""

    name: str
    now: str
    before: str
    is_wrong: bool

    def __str__(self) -> str:
        words = f"{self.name} is {self.now}, and was {self.before} when the snapshot was taken"
        if self.is_wrong:
            return f"{words}: a pass cannot go on with other samples. {SEED_DATA}"
        return f"{words}. If the data set was not changed on purpose, its order or split is drawn without a seed."


SetAnew = ChangedState | DrawnAhead | EvaluatedAgain | Renewed | OtherModes | OtherData | Unset | OtherContents


class Places:
    """Follows what this worker's script does, and makes the place of each step from it.

    After a resume it also finds which variables of the script differ from those in the snapshot.
    """

    def __init__(self, models: Models, progress: DataProgress) -> None:
        self.turn = Turn()
        self.streams = Streams()
        self.updates: dict[str, int] = {}
        """How many updates each optimizer has made, by its label."""
        self.rhythm = Rhythm()
        self._counters = ScriptCounters()
        self._loop: LaneLoop | None = None
        self._passes: dict[int | None, int] = {}
        self._updated = False
        self._carries_over = True
        self._expected: list[Number] = []
        self._first_values: Values | None = None
        self._saved_values: list[tuple[str, str, str, str]] = []
        self._gone_on: set[int] | None = None
        """The loaders on which a step has trained since a snapshot was loaded; None if none was."""
        self._was_loaded = self._has_joined = self._counted_epochs = False
        self._models, self._progress = models, progress
        self._restored, self._generators = RestoredState(models), RestoredGenerators()
        self._drawn_ahead: DrawnAhead | None = None
        self._evaluated_again: EvaluatedAgain | None = None
        self._at_head: Marks | None = None
        """What was where the body of the epoch under way began, until its first step begins."""
        self.changes_at_head = False
        """Whether the script has changed rates, or some state, before the first batch of the epoch under way."""
        self.changed_at_head: str | None = None
        """The state among that, in words. See Note [Changed at the head] in changes.py."""
        self._asks: dict[int, tuple[Generators, Marks]] = {}
        """What was where each loader was asked for the first batch that it would hand out again."""
        self._groups, self._attributes, self._modes = Groups(models), ModelAttributes(models), ModelModes(models)
        self._data_sets = DataSetSettings(lambda: texts_of_data_sets(self._data_of_loaders()))
        self._contents = DataSetContents(lambda: contents_of_data_sets(self._data_of_loaders()))
        self._saved_data: dict[str, tuple[int, str]] = {}
        """The loader's number and what its data set was made of, by name, until training goes on."""
        progress.on_begin = self._training_begins

    @property
    def begins_turn(self) -> bool:
        """Whether the loop under way is the first of a turn."""
        return self._loop is not None and self._loop.is_step and len(self.turn.sites) == 1

    def enter(self, batch: GlobalBatch, loop: LaneLoop, step: int) -> list[OutOfStep]:
        """A loop over `batch` begins. Returns the numbers of the script that are wrong after a resume."""
        self._loop = loop
        if not loop.is_step:
            return []
        if self._has_joined and batch.loader is None and self._generators.has_drawn_ahead:
            self._drawn_ahead = DrawnAhead(None)
        self._generators.step_begins()
        self._look_at_head(batch)
        self.turn.enter(batch, loop.site, sum(self.updates.values()))
        position = batch.position or Position()
        at = Moment(step, self.turn.number, position.step, position.epoch)
        self._counters.note(loop.numbers, at)
        if self._passes.setdefault(batch.loader, at.passes) != at.passes:
            self.rhythm.forget()
        expected, self._expected = self._expected, []
        return out_of_step(expected, loop.numbers, at, at_start=batch.begins_pass) if expected else []

    def _look_at_head(self, batch: GlobalBatch) -> None:
        at_head, self._at_head = self._at_head, None
        asked = self._asks.get(batch.loader) if batch.loader is not None and batch.begins_pass else None
        if at_head is not None and asked is not None:
            self.changes_at_head = changed(at_head, asked[1]) is not None
            self.changed_at_head = changed(at_head, asked[1], only_state=True)

    def evaluates(self, batch: GlobalBatch) -> None:
        """A batch is evaluated."""
        if self._generators.is_done_again and batch.loader is not None:
            self._evaluated_again = EvaluatedAgain(batch.loader)

    def restarted_values(self, batch: GlobalBatch) -> list[Changed]:
        """The values of the script that start again after a resume. See Note [Values of the script] in values.py."""
        saved, self._saved_values = self._saved_values, []
        now = self._values(calling_frame()) if saved else {}
        at_start, has_joined = batch.begins_pass, self._has_joined
        first = self._first_values if at_start and self._progress.epoch > 0 and not has_joined else None
        return restarted_values(saved, now, at_start=at_start, has_joined=has_joined, first=first)

    def _training_begins(self) -> None:
        """All that the script sets before its first epoch is set; what is set in epochs counts as a change."""
        self._first_values = self._values(calling_frame())
        self._attributes.note_first()
        self._data_sets.note_first()
        self._contents.note_first()

    def _values(self, frame: FrameType) -> Values:
        kept = [*self._models.optimizers.values(), *self._models.tracked.values()]
        return values(frame, self._models.modules.values(), kept)

    def before_batch(self, number: int) -> None:
        """A loader is about to be asked for its next batch, and the run may be saved first."""
        progress = self._progress
        loader = progress.loaders[number]
        if loader.is_trained_on and loader.position.step > 0:
            self._generators.before_batch()
        goes_on = loader.is_trained_on and any(one.mid_pass and one.is_trained_on for one in progress.loaders.values())
        if goes_on and self._generators.has_drawn_ahead and not is_for_statement(calling_frame()):
            self._drawn_ahead = DrawnAhead(number)

    def asked(self, number: int) -> bool:
        """A loader is about to load its next batch. See Note [What an epoch does at its head] in restored_state.py.

        Returns whether an epoch goes on behind the last batch of its pass.
        """
        loader, in_pass = self._progress.loaders[number], self._progress.loaders[number].position.step > 0
        self._generators.asked(in_pass=in_pass, is_trained_on=loader.is_trained_on)
        if number not in self._asks or self._progress.resumes_at(loader) == loader.position:
            self._asks[number] = Generators.now(), marks_of(self._models, of_weights=self._at_head is not None)
        goes_on = loader.is_trained_on and self._restored.asked(at_start=not in_pass)
        return goes_on and loader.num_left == 0 and self._progress.in_epoch

    def set_anew(self, batch: GlobalBatch, loop: LaneLoop) -> Iterator[SetAnew]:
        """What the run put back or compares after a resume, and the script has as another. Those that are wrong cannot
        be meant."""
        at_start = batch.begins_pass
        changed = self._restored.changed() if loop.is_step else None
        yield from () if changed is None else (changed,)
        drawn_ahead, self._drawn_ahead = self._drawn_ahead, None
        yield from () if drawn_ahead is None else (drawn_ahead,)
        evaluated_again, self._evaluated_again = self._evaluated_again, None
        yield from () if evaluated_again is None else (evaluated_again,)
        yield from self._attributes.begin(at_start=at_start)
        modes = self._modes.begin(str(loop.site), at_start=at_start) if loop.is_step else None
        yield from () if modes is None else (modes,)
        yield from self._other_data(batch)
        yield from self._data_sets.begin(at_start=at_start)
        yield from self._contents.begin(at_start=at_start, has_joined=self._has_joined)

    def _other_data(self, batch: GlobalBatch) -> list[OtherData]:
        """What of the loaders' data sets is not as in the snapshot. See Note [Another data set on each worker]."""
        saved, self._saved_data = self._saved_data, {}
        now = self._data() if saved else {}
        middle = None if batch.begins_pass else batch.loader
        other = [(name, number) for name, (number, words) in saved.items() if now.get(name, words) != words]
        return [OtherData(name, now[name], saved[name][1], number == middle) for name, number in other]

    def _data_of_loaders(self) -> dict[int, Any]:
        return {number: loader.dataset for number, loader in self._present().items()}

    def wrapped(self, batch: GlobalBatch) -> str | None:
        """What starts again around a pass that goes on in its middle. See Note [Iterators that start again]."""
        number, position = batch.loader, batch.position
        if self._gone_on is None or number is None or number in self._gone_on or position is None:
            return None
        self._gone_on.add(number)
        passes = [loader.running for loader in self._progress.loaders.values()]
        running = self._progress.loaders[number].running
        if running is None or position == Position():
            return None
        return restarted_iterator(running, passes, at_start=position.step == 0)

    def wrapped_epochs(self) -> str | None:
        """The same for epochs, once after a resume."""
        was_loaded, self._was_loaded = self._was_loaded, False
        epochs = self._progress.epochs_under_way()
        goes_on = was_loaded and self._progress.epoch > 0 and epochs is not None
        return restarted_iterator(epochs, ()) if goes_on else None

    def looped(self, loop: LaneLoop) -> str | None:
        """A loop has begun. Returns what was due instead, if the script is out of its rhythm."""
        return self.rhythm.saw(rhythm.loop(str(loop.site))) if loop.is_step else None

    def updated(self, optimizer: Optimizer) -> str | None:
        """An optimizer is about to make an update. Returns what was due instead, if the script is out of its rhythm."""
        label = self._label_of(optimizer)
        if label is None:
            return None
        due = self.rhythm.saw(rhythm.update(label))
        self.updates[label] = self.updates.get(label, 0) + 1
        self._updated = True
        return due

    def rate_set_anew(self, optimizer: Optimizer) -> str | None:
        """The same for the rate of an optimizer that is about to make an update."""
        label = self._label_of(optimizer)
        return None if label is None else self._restored.at_update(label)

    def _label_of(self, optimizer: Optimizer) -> str | None:
        return next((label for label, known in self._models.optimizers.items() if known is optimizer), None)

    def begins(self, has_gradients: bool) -> None:
        """A step begins; `has_gradients`: some `p.grad` is set."""
        if self._updated:
            self._carries_over = has_gradients

    def committed(self, batch: GlobalBatch) -> None:
        """The step that trained on `batch` is committed."""
        self._updated, self._progress.has_committed = False, True
        self._asks.clear()
        for number, loader in self._progress.loaders.items():
            loader.committed(batch.position if number == batch.loader else None)

    @property
    def keeps_gradients(self) -> bool:
        """Whether the gradients in `p.grad` now belong to the run: no update has used them, or they outlast updates."""
        return not self._updated or self._carries_over

    def state(self) -> dict[str, Any]:
        """Its part of a snapshot, with the script's numbers as they are now."""
        frame = calling_frame()
        put_back, compared = self._attributes.changed(in_evaluation=self._in_evaluation())
        return {
            "updates": dict(self.updates),
            "has_epochs": self.head is not None,
            "draws_between": self._generators.draws_between,
            "turns": self.turn.number + bool(self.turn.sites),
            "owners": dict(self.streams.owners),
            "rhythm": list(self.rhythm.history),
            "numbers": [number.to_json() for number in self._counters.learned(whole_numbers(frame))],
            "values": [] if self._first_values is None else changed_since(self._first_values, self._values(frame)),
            "attributes": put_back,
            "compared": compared,
            "data_sets": self._data_sets.state(),
            "contents": self._contents.state(),
            "data": {str(number): dict(loader.made_of) for number, loader in self._present().items()},
            "modes": self._modes.state(),
        }

    def _in_evaluation(self) -> bool:
        """Whether a loader that is not trained on is being read."""
        loaders, trained_on = self._progress.loaders, self._progress.trained_on
        return any(loader.mid_pass for number, loader in loaders.items() if number not in trained_on)

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores its part of a snapshot; an older one may have none."""
        self.updates = dict(state.get("updates", {}))
        self._counted_epochs = state.get("has_epochs", False)
        self._generators.draws_between = state.get("draws_between", False)
        self.turn.number = state.get("turns", 0)
        self.streams.owners = dict(state.get("owners", {}))
        self.rhythm.expect(state.get("rhythm", ()))
        self._passes = {}
        self._gone_on, self._was_loaded = set(), True
        self._saved_values = [tuple(saved) for saved in state.get("values", ())]
        self._expected = [Number(*saved) for saved in state.get("numbers", ())]
        self._attributes.load(state.get("attributes", {}), state.get("compared", {}))
        self._data_sets.load(state.get("data_sets", {}))
        self._contents.load(state.get("contents", {}))
        self._saved_data = {
            DATA.format(number=number, part=part): (int(number), words)
            for number, made_of in state.get("data", {}).items()
            for part, words in made_of.items()
        }
        self._modes.load(state.get("modes", ()))

    def joined(self) -> None:
        """The snapshot is one of a step under way: its epoch's head was done."""
        self._has_joined = True

    def generators(self) -> Generators:
        """Those outside of lanes where a run that is resumed from now goes on: as they are; or, where it hands out a
        batch again, as they were when that was asked for."""
        again = self._asked_again()
        return Generators.now() if again is None else again[0]

    def changed_in_body(self) -> str | None:
        """What the script has changed since the batch was asked for that a run which is resumed from now is handed out
        again. See Note [Saved in a body] in changes.py."""
        again = self._asked_again()
        return None if again is None else changed(again[1], marks_of(self._models))

    def _asked_again(self) -> tuple[Generators, Marks] | None:
        progress = self._progress
        asks = ((progress.loaders[number], asked) for number, asked in self._asks.items())
        return next((asked for loader, asked in asks if progress.resumes_at(loader) != loader.position), None)

    @property
    def head(self) -> Generators | None:
        """The generators outside of lanes where the body of the epoch under way began."""
        return self._generators.head

    def epoch_begins(self) -> None:
        """The body of an epoch is about to begin. See Note [Draws that are made again] in restored_generators.py."""
        self._generators.epoch_begins()
        self._at_head, self.changes_at_head, self.changed_at_head = marks_of(self._models, of_weights=True), False, None

    def epochs_are_over(self) -> None:
        """The script has had all its epochs."""
        self._generators.epochs_are_over()

    @property
    def is_before(self) -> bool:
        """Whether a script that counts by run.epochs was resumed, and has not come to the place where it goes on: it
        does again what it did."""
        return self._generators.is_before and self._counted_epochs

    def generators_loaded(self, head: Generators | None) -> None:
        """A snapshot has set the generators outside of lanes: their states do not come from draws of this script."""
        self._asks.clear()
        self.streams.look(Generators.now())
        self._generators.loaded(head)
        self._restored.loaded(has_gradients=self.rhythm.ends_with_loop)

    def of_step(self, batch: GlobalBatch, now: Generators, slot: int, step: int, *, closely: bool) -> StepPlace:
        """The place of the step that begins now, with the generators as they are outside of its lanes.

        A batch that is the script's own is compared as a whole in the first step, later by some of its contents. With
        `closely`, all of it is compared, and the state of everything that is trained.
        """

        self._generators.at_lanes(now, is_own_batch=batch.loader is None)

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
            **(self._data() if looks_at_all or batch.begins_pass else {}),
            LOADERS: " ".join(f"{position.epoch}:{position.step}" for position in positions),
        }

    def _data(self) -> dict[str, str]:
        return {
            DATA.format(number=number, part=part): words
            for number, loader in self._present().items()
            for part, words in loader.made_of.items()
        }

    def _present(self) -> dict[int, ShardedLoader]:
        present = self._progress.present()
        return {number: loader for number, loader in self._progress.loaders.items() if loader in present}

    def _numbers(self) -> dict[str, str]:
        """Those of the script's numbers that have changed since it began to train."""
        assert self._loop is not None
        learned = self._counters.learned(self._loop.numbers)
        return {f"{COUNTER}`{number.name}` ({number.file})": str(number.value) for number in learned}

    def _entries(self) -> dict[str, str]:
        """The fingerprint of every tensor, so that the first that differs can be named."""
        held = self._models.held()
        return {f"{ENTRY}{name}": str(int(entry)) for name, entry in zip(sorted(held), fingerprints(held), strict=True)}
