"""Loading one global batch at a time: the interface, and what all ways of loading share.

# Note [One request, one global batch]
# Inside, torch's DataLoader runs over a data set of ours whose "index" is a request: which global batch, and
# what the lanes carried here take of it. Its "sample" is the loaded shares. So reading ahead, loader
# processes, pinning and time limits are torch's own; and as a request names its epoch and its lanes, loader
# processes may outlive a pass and an assignment.

# Note [Made while reading]
# A data set may make its generator when it reads a first sample (`if self.rng is None: self.rng = default_rng(0)`), as
# that of a loader process often does. The samples before it was there were read without it being set, so what was
# requested is loaded again. Where a generator is another one each time, loading again does not help, and what it draws
# is the script's choice.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import Dataset, default_collate, default_convert, get_worker_info

from lockstep.chance import keeping_cpu_generators, set_cpu_generators
from lockstep.data.batch import Position, cut_shares
from lockstep.data.order import Draw, Keys
from lockstep.data.own_generators import OwnGenerator, held_by, untouched
from lockstep.data.structure import num_samples


class Loaded(NamedTuple):
    """The number of samples in the whole global batch, and the data of each requested lane.

    `remark` is what a user should know of how they were read.
    """

    num_samples: int
    shares: dict[int, Any]
    remark: str | None = None


@dataclass(frozen=True)
class Source:
    """The user's data set, the way its samples are put together, and the keys for both."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    keys: Keys
    num_lanes: int
    own: list[OwnGenerator] = field(default_factory=list)
    """Those that the data set and the collate function hold now. See Note [Generators of the script's own]."""

    def look_for_generators(self) -> set[str]:
        """Returns the places of those that are new."""
        before, self.own[:] = list(self.own), held_by(self.dataset, self.collate_fn)
        known = {id(one.generator) for one in before}
        return {one.place for one in self.own if id(one.generator) not in known}

    def set_generators(self, key: int) -> None:
        """Sets all from which reading a sample, or putting samples together, may draw."""
        set_cpu_generators(key)
        for generator in self.own:
            generator.manual_seed(key)

    @property
    def collate_draws(self) -> bool:
        """Whether putting samples together may draw random numbers: torch's own functions do not."""
        return self.collate_fn is not default_collate and self.collate_fn is not default_convert

    def collate(self, data: Any, *place: int) -> Any:
        """Calls the user's collate function, with random numbers tied to `place`."""
        if self.collate_draws:
            self.set_generators(self.keys.of("collate", *place))
        return self.collate_fn(data)

    def shares_of_whole(self, item: Any, position: Position, lanes: Sequence[int], least: int) -> Loaded:
        """An item that is a whole global batch, converted by the user's collate function and cut."""
        batch = self.collate(item, position.epoch, position.step)
        total = num_samples(batch)
        return Loaded(total, cut_shares(batch, total, self.num_lanes, lanes, least))


@dataclass(frozen=True)
class LaneRequest:
    """A global batch, and the lanes to load of it; a lane has `least` samples, if there are as many."""

    draw: Draw
    lanes: tuple[int, ...]
    least: int


class Fetch(Dataset[Any], ABC):
    """A data set of loaded batches. See Note [One request, one global batch]."""

    counts_uses = False
    """Whether `load` needs how often an index was drawn before in the pass."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.draws = self.reads_own = True
        """Whether `load` may draw random numbers, or set generators; and whether reading may draw from the script's."""
        self._renewed: set[str] = set()
        """Where reading puts another generator each time."""

    def request(self, draw: Draw, lanes: Sequence[int], least: int = 1) -> Any:
        """What `load` needs for this draw: small, immutable, the same for equal arguments."""
        return LaneRequest(draw, tuple(lanes), least)

    @abstractmethod
    def load(self, request: Any) -> Loaded | None:
        """The requested shares; None where the data have ended. May leave the CPU's generators anywhere."""

    def close(self) -> None:
        """Closes what an unfinished pass holds open in this process."""

    def __getitem__(self, request: Any) -> Loaded | None:
        if self.reads_own:
            self.source.look_for_generators()
        with self._outside_untouched():
            try:
                return self._load_with_all(request)
            except StopIteration as stop:  # torch would take it for the end of the data, on this worker alone
                raise RuntimeError("the data set or its collate function raised StopIteration") from stop

    def _load_with_all(self, request: Any) -> Loaded | None:
        """What is loaded. See Note [Made while reading]."""
        loaded, before = self.load(request), set[str]()
        while self.reads_own:
            new = self.source.look_for_generators()
            self._renewed |= new & before
            before = new - self._renewed
            if not before:
                break
            loaded = self.load(request)
        return loaded

    @contextmanager
    def _outside_untouched(self) -> Iterator[None]:
        in_training_process = get_worker_info() is None
        if not (self.draws and in_training_process):
            yield
            return
        with keeping_cpu_generators(), untouched(list(self.source.own)):
            yield
