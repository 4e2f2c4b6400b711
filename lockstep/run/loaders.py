"""The user's loaders as the run reads them, and the epochs that it counts."""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from lockstep.data import ShardedLoader
from lockstep.data.device import DeviceMover
from lockstep.elastic.formation import Formation
from lockstep.events import BatchLoaded, Events
from lockstep.state.run_state import RunState
from lockstep.strategies import StepEngine

NO_BATCH_LEFT = (
    "the checkpoint was saved behind the last batch of an epoch's pass: that pass has no batch left, and names that "
    "only its loop assigns are not defined before the next epoch. Call run.save behind the loop, at the body's end."
)


class Loaders:
    """The data of one run on one worker. One owner, who calls `close`.

    `take_up` is called where the script first asks for epochs, `loader_asks` before each batch, with the loader's
    index, `epoch_ends` after the body of an epoch.
    """

    def __init__(
        self,
        state: RunState,
        formation: Formation,
        engine: StepEngine,
        mover: DeviceMover,
        events: Events,
        take_up: Callable[[], None],
        loader_asks: Callable[[int], None],
        epoch_ends: Callable[[], None],
    ) -> None:
        self._state, self._formation, self._engine = state, formation, engine
        self._mover, self._events = mover, events
        self._take_up, self._loader_asks, self._epoch_ends = take_up, loader_asks, epoch_ends
        self._num_loops = 0

    def shard(self, loader: "DataLoader[Any]", batch: str) -> ShardedLoader:
        """The loader, read by lanes; its position belongs to the run."""
        return self._state.progress.add(
            lambda number: ShardedLoader(
                loader,
                seed=self._state.steps.seed,
                num_lanes=self._state.steps.num_lanes,
                lanes=partial(self._lanes_to_load, number),
                index=number,
                say=self._events.note,
                loaded=lambda waited_s: self._events.emit(BatchLoaded, number, waited_s),
                batch=batch,
                mover=self._mover,
                least=lambda: self._engine.min_samples,
            )
        )

    def epochs(self, count: int, start: int) -> Iterator[int]:
        """Counts epochs from the one under way, or from `start`, up to `count`."""
        epochs = self._epochs(count, start)
        self._state.progress.epochs_under_way = weakref.ref(epochs)
        return epochs

    def _epochs(self, count: int, start: int) -> Iterator[int]:
        progress = self._state.progress
        if self._state.models.modules:
            self._take_up()
        if start > progress.epoch:
            progress.start_at(start, self._state.steps.step)
        self._note_second_loop(count)
        for epoch in progress.epochs(count):
            self._state.places.epoch_begins()
            yield epoch
            self._epoch_ends()
        self._state.places.epochs_are_over()

    def _note_second_loop(self, count: int) -> None:
        """Once: a script may take the numbers of epochs for those of each loop."""
        self._num_loops += 1
        epoch = self._state.progress.epoch
        if self._num_loops == 2 and epoch > 0:
            left = count - epoch if count > epoch else "none"
            self._events.note(
                f"a second loop over run.epochs goes on where the run is, at epoch {epoch}: of its {count} epochs it "
                f"has {left} left. Epochs are counted over the whole run: run.epochs({epoch + count}) has {count} more."
            )

    def close(self) -> None:
        for loader in self._state.progress.loaders.values():
            loader.close()

    def _lanes_to_load(self, number: int) -> tuple[int, ...]:
        """Asked by a loader before each batch: which lanes to load. It is also a moment to save at."""
        self._state.places.before_batch(number)
        self._loader_asks(number)
        self._formation.batch_is_due()
        if self._state.places.asked(number):
            self._events.note(NO_BATCH_LEFT)
        return self._formation.generation.lanes
