"""Where a step is in the user's script: what every worker must agree on before the step counts.

# Note [The place of a step]
# Lanes make the numbers independent of the workers. A script's own Python is not: loop counters, a second loop over a
# batch, a scheduler that nobody tracked. So the place of a step is one explicit value: the line of `run.lanes`, the
# how manieth loop over the batch it is, the batch and its samples, the epoch, the updates that each optimizer has made,
# the numbers in its groups, where every loader stands, and the generators outside of lanes. Its fingerprint travels
# with the step's plan. A difference is named before anything is added.

# Note [Turns]
# A turn is what a script does again and again: one loop over run.lanes, or several (a critic's and a generator's, one
# for each of two loaders, the closure of LBFGS). It begins where the script comes again, with another batch, to the
# line of its first loop; or, if it never does, to that of any other loop of the turn: then it has gone on to another
# part. The script's own batch may be the same each time (all of a small data set): it counts as another one after an
# update.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.chance import Generators
from lockstep.data import GlobalBatch, Position
from lockstep.data.contents import contents, sampled_contents
from lockstep.data.structure import opened
from lockstep.errors import Disagreement
from lockstep.gradients.fingerprint import combined, fingerprints
from lockstep.script import rhythm
from lockstep.script.counters import Counters, Moment, Number, OutOfStep, out_of_step
from lockstep.script.iterators import begins_anew
from lockstep.script.rhythm import Rhythm
from lockstep.script.site import Counts, Site, calling_frame, counts
from lockstep.script.streams import Streams, is_detail_of_streams, is_of_streams, tolerated
from lockstep.script.values import Changed, Values, begun_anew, changed_since, values
from lockstep.state.models import Models
from lockstep.state.progress import Progress
from lockstep.wire.agreement import Facts, first_difference

LINE = "the line of run.lanes"
LOOP = "the number of the loop in its turn"
BATCH = "the batch"
SAMPLES = "the samples of the batch"
CONTENTS = "the contents of the batch"
EPOCH = "the epoch"
UPDATES = "updates made by {label}"
GROUP = "group {number} of {label}"
LOADERS = "where the loaders stand (pass:batch)"
STATE = "the state"
ENTRY = "state of "
COUNTER = "counter "

ADVICE = {
    LINE: "They are in different loops of the script.",
    LOOP: "They have made different numbers of loops over run.lanes with this batch.",
    BATCH: "They have come to different batches: a loop that skips, ends or starts by the rank, or by a counter of its "
    "own, does so. Loop by run.epochs, or count by run.step.",
    SAMPLES: "A sampler draws other samples on each worker: it must draw from torch's global generator, or from one of "
    "its own with a fixed seed, or derive the order from the epoch (set_epoch).",
    CONTENTS: "Every worker must hold the same whole batch: draw it alike everywhere, or let run.shard load it.",
    EPOCH: "Count epochs by run.epochs.",
    "updates": "An optimizer.step() depends on the rank, or on a counter of the script's own (enumerate): count by "
    "run.step, which is the same on every worker and after a resume.",
    "group": "A rate was changed on some workers only, or by a scheduler that was not tracked: give it to "
    "run.replicate(model, optimizer, scheduler=scheduler).",
    LOADERS: "A sharded loader must be iterated by every worker alike.",
    STATE: "A worker that came later was not given all that the training depends on: give schedulers, averages of "
    "weights and anything else with a state_dict to run.replicate(model, optimizer, name=object).",
    "random": "A worker drew, or seeded, where the others did not (`if run.rank == 0`), and now they draw different "
    "numbers. Draw alike on every worker, or from a generator of your own (torch.Generator, random.Random).",
}


@dataclass(frozen=True)
class Loop:
    """A loop over run.lanes, as the script wrote it: at which line, and with which whole numbers in its variables.

    If it is no step, gradients are off and only buffers are averaged.
    """

    site: Site
    counts: Counts
    is_step: bool = True


@dataclass(frozen=True)
class StepPlace:
    """The place of one step. See Note [The place of a step]."""

    _facts: Callable[[], dict[str, str]]
    _details: Callable[[], dict[str, str]]
    streams: Streams
    settled: dict[str, int] = field(default_factory=dict)
    """Who is found to have a generator to itself: to be taken over when the step is committed."""

    def facts(self) -> dict[str, str]:
        """What must be equal on all workers, in the order in which a difference should be named."""
        return self._facts()

    def details(self) -> dict[str, str]:
        """What helps to explain a difference: written out only if there is one."""
        return self._details()

    def judge(self, here: int, everyone: Sequence[Facts]) -> Disagreement | None:
        """What worker `here` raises; None if the workers differ only in what may differ."""
        compared = [_without(facts, _is_detail) for facts in everyone]
        first, *others = (_without(facts, is_of_streams) for facts in compared)
        if all(facts == first for facts in others):
            alone = tolerated(everyone, self.streams.owners)
            if alone:
                self.settled.update(alone)
                return None
        found = first_difference(here, compared)
        return replace(found, what=_named(found, everyone), advice=advice(found, everyone))


def _without(facts: Facts, is_left_out: Callable[[str], bool]) -> Facts:
    return {name: fact for name, fact in facts.items() if not is_left_out(name)}


def _is_detail(name: str) -> bool:
    """Whether it helps to judge or to explain a difference, and is none itself."""
    return is_detail_of_streams(name) or name.startswith((COUNTER, ENTRY))


def _named(found: Disagreement, everyone: Sequence[Facts]) -> str:
    """What the workers differ in; of a state, the first part that differs."""
    mine, theirs = everyone[found.here], everyone[found.there]
    entries = (name for name in mine if name.startswith(ENTRY) and mine[name] != theirs.get(name))
    entry = next(entries, None) if found.what == STATE else None
    return found.what if entry is None else f"{STATE} of {entry.removeprefix(ENTRY)}"


def advice(found: Disagreement, everyone: Sequence[Facts]) -> str:
    """What to write instead, and which counters of the script are elsewhere."""
    key = next((word for word in ("updates", "group") if found.what.startswith(word)), found.what)
    key = "random" if is_of_streams(found.what) else key
    usual = ADVICE.get(key, Disagreement.advice)
    return f"{usual}{_counters_elsewhere(found, everyone)}"


def _counters_elsewhere(found: Disagreement, everyone: Sequence[Facts]) -> str:
    mine, theirs = everyone[found.here], everyone[found.there]
    names = [name for name in {**mine, **theirs} if name.startswith(COUNTER) and theirs.get(name) != mine.get(name)]
    elsewhere = [
        f"{name.removeprefix(COUNTER)} is {_at(mine, name)} here and {_at(theirs, name)} there" for name in names
    ]
    return f" In the script, {'; '.join(elsewhere[:3])}." if elsewhere else ""


def _at(facts: Facts, name: str) -> str:
    return facts.get(name, "as at first")


class Turn:
    """Counts turns, and the loops of the one under way. See Note [Turns]."""

    def __init__(self) -> None:
        self.number = 0
        """How many turns were begun before this one."""
        self.sites: list[Site] = []
        """The lines of the loops of this turn so far."""
        self.before: list[Site] = []
        """Those of the turn before."""
        self._seen: dict[Site, Seen] = {}

    @property
    def is_open(self) -> bool:
        """Whether the turn before had more loops, of which this one has had the first."""
        return len(self.sites) < len(self.before) and self.before[: len(self.sites)] == self.sites

    def enter(self, batch: GlobalBatch, site: Site, updates: int) -> None:
        """A loop over `batch` begins."""
        seen = self._seen.get(site)
        is_other = seen is None or seen.is_other(batch, updates)
        self._seen[site] = Seen.of(batch, updates)
        if self.sites and not (is_other and site in self.sites):
            self.sites.append(site)
            return
        self.number += bool(self.sites)
        self.before, self.sites = self.sites, [site]


@dataclass(frozen=True)
class Seen:
    """The batch that a loop last had, and the updates that were made before."""

    loaded: tuple[object, ...]
    first: Callable[[], Any]
    updates: int

    @classmethod
    def of(cls, batch: GlobalBatch, updates: int) -> "Seen":
        return cls(_loaded(batch), _nobody if batch.position is not None else _reference(batch.whole), updates)

    def is_other(self, batch: GlobalBatch, updates: int) -> bool:
        if batch.position is not None or self.loaded:
            return _loaded(batch) != self.loaded
        leaf = _first_tensor(batch.whole)
        return leaf is None or self.first() is not leaf or updates > self.updates


def _loaded(batch: GlobalBatch) -> tuple[object, ...]:
    """Which batch of a loader it is; nothing for one that is the script's own."""
    return () if batch.position is None else (batch.loader, batch.position)


