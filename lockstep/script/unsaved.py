"""Objects of the script that start again after a resume because nothing saves them, found by the garbage collector.

Iterators around a pass over a loader, and untracked schedulers of a run's optimizers.

# Note [Iterators that start again]
# After a resume a pass goes on in its middle, and so does a counter that lockstep can read (counters.py). But
# `islice(loader, 4)` counts inside of an iterator of the standard library, which cannot be read, and
# `zip(loader, rows)` goes through `rows` from the beginning. So at the first batch of a pass that goes on in its
# middle, the iterators that hold the pass are checked: the garbage collector knows them. `cycle(loader)` keeps the
# batches of the first pass, so it is wrong at the start of a later one too.
"""

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, count, cycle, islice, repeat, takewhile
from types import GeneratorType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.data.structure import attributes

_MOST_WRAPPERS = 4
_TRANSPARENT = (enumerate, map, filter, chain, takewhile, GeneratorType)
"""They take one item for each that they yield, and keep no count. What a generator function counts can be read."""
_ENDLESS = (count, repeat)
"""What they give does not depend on where they begin, or can be read."""

_DEPTH = 2
"""How far something may be inside of something that is tracked: an attribute of an attribute."""


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


def untracked(optimizers: Iterable[Optimizer], tracked: Iterable[Any]) -> list[LRScheduler]:
    """The schedulers of these optimizers that are not among what is tracked, nor inside of it.

    torch marks an optimizer that has a scheduler. Only where there is a mark are all objects searched.
    """
    marked = [optimizer for optimizer in optimizers if hasattr(optimizer.step, "_wrapped_by_lr_sched")]
    if not marked:
        return []
    known = {id(inside) for thing in tracked for inside in _schedulers_in(thing, _DEPTH)}
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), LRScheduler)]
    inner = {id(inside) for scheduler in alive for inside in _schedulers_in(scheduler, 1) if inside is not scheduler}
    mine = [thing for thing in alive if any(getattr(thing, "optimizer", None) is one for one in marked)]
    return [scheduler for scheduler in mine if id(scheduler) not in known | inner]


def is_inside(one: object, holders: Iterable[object], depth: int = _DEPTH) -> bool:
    """Whether it is one of these objects, or in attributes, lists or tables of theirs."""
    for holder in holders:
        parts = holder if isinstance(holder, list | tuple) else attributes(holder) or holder
        inside = list(parts.values()) if isinstance(parts, dict) else parts
        if holder is one or (depth > 0 and isinstance(inside, list | tuple) and is_inside(one, inside, depth - 1)):
            return True
    return False


def saves_an_optimizer(thing: Any) -> bool:
    """Whether its state_dict has that of an optimizer: a scheduler only holds one."""
    state = thing.state_dict()
    parts = [state, *(state.values() if isinstance(state, Mapping) else ())]
    return any(isinstance(part, Mapping) and "param_groups" in part for part in parts)


def is_fresh(scheduler: LRScheduler) -> bool:
    """Whether it has not made a step yet: it was made as if training began."""
    return scheduler.last_epoch <= 0


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


def _schedulers_in(thing: Any, depth: int) -> Iterator[LRScheduler]:
    if isinstance(thing, LRScheduler):
        yield thing
    if isinstance(thing, list | tuple):
        for item in thing:
            yield from _schedulers_in(item, depth)
    elif depth > 0 and not isinstance(thing, Optimizer):
        for value in list(attributes(thing).values()):
            yield from _schedulers_in(value, depth - 1)
