"""Which of the script's own numbers count steps, batches or passes, and which values they should have after a resume.

# Note [Numbers of the script]
# A newcomer, or a resumed run, runs the script from the top: its own counters and flags start again, while the steps go
# on. In
#
#     count = 0
#     for batch in loader:
#         count += 1
#         if count % 2 == 0: optimizer.step()
#
# `count` should be 12 where step 12 begins. So every snapshot has the whole numbers (and truth values) in the script's
# variables, and what they count: a number counts steps, turns, batches of a pass or passes if it has differed from that
# by the same amount at every training loop so far. A number that is another one after a resume is known by its name. If
# the training depends on it (Note [What depends on a counter] in dependence.py), the script is refused.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lockstep.script.call_site import Site, WholeNumbers
from lockstep.script.source.dependence import Dependence, dependence
from lockstep.script.source.first_reads import is_carried
from lockstep.script.source.functions import Function, function_at


class Moment(NamedTuple):
    """When a training loop begins: steps and turns done, the number of its batch in the pass, and the passes before."""

    step: int
    turn: int
    batch: int
    passes: int


PASSES = "passes"


@dataclass
class Track:
    """One number of the script: by how much it differs from what it may count, as long as that stays the same."""

    value: int
    offsets: dict[str, int]
    noted: int
    """At which of the loops it was last read: only numbers that have changed, or should have, are."""
    changes: int = 0


@dataclass(frozen=True)
class Number:
    """A number of the script, by its name in a function of a file: its value, and what it counts, if anything."""

    file: str
    function: str
    name: str
    value: int
    offsets: Mapping[str, int]

    def expected(self, at: Moment) -> set[int]:
        """The values that it may have at a moment."""
        counted = {getattr(at, kind) + offset for kind, offset in self.offsets.items()}
        return counted or {self.value}

    def to_json(self) -> list[Any]:
        return [self.file, self.function, self.name, self.value, dict(self.offsets)]


@dataclass(frozen=True)
class OutOfStep:
    """A number with a wrong value, and where the training depends on it, if it does."""

    number: Number
    value: int
    at: Moment
    depends: Dependence | None

    def __str__(self) -> str:
        name, file = self.number.name, self.number.file
        should = max(self.number.expected(self.at))
        where = "" if self.depends is None else f" It {self.depends.how} ({file}:{self.depends.line})."
        return f"`{name}` ({file}) is {self.value} and should be {should}, as steps go on at {self.at.step}.{where}"


@dataclass
class ScriptCounters:
    """Reads the script's numbers at the beginning of every training loop. See Note [Numbers of the script]."""

    _tracks: dict[tuple[str, str], dict[str, Track]] = field(default_factory=dict)
    _loops: int = 0
    _passes: int = 0
    _saved: list[Number] = field(default_factory=list)
    """Those of a snapshot, until training goes on."""

    def begin(self, numbers: WholeNumbers, at: Moment, *, at_start: bool) -> list[OutOfStep]:
        """A training loop begins, at the start of a pass or within one. Returns what is wrong after a resume."""
        self.note(numbers, at)
        saved, self._saved = self._saved, []
        return out_of_step(saved, numbers, at, at_start=at_start) if saved else []

    def state(self, now: WholeNumbers) -> list[list[Any]]:
        """Its part of a snapshot."""
        return [number.to_json() for number in self.learned(now)]

    def load(self, saved: Iterable[list[Any]]) -> None:
        self._saved = [Number(*one) for one in saved]

    def note(self, numbers: WholeNumbers, at: Moment) -> None:
        """A training loop begins."""
        self._loops += 1
        everything, self._passes = at.passes != self._passes, at.passes
        for place, values in numbers.items():
            tracks = self._tracks.setdefault(place, {})
            for name, value in values.items():
                track = tracks.get(name)
                if track is None:
                    tracks[name] = Track(
                        value, {kind: value - count for kind, count in at._asdict().items()}, self._loops
                    )
                elif everything or track.value != value:
                    self._follow(track, value, at)

    def learned(self, now: WholeNumbers) -> list[Number]:
        """The script's numbers as they are `now`, without those that have never changed."""
        return [
            Number(Site(path, 0).file, function, name, value, self._offsets(track))
            for (path, function), numbers in now.items()
            for name, value in numbers.items()
            if (track := self._tracks.get((path, function), {}).get(name)) is not None
            if track.changes or track.value != value
        ]

    def _follow(self, track: Track, value: int, at: Moment) -> None:
        stood_still = track.noted < self._loops - 1
        track.offsets = {
            kind: offset
            for kind, offset in track.offsets.items()
            if value - getattr(at, kind) == offset and not (stood_still and kind != PASSES)
        }
        track.changes += track.value != value
        track.value, track.noted = value, self._loops

    def _offsets(self, track: Track) -> dict[str, int]:
        """A number that counts steps, turns or batches has moved with the last loop."""
        moves = track.noted == self._loops
        return {kind: offset for kind, offset in track.offsets.items() if track.changes and (moves or kind == PASSES)}


def out_of_step(
    saved: Iterable[Number], numbers: WholeNumbers, at: Moment, *, at_start: bool = False
) -> list[OutOfStep]:
    """The numbers of a snapshot that have wrong values in the script's `numbers`.

    One that counts nothing is no state where each turn sets it before it reads it; `at_start`, where each pass does.
    """
    here = {(Site(path, 0).file, function): path for path, function in numbers}
    wrong = []
    for number in saved:
        path = here.get((number.file, number.function))
        value = None if path is None else numbers[path, number.function].get(number.name)
        if path is None or value is None:
            continue
        source = function_at(path, number.function)
        known = _narrowed(number, source)
        if source is not None and not known.offsets and _is_set_anew(source, number.name, at_start):
            continue
        if value not in known.expected(at):
            wrong.append(OutOfStep(known, value, at, _dependence(known, source)))
    return wrong


def _is_set_anew(source: Function, name: str, at_start: bool) -> bool:
    return not source.is_loop_variable(name) and not is_carried(source, name, over_passes=at_start)


def _narrowed(number: Number, source: Function | None) -> Number:
    """In the first pass steps and batches count alike: the source shows which of them a number goes on counting."""
    if source is None:
        return number
    is_reset = source.is_reset(number.name)
    kept = {kind: offset for kind, offset in number.offsets.items() if (kind == "batch") == is_reset}
    return replace(number, offsets=kept or number.offsets)


def _dependence(number: Number, source: Function | None) -> Dependence | None:
    """A number that a loop itself sets again shows nothing, unless it counts."""
    if source is None or (not number.offsets and source.is_loop_variable(number.name)):
        return None
    return dependence(source, number.name)
