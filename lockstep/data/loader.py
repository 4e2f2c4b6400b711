"""The loader that `run.shard` returns: the user's DataLoader, read by lanes.

# Note [What was trained]
# A resumed run goes on after the last trained batch, not after the last one handed out. A batch that was handed out
# since the last step is still to be trained on, and so are those that a script takes ahead of the one it trains on: how
# many these are is counted at each step. A batch that was handed out before, and skipped, will not be trained on any
# more. A loader of which nothing was ever trained (an evaluation now and then) goes on after what it has handed out.
"""

import inspect
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

from torch.utils.data import DataLoader

from lockstep.data.batch import GlobalBatch, Position
from lockstep.data.device import DeviceMover
from lockstep.data.fetch import Fetch, Loaded, Source
from lockstep.data.identity import made_of
from lockstep.data.inner_loader import Feed, LaneReload, disown_processes, inner_loader, process_ids, unpacked
from lockstep.data.order import Keys, SampleOrder
from lockstep.data.passes import Passes
from lockstep.data.samplers import Samplers
from lockstep.data.samples import SampleFetch, WholeFetch
from lockstep.data.stream import StreamFetch
from lockstep.data.user_loader import GROW, SPLIT, accepted, grown, growth_note, is_stream, notes
from lockstep.errors import BadArgument, Misuse
from lockstep.lanes import share

Pass = Generator[GlobalBatch, None, None]

MOST_MARKS = 64
"""How many batches a script may take ahead so that it is still known what was drawn before the first of them."""


