"""Passes over a run's loader, for trainers that count epochs by themselves."""

from collections.abc import Iterator
from itertools import chain

from lockstep.data import GlobalBatch, ShardedLoader


class NextPass:
    """One pass over a loader. A run that was saved after the last batch of a pass has nothing left of that pass."""

    def __init__(self, loader: ShardedLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[GlobalBatch]:
        first = next(batches := iter(self._loader), None)
        if first is None:
            return iter(self._loader)
        return chain([first], batches)
