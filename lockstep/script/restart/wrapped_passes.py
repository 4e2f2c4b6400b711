"""Iterators around a pass over a loader that start again after a resume, found by the garbage collector.

# Note [Iterators that start again]
# After a resume a pass goes on in its middle, and so does a counter that lockstep can read (counters.py). But
# `islice(loader, 4)` counts inside of an iterator of the standard library, which cannot be read, and
# `zip(loader, rows)` goes through `rows` from the beginning. So at the first batch of a pass that goes on in its
# middle, the iterators that hold the pass are checked: the garbage collector knows them. `cycle(loader)` keeps the
# batches of the first pass, so it is wrong at the start of a later one too.
"""

import gc
from collections.abc import Collection, Iterator
from itertools import chain, count, cycle, islice, repeat, takewhile
from types import GeneratorType
from typing import Any

from lockstep.data import GlobalBatch, Position
from lockstep.state.progress import DataProgress

_MOST_WRAPPERS = 4
_TRANSPARENT = (enumerate, map, filter, chain, takewhile, GeneratorType)
"""They take one item for each that they yield, and keep no count. What a generator function counts can be read."""
_ENDLESS = (count, repeat)
"""What they give does not depend on where they begin, or can be read."""


class WrappedPasses:
    """What stands around the passes and the epochs of a run that goes on. See Note [Iterators that start again]."""

    def __init__(self, progress: DataProgress) -> None:
        self._progress = progress
        self._gone_on: set[int] | None = None
        """The loaders on which a step has trained since a snapshot was loaded; None if none was."""
        self._was_loaded = False

    def loaded(self) -> None:
        """A snapshot was loaded."""
        self._gone_on, self._was_loaded = set(), True

    def around_pass(self, batch: GlobalBatch) -> str | None:
        """A training loop over `batch` begins. Returns what starts again around its pass, which goes on inside."""
        number, position = batch.loader, batch.position
        if self._gone_on is None or number is None or number in self._gone_on or position is None:
            return None
        self._gone_on.add(number)
        loaders = self._progress.loaders
        running = loaders[number].running
        if running is None or position == Position():
            return None
        return restarted_iterator(running, [one.running for one in loaders.values()], at_start=position.step == 0)

    def around_epochs(self) -> str | None:
        """The same for epochs, once after a resume."""
        was_loaded, self._was_loaded = self._was_loaded, False
        epochs = self._progress.epochs_under_way()
        goes_on = was_loaded and self._progress.epoch > 0 and epochs is not None
        return restarted_iterator(epochs, ()) if goes_on else None


def restarted_iterator(running: object, passes: Collection[object], *, at_start: bool = False) -> str | None:
    """Describes what around the pass `running` starts again although the pass does not; None if nothing does.

    `passes` are those of all loaders of the run. `at_start`: the pass begins, and is not the first. See Note [Iterators
    that start again].
    """
    inner: object | None = running
    for _ in range(_MOST_WRAPPERS):
        holders = list(_holders(inner))
        for holder in holders:
            if at_start and not isinstance(holder, cycle):
                continue
            words = _counts_by_itself(holder, inner, passes)
            if words is not None:
                return words
        inner = next((holder for holder in holders if isinstance(holder, (*_TRANSPARENT, zip))), None)
        if inner is None:
            return None
    return None


def _holders(inner: object) -> Iterator[object]:
    """The iterators that hold `inner`; zip, chain and map hold theirs in a tuple."""
    for holder in gc.get_referrers(inner):
        if isinstance(holder, (*_TRANSPARENT, cycle, islice, zip)):
            yield holder
        elif type(holder) is tuple:
            yield from (outer for outer in gc.get_referrers(holder) if isinstance(outer, (zip, map)))


def _counts_by_itself(holder: object, inner: object, passes: Collection[object]) -> str | None:
    if isinstance(holder, islice):
        return "itertools.islice counts its batches by itself, from 0"
    if isinstance(holder, cycle):
        return "itertools.cycle gives again what it has gone over, from where it began"
    if isinstance(holder, zip):
        others = [one for one in _zipped(holder) if one is not inner and not any(one is known for known in passes)]
        finite = [one for one in others if not isinstance(one, _ENDLESS)]
        if finite:
            return f"zip takes them together with a {type(finite[0]).__name__}, which starts from its beginning"
    return None


def _zipped(holder: object) -> Iterator[Any]:
    for referent in gc.get_referents(holder):
        if type(referent) is tuple:
            yield from (one for one in referent if hasattr(one, "__next__"))
