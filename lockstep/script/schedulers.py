"""Schedulers of a run's optimizers that nobody tracks: they are not saved, and a worker that joins has another one."""

import gc
from collections.abc import Iterable, Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

DEPTH = 2
"""How far a scheduler may be inside of something that is tracked: an attribute of an attribute."""


def untracked(optimizers: Iterable[Optimizer], tracked: Iterable[Any]) -> list[LRScheduler]:
    """The schedulers of these optimizers that are not among what is tracked, nor inside of it.

    torch marks an optimizer that was given to a scheduler. Only where there is a mark are all objects looked at.
    """
    marked = [optimizer for optimizer in optimizers if hasattr(optimizer.step, "_wrapped_by_lr_sched")]
    if not marked:
        return []
    known = {id(found) for thing in tracked for found in _inside(thing, DEPTH)}
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), LRScheduler)]
    inner = {id(found) for scheduler in alive for found in _inside(scheduler, 1) if found is not scheduler}
    mine = [thing for thing in alive if any(getattr(thing, "optimizer", None) is one for one in marked)]
    return [scheduler for scheduler in mine if id(scheduler) not in known | inner]


def is_fresh(scheduler: LRScheduler) -> bool:
    """Whether it has not made a step yet: it was made as if training began."""
    return scheduler.last_epoch <= 0


def _inside(thing: Any, depth: int) -> Iterator[LRScheduler]:
    if isinstance(thing, LRScheduler):
        yield thing
    if isinstance(thing, list | tuple):
        for item in thing:
            yield from _inside(item, depth)
    elif depth > 0 and not isinstance(thing, Optimizer):
        for value in list(getattr(thing, "__dict__", {}).values()):
            yield from _inside(value, depth - 1)
