"""Loading from a stream (IterableDataset): every worker reads all of it and keeps its lanes' shares.

# Note [A stream is read whole]
# Samples of a stream have no indices, so none can be left out without being read. Every worker reads the
# same stream in the same order, in one process, from generators set by the run's seed and the epoch. To
# start in the middle it reads what comes before and drops it. Only collating and what follows is spared.
# One process has one reading at a time. Many streams keep their position in themselves (`__iter__` sets it to
# zero and returns self), where a second reading would silently move the first. So reloading a batch starts
# the reading again, and the pass goes on with that one.
"""

from collections.abc import Iterator
from typing import Any

from lockstep.chance import Stream
from lockstep.data.batch import Position
from lockstep.data.fetch import Fetch, LaneRequest, Loaded, Source
from lockstep.data.own_generators import held_by
from lockstep.lanes import share


class Reading:
    """One pass over a stream, some samples at a time, drawing from a stream of chance of its own."""

    def __init__(self, dataset: Any, key: int) -> None:
        self._chance = Stream(key, held_by(dataset))
        self.num_read = 0
        with self._chance.drawing():
            self._samples: Iterator[Any] = iter(dataset)

    def take(self, size: int, *, drop_short: bool) -> list[Any]:
        """The next `size` samples, or what is left; nothing where the stream has ended."""
        with self._chance.drawing():
            samples = list(_up_to(size, self._samples))
        self.num_read += 1
        if len(samples) < size:
            self._samples = iter(())  # `next` is not called again on an iterator that has ended
        return [] if drop_short and len(samples) < size else samples


def _up_to(size: int, samples: Iterator[Any]) -> Iterator[Any]:
    """At most `size` of them. `islice` would call `iter` again, at which some streams go back to their beginning."""
    for _ in range(size):
        try:
            sample = next(samples)
        except StopIteration:
            return
        yield sample


class StreamFetch(Fetch):
    """Reads requests in the order of their steps; any other order starts the stream again."""

    def __init__(self, source: Source, batch_size: int | None, drop_last: bool) -> None:
        super().__init__(source)
        self.draws = source.collate_draws  # a reading draws from a stream of its own
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._epoch = -1
        self._reading: Reading | None = None

    def load(self, request: LaneRequest) -> Loaded | None:
        position = request.draw.position
        samples = self._take(self._at(position))
        if not samples:
            return None
        if self._batch_size is None:
            return self.source.shares_of_whole(samples[0], position, request.lanes, request.least)
        return Loaded(len(samples), self._shares(samples, request))

    def close(self) -> None:
        self._reading = None

    def _at(self, position: Position) -> Reading:
        """The stream, open at `position`. See Note [A stream is read whole]."""
        if self._reading is None or (self._epoch, self._reading.num_read) != (position.epoch, position.step):
            self._reading = None  # the old pass closes its files before the new one opens them
            self._epoch = position.epoch
            self._reading = Reading(self.source.dataset, self.source.keys.of("stream", position.epoch))
            for _ in range(position.step):
                self._take(self._reading)
        return self._reading

    def _take(self, reading: Reading) -> list[Any]:
        return reading.take(1 if self._batch_size is None else self._batch_size, drop_short=self._drop_last)

    def _shares(self, samples: list[Any], request: LaneRequest) -> dict[int, Any]:
        epoch, step = request.draw.position.epoch, request.draw.position.step
        num_lanes, least = self.source.num_lanes, request.least
        taken = {lane: share(len(samples), lane, num_lanes, least) for lane in request.lanes}
        return {
            lane: self.source.collate(samples[part.start : part.stop], epoch, step, lane)
            for lane, part in taken.items()
            if part
        }
