"""Counts the turns of a script: the unit that it repeats, one loop over run.lanes or several.

# Note [Turns]
# A turn is one loop over run.lanes, or several:
#
#     for batch in loader:
#         for x in run.lanes(batch): ...        # the critic's loop: a turn begins here, with another batch
#         for x in run.lanes(batch): ...        # the generator's loop
#
# So are two loops over two loaders, and the closure of LBFGS. A turn begins where the script reaches the line of its
# first loop again, with another batch. If it never does, because it has gone on to another part of the script, a turn
# begins where it reaches any other loop of the turn again. The script's own batch may be the same each time (all of a
# small data set): it counts as another one after an update.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.data import GlobalBatch
from lockstep.data.structure import opened
from lockstep.script.call_site import Site, WholeNumbers


@dataclass(frozen=True)
class LaneLoop:
    """A loop over run.lanes, as the script wrote it: at which line, and with which whole numbers in its variables.

    If it is no step, gradients are off and only buffers are averaged.
    """

    site: Site
    numbers: WholeNumbers
    is_step: bool = True


class Turn:
    """Counts turns, and the loops of the one under way. See Note [Turns]."""

    def __init__(self) -> None:
        self.number = 0
        """How many turns were begun before this one."""
        self.sites: list[Site] = []
        """The lines of the loops of this turn so far."""
        self._seen: dict[Site, SeenBatch] = {}

    def enter(self, batch: GlobalBatch, site: Site, updates: int) -> None:
        """A loop over `batch` begins, after so many `updates`."""
        seen = self._seen.get(site)
        is_other = seen is None or seen.is_other(batch, updates)
        self._seen[site] = SeenBatch.of(batch, updates)
        if is_other and site in self.sites:
            self.number += 1
            self.sites = []
        self.sites.append(site)


@dataclass(frozen=True)
class SeenBatch:
    """The batch that a loop last had, and the updates that were made before.

    A loader's batch is known by its number, one of the script's own by its first tensor.
    """

    loaded: tuple[object, ...]
    first: Callable[[], Any]
    updates: int

    @classmethod
    def of(cls, batch: GlobalBatch, updates: int) -> "SeenBatch":
        leaf = None if batch.position is not None else _first_tensor(batch.whole)
        return cls(_loaded(batch), _nothing if leaf is None else weakref.ref(leaf), updates)

    def is_other(self, batch: GlobalBatch, updates: int) -> bool:
        if batch.position is not None:
            return _loaded(batch) != self.loaded
        leaf = _first_tensor(batch.whole)
        return leaf is None or self.first() is not leaf or updates > self.updates


def _loaded(batch: GlobalBatch) -> tuple[object, ...]:
    """Which batch of a loader it is; nothing for one that is the script's own."""
    return () if batch.position is None else (batch.loader, batch.position)


def _first_tensor(whole: Any) -> torch.Tensor | None:
    if isinstance(whole, torch.Tensor):
        return whole
    structure = opened(whole)
    leaves = (_first_tensor(part) for _, part in structure.parts) if structure is not None else iter(())
    return next((leaf for leaf in leaves if leaf is not None), None)


def _nothing() -> None:
    """In place of a weak reference, where there is no tensor."""