def _reference(whole: Any) -> Callable[[], Any]:
    leaf = _first_tensor(whole)
    return _nobody if leaf is None else weakref.ref(leaf)


def _first_tensor(whole: Any) -> torch.Tensor | None:
    if isinstance(whole, torch.Tensor):
        return whole
    structure = opened(whole)
    found = (_first_tensor(part) for _, part in structure.parts) if structure is not None else iter(())
    return next((leaf for leaf in found if leaf is not None), None)


def _nobody() -> None:
    """There is no such tensor, or none any more."""


class Groups:
    """The numbers in the groups of the optimizers, in words; written anew only where they have changed."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._seen: dict[str, tuple[list[Any], dict[str, str]]] = {}

    def facts(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for label, optimizer in self._models.optimizers.items():
            found |= self._of(label, optimizer)
        return found

    def _of(self, label: str, optimizer: Optimizer) -> dict[str, str]:
        now = [_numbers(group) for group in optimizer.param_groups]
        before, words = self._seen.get(label, (None, {}))
        if now != before:
            words = {GROUP.format(number=n, label=label): _in_words(group) for n, group in enumerate(now)}
            self._seen[label] = now, words
        return words


def _numbers(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, len(group[name]) if name == "params" else _plain(group[name])) for name in sorted(group)]


def _plain(value: Any) -> Any:
    """A tensor on a GPU is not read: the host would wait for it."""
    if isinstance(value, torch.Tensor):
        return f"a tensor on {value.device}" if value.device.type != "cpu" else value.tolist()
    return value if isinstance(value, bool | int | float | str | tuple | list | None) else type(value).__name__


def _in_words(group: list[tuple[str, Any]]) -> str:
    return ", ".join(f"{'parameters' if name == 'params' else name}={value}" for name, value in group)


class Places:
    """Makes the place of each step from what this worker's script has done so far."""

    def __init__(self, models: Models, progress: Progress) -> None:
        self.turn = Turn()
        self.streams = Streams()
        self.updates: dict[str, int] = {}
        """How many updates each optimizer has made, by its label."""
        self.rhythm = Rhythm()
        self._counters = Counters()
        self._loop: Loop | None = None
        self._passes: dict[int | None, int] = {}
        self._updated = False
        self._carries_over = True
        self._expected: list[Number] = []
        self._first_values: Values | None = None
        self._saved_values: list[tuple[str, str, str, str]] = []
        self._gone_on: set[int] | None = None
        """The loaders on which a step has trained since a snapshot was loaded; None if none was."""
        self._models, self._progress = models, progress
        self._groups = Groups(models)

    @property
    def begins_turn(self) -> bool:
        """Whether the loop under way is the first of a turn."""
        return self._loop is not None and self._loop.is_step and len(self.turn.sites) == 1

    def enter(self, batch: GlobalBatch, loop: Loop, step: int) -> list[OutOfStep]:
        """A loop over `batch` begins. Gives the numbers of the script that are elsewhere after a resume."""
        self._loop = loop
        if not loop.is_step:
            return []
        self.turn.enter(batch, loop.site, sum(self.updates.values()))
        position = batch.position or Position()
        at = Moment(step, self.turn.number, position.step, position.epoch)
        self._counters.note(loop.counts, at)
        if self._passes.setdefault(batch.loader, at.passes) != at.passes:
            self.rhythm.forget()
        expected, self._expected = self._expected, []
        return out_of_step(expected, loop.counts, at) if expected else []

    def begun_anew(self) -> list[Changed]:
        """The values of the script that begin anew after a resume. See Note [Values of the script] in values.py."""
        if self._first_values is not None and not self._saved_values:
            return []
        now, saved = values(calling_frame()), self._saved_values
        self._first_values, self._saved_values = self._first_values or now, []
        return begun_anew(saved, now)

    def wrapped(self, batch: GlobalBatch) -> str | None:
        """What begins anew around a pass that goes on in its middle. See Note [Iterators that begin anew]."""
        number, position = batch.loader, batch.position
        if self._gone_on is None or number is None or number in self._gone_on or position is None:
            return None
        self._gone_on.add(number)
        passes = [loader.running for loader in self._progress.loaders.values()]
        running = self._progress.loaders[number].running
        return None if running is None or position.step == 0 else begins_anew(running, passes)

    def looped(self, loop: Loop) -> str | None:
        """A loop has begun. Gives what was due instead, if the script is out of its rhythm."""
        return self.rhythm.saw(rhythm.loop(str(loop.site))) if loop.is_step else None

    def updated(self, optimizer: Optimizer) -> str | None:
        """An optimizer is about to make an update. Gives what was due instead, if the script is out of its rhythm."""
        label = next((label for label, known in self._models.optimizers.items() if known is optimizer), None)
        if label is None:
            return None
        due = self.rhythm.saw(rhythm.update(label))
        self.updates[label] = self.updates.get(label, 0) + 1
        self._updated = True
        return due

    def begins(self, has_gradients: bool) -> None:
        """A step begins, and something stands in `p.grad`, or nothing."""
        if self._updated:
            self._carries_over = has_gradients

    def committed(self, batch: GlobalBatch) -> None:
        """The step that trained on `batch` counts."""
        self._updated = False
        for number, loader in self._progress.loaders.items():
            loader.committed(batch.position if number == batch.loader else None)

    @property
    def keeps_gradients(self) -> bool:
        """Whether what stands in `p.grad` now belongs to the run: no update has used it up, or one does not end it."""
        return not self._updated or self._carries_over

    def state(self) -> dict[str, Any]:
        """What a snapshot holds of it, with the script's numbers as they are now."""
        frame = calling_frame()
        return {
            "updates": dict(self.updates),
            "turns": self.turn.number + bool(self.turn.sites),
            "owners": dict(self.streams.owners),
            "rhythm": list(self.rhythm.history),
            "numbers": [number.to_json() for number in self._counters.learned(counts(frame))],
            "values": [] if self._first_values is None else changed_since(self._first_values, values(frame)),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """The run goes on from a snapshot; one from before places were written down says nothing."""
        self.updates = dict(state.get("updates", {}))
        self.turn.number = state.get("turns", 0)
        self.streams.owners = dict(state.get("owners", {}))
        self.rhythm.expect(state.get("rhythm", ()))
        self._passes = {}
        self._gone_on = set()
        self._saved_values = [tuple(saved) for saved in state.get("values", ())]
        self._expected = [Number(*saved) for saved in state.get("numbers", ())]

    def of_step(self, batch: GlobalBatch, now: Generators, slot: int, step: int, *, closely: bool) -> StepPlace:
        """The place of the step that begins now, with the generators as they are outside of its lanes.

        A batch that is the script's own is compared as a whole in the first step, later by some of its contents. If
        workers look `closely`, all of it is, and the state of everything that is trained.
        """

        def facts() -> dict[str, str]:
            self.streams.look(now)
            of_state = {STATE: self._fingerprint()} if closely else {}
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
            **_batch_facts(batch, looks_at_all),
            EPOCH: str(self._progress.epoch),
            **{UPDATES.format(label=label): str(count) for label, count in self.updates.items()},
            **self._groups.facts(),
            LOADERS: " ".join(f"{position.epoch}:{position.step}" for position in positions),
        }

    def _numbers(self) -> dict[str, str]:
        """Those of the script's numbers that have changed since it began to train."""
        assert self._loop is not None
        learned = self._counters.learned(self._loop.counts)
        return {f"{COUNTER}`{number.name}` ({number.file})": str(number.value) for number in learned}

    def _fingerprint(self) -> str:
        return combined(fingerprints(self._models.held())).hex()

    def _entries(self) -> dict[str, str]:
        """The fingerprint of every tensor, so that the first that differs can be named."""
        held = self._models.held()
        return {
            f"{STATE}: {name}": str(int(entry)) for name, entry in zip(sorted(held), fingerprints(held), strict=True)
        }


def _batch_facts(batch: GlobalBatch, looks_at_all: bool) -> dict[str, str]:
    if batch.position is not None:
        words = f"batch {batch.position.step} of pass {batch.position.epoch} of loader {batch.loader}"
        return {BATCH: words, SAMPLES: batch.digest}
    return {CONTENTS: (contents if looks_at_all else sampled_contents)(batch.whole)}