class ShardedLoader:
    """Yields global batches, of which this worker loads the lanes that it carries, `lanes()`.

    The loader keeps its meaning: `batch_size` is that of the global batch; order, length, collating, loader
    processes and pinning are as the user set them. With `batch="grow"` it is read as one with batches `num_lanes`
    times as large, see Note [Grown batches] in user_loader.py. Order and augmentation depend on `seed`, on
    `index` (the loader's number in the run) and on the epoch, never on the number of workers or loader
    processes. `loaded` is called with the seconds that a batch was waited for. `mover` brings shares to the run's
    device; a lane has `least()` samples of a batch or none, where the batch has as many.
    """

    dataset = property(attrgetter("loader.dataset"))
    num_workers = property(attrgetter("loader.num_workers"))
    drop_last = property(attrgetter("loader.drop_last"))
    sampler = property(attrgetter("loader.sampler"))
    batch_sampler = property(attrgetter("loader.batch_sampler"))
    collate_fn = property(attrgetter("loader.collate_fn"))
    pin_memory = property(attrgetter("loader.pin_memory"))
    timeout = property(attrgetter("loader.timeout"))
    worker_init_fn = property(attrgetter("loader.worker_init_fn"))
    multiprocessing_context = property(attrgetter("loader.multiprocessing_context"))
    generator = property(attrgetter("loader.generator"))
    prefetch_factor = property(attrgetter("loader.prefetch_factor"))
    persistent_workers = property(attrgetter("loader.persistent_workers"))
    pin_memory_device = property(attrgetter("loader.pin_memory_device"))
    in_order = True
    """Whatever the user's says: see `notes` in user_loader.py."""

    def __init__(
        self,
        loader: "DataLoader[Any]",
        *,
        seed: int,
        num_lanes: int,
        lanes: Callable[[], Sequence[int]],
        index: int,
        say: Callable[[str], None],
        loaded: Callable[[float], None] = lambda waited_s: None,
        batch: str = SPLIT,
        mover: DeviceMover | None = None,
        least: Callable[[], int] = lambda: 1,
    ) -> None:
        self.loader = accepted(loader, batch)
        self._grows = batch == GROW
        self._say, self._loaded = say, loaded
        self._lanes = lanes
        self._least = least
        self._index = index
        self.waited_ns = 0
        """For how long loops have waited for batches of this loader, all together."""
        self._mover = mover or DeviceMover()
        self._feed = Feed()
        self._inner: DataLoader[Any] | None = None
        self._loading: Iterator[Any] | None = None
        self._set_keys(seed, num_lanes, None)
        self._position = Position()
        self.mid_pass = False
        """Whether a pass has begun and is not exhausted; also after seeking into the middle of one."""
        self._committed: Position | None = None
        self.evaluated: Position | None = None
        """The position after the batch that was last evaluated."""
        self.num_begun = 0
        """How often the script has begun a pass, one that yields nothing included."""
        self._num_ahead = 0
        self._sought = False
        self._num_spent = 0
        self._has_remarked = False
        self._marks: deque[tuple[Position, str]] = deque(maxlen=MOST_MARKS)
        self._pass_number = 0
        self._running: weakref.ref[Pass] | None = None
        self.made_of = made_of(loader.dataset)
        """See Note [Another data set on each worker] in identity.py."""
        for note in notes(loader):
            say(note)
        self._say_growth()

    def __len__(self) -> int:
        """The number of global batches in a pass."""
        return len(self._whole)

    @property
    def batch_size(self) -> int | None:
        """The size of a global batch; None where a batch sampler or the data set decides it."""
        return self._whole.batch_size

    @property
    def batches(self) -> tuple[str, int | None]:
        """How batches become global ones, and their size as the user set it; a place in a pass is counted in these."""
        return GROW if self._grows else SPLIT, self.loader.batch_size

    @property
    def lane_batch_size(self) -> int | None:
        """The most samples that a lane has of one global batch; with `batch="grow"` the size that the user set."""
        size, num_lanes, least = self.batch_size, self._num_lanes, self._least()
        return None if size is None else max(len(share(size, lane, num_lanes, least)) for lane in range(num_lanes))

    def __iter__(self) -> Iterator[GlobalBatch]:
        """Starts a pass: at the position of `seek`, or at the beginning of the next epoch. One runs at a time."""
        self.num_begun += 1
        if self._num_spent:
            self._num_spent -= 1
            return iter(())
        if self.mid_pass and not self._sought:
            self._position = Position(self._position.epoch + 1, 0)
        self.mid_pass, self._sought = True, False
        self._pass_number += 1
        running = self._batches(self._pass_number)
        self._running = weakref.ref(running)  # weak, so that a loop left by `break` ends its loader processes
        return running

    @property
    def running(self) -> "Pass | None":
        """The pass under way, if its iterator is still referenced."""
        return None if self._running is None else self._running()

    @property
    def position(self) -> Position:
        """Passes that have ended, exhausted or left, and batches handed out in the running one."""
        return self._position

    @property
    def num_left(self) -> int | None:
        """How many batches the running pass has not handed out yet; None where their number is not known."""
        with suppress(TypeError, NotImplementedError):
            return None if is_stream(self.loader) else max(0, len(self) - self._position.step)
        return None

    @property
    def resumes_at(self) -> Position:
        """Where a run that is resumed from now starts. See Note [What was trained]."""
        if self._committed is None or not self.mid_pass:
            return self._position
        if self._committed.epoch != self._position.epoch:
            return Position(self._position.epoch, 0)
        return Position(self._position.epoch, max(0, self._committed.step - self._num_ahead))

    def committed(self, trained: Position | None) -> None:
        """A step was committed: it was trained on the batch at `trained` of this loader, or on none of its batches."""
        if trained is not None:
            is_here = trained.epoch == self._position.epoch
            self._num_ahead = self._position.step - trained.step - 1 if is_here else 0
        if trained is not None or self._committed is not None:
            self._committed = self._position

    @property
    def is_trained_on(self) -> bool:
        return self._committed is not None

    def seek(self, position: Position, *, is_trained_on: bool = False, num_spent: int = 0) -> None:
        """The next `iter()` starts at `position`; an iterator that is still running may not go on.

        One that has yielded nothing yet starts there. `is_trained_on`: all before it was trained on, not only handed
        out. The first `num_spent` passes yield nothing.
        """
        if position.epoch < 0 or position.step < 0:
            raise BadArgument(f"a position counts epochs and steps from 0, not {position}")
        begins = self._is_about_to_begin and not num_spent
        self._pass_number += not self._is_about_to_begin
        self._position, self.mid_pass, self._sought = position, begins or position.step > 0, not begins
        self._committed, self._num_ahead = position if is_trained_on else None, 0
        self._num_spent = num_spent

    @property
    def drawn(self) -> str:
        """What the samplers drew in the pass up to this position, and in the pass before it, as digests.

        The same on every worker; empty where nothing was drawn, or `seek` was not followed by `check_drawn`.
        """
        return self._passes.drawn(self._position)

    def drawn_at(self, position: Position) -> str:
        """The same up to a position that was passed a moment ago; empty where it is not known any more."""
        return self.drawn if position == self._position else dict(self._marks).get(position, "")

    def check_drawn(self, expected: str) -> None:
        """Runs the samplers to the position of `seek`, where `drawn` was `expected`. Call it right after `seek`.

        Raises BadCheckpoint if they draw other samples than before. See Note [The same samples again] in passes.py.
        """
        self._passes.check(self._position, expected, self._index)

    def rekey(self, seed: int, num_lanes: int) -> None:
        """Passes that begin from now on are those of another seed and number of lanes: a resumed run keeps its own."""
        if not self._is_about_to_begin:
            self.close()
        num_before = self._num_lanes
        self._set_keys(seed, num_lanes, self._passes)
        if num_lanes != num_before:
            self._say_growth()

    def close(self) -> None:
        """Ends the running pass and all loader processes; a later `iter()` starts new ones."""
        self._pass_number += 1
        self._loading = self._inner = None
        self._fetch.close()

    @property
    def pids(self) -> list[int]:
        return [] if self._loading is None else process_ids(self._loading)

    def after_fork(self) -> None:
        """This process is a copy of another: that one keeps the loader processes, and new ones are started here."""
        if self._loading is not None:
            disown_processes(self._loading)
        self._loading = self._inner = None

    def _set_keys(self, seed: int, num_lanes: int, before: Passes | None) -> None:
        self._keys = Keys(seed, self._index)
        self._num_lanes = num_lanes
        self._whole = grown(self.loader, num_lanes) if self._grows else self.loader
        stream = is_stream(self.loader)
        samplers = Samplers.endless() if stream else Samplers.of(self.loader, self._whole.batch_sampler)
        source = Source(self.loader.dataset, self.loader.collate_fn, self._keys, num_lanes)
        self._fetch = fetch_for(self._whole, source)
        counts = self._fetch.counts_uses
        self._passes = Passes(samplers, self._keys, count_uses=counts, say=self._say, before=before)

    def _say_growth(self) -> None:
        if self._grows:
            self._say(growth_note(self._whole, self._num_lanes))

    @property
    def _is_about_to_begin(self) -> bool:
        """Whether the newest iterator is still referenced, and has yielded nothing."""
        running = self.running
        return running is not None and inspect.getgeneratorstate(running) == inspect.GEN_CREATED

    def _batches(self, number: int) -> Pass:
        self._check_newest(number)
        if self._num_spent:
            self._num_spent -= 1
            return
        order = self._passes.begin(self._position)
        carried: tuple[tuple[int, ...], int] | None = None
        try:
            while True:
                self._check_newest(number)
                lanes, least, began_ns = tuple(self._lanes()), self._least(), time.monotonic_ns()
                if (lanes, least) != carried or self._loading is None:
                    self._loading = None  # its loader processes end before new ones start
                    self._loading, carried = self._open(order, lanes, least), (lanes, least)
                loaded = unpacked(next(self._loading, None))
                waited_ns = time.monotonic_ns() - began_ns
                self.waited_ns += waited_ns
                if loaded is None:
                    break
                self._loaded(waited_ns / 1e9)
                if loaded.remark is not None and not self._has_remarked:
                    self._has_remarked = True
                    self._say(loaded.remark)
                drawn, draw = self.drawn, order.handed_out()
                self._marks.append((draw.position, drawn))
                self._position = Position(draw.position.epoch, draw.position.step + 1)
                reload = LaneReload(self.loader, self._fetch, draw, loaded[0], self._mover, least)
                shares = self._mover(loaded[1])
                yield GlobalBatch(loaded[0], shares, draw.position, self._index, reload, draw.digest, drawn, least)
        except GeneratorExit:
            if number == self._pass_number:
                self._end_pass()  # left by `break`: it cannot go on
            raise
        finally:
            if number == self._pass_number:
                self._loading = None
                self._fetch.close()
        self._end_pass()

    def _end_pass(self) -> None:
        self._position, self.mid_pass = Position(self._position.epoch + 1, 0), False

    def _open(self, order: SampleOrder, lanes: tuple[int, ...], least: int) -> Iterator[Loaded | None]:
        """Starts to load all that is not handed out yet."""
        if self._inner is None:
            self._inner = inner_loader(self.loader, self._fetch, self._feed, self._mover.pins)
        # torch draws a seed for its processes, which must not come out of the training loop's generator
        self._inner.generator.manual_seed(self._keys.of("processes", self._position.epoch))
        self._feed.requests = (self._fetch.request(draw, lanes, least) for draw in order.ahead())
        return iter(self._inner)

    def _check_newest(self, number: int) -> None:
        if number != self._pass_number:
            raise Misuse(
                "this pass over the loader cannot go on: another was begun after it, or the loader was put where a "
                "resumed run goes on, or the run has ended. To read the same data twice at a time, give run.shard two "
                "loaders; what is read before run.epochs needs a loader of its own too."
            )


def fetch_for(loader: "DataLoader[Any]", source: Source) -> Fetch:
    """The way of loading the batches of `loader`: a stream, samples with indices, or whole batches with indices."""
    if is_stream(loader):
        return StreamFetch(source, loader.batch_size, loader.drop_last)
    return WholeFetch(source) if loader.batch_sampler is None else SampleFetch(source)
