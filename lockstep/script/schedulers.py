"""Schedulers and optimizers that the run was not given, found by the garbage collector: nothing saves them."""

import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.data.structure import attributes

_DEPTH = 2
"""How far something may be inside of something that is tracked: an attribute of an attribute."""


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


def _schedulers_in(thing: Any, depth: int) -> Iterator[LRScheduler]:
    if isinstance(thing, LRScheduler):
        yield thing
    if isinstance(thing, list | tuple):
        for item in thing:
            yield from _schedulers_in(item, depth)
    elif depth > 0 and not isinstance(thing, Optimizer):
        for value in list(attributes(thing).values()):
            yield from _schedulers_in(value, depth - 1)
