"""Loading from a data set with indices: sample by sample and lane by lane, or items that are whole global batches.

# Note [Chance of a sample]
# Before a sample is read the CPU's generators are set from the epoch and the sample's index, and so are those that the
# data set holds (own_generators.py): its augmentation is the same on every worker and whatever was read before. A
# sampler may give an index again in the same pass (drawing with replacement, repeated augmentation, an endless pass).
# The number of earlier uses is then part of the key: otherwise the sample would look the same each time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lockstep.chance import Generators
from lockstep.data.batch import Position
from lockstep.data.contents import contents
from lockstep.data.fetch import Fetch, LaneRequest, Loaded, Source
from lockstep.data.order import Draw, name_of
from lockstep.data.repeats import Repeats
from lockstep.lanes import share


@dataclass(frozen=True)
class Picks:
    """The samples that one lane takes, with their earlier uses (see `Draw`)."""

    lane: int
    indices: tuple[Any, ...]
    uses: tuple[int, ...]


@dataclass(frozen=True)
class SampleRequest:
    position: Position
    num_samples: int
    picks: tuple[Picks, ...]


class SampleFetch(Fetch):
    """Reads the samples of the requested lanes and no other, and collates them lane by lane."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.counts_uses = not draws_nothing(source.dataset)
        self.draws = self.reads_own = self.counts_uses or source.collate_draws
        self._reads_lists = reads_lists(source.dataset)
        self._repeats = Repeats(source.dataset)

    def request(self, draw: Draw, lanes: Sequence[int], least: int = 1) -> SampleRequest:
        total = len(draw.indices)
        shares = [(lane, share(total, lane, self.source.num_lanes, least)) for lane in lanes]
        picks = (
            Picks(lane, draw.indices[part.start : part.stop], draw.uses[part.start : part.stop])
            for lane, part in shares
            if part
        )
        return SampleRequest(draw.position, total, tuple(picks))

    def load(self, request: SampleRequest) -> Loaded:
        self._repeats.begin_load()
        return Loaded(request.num_samples, {one.lane: self._lane(one, request.position) for one in request.picks})

    def _load_with_all(self, request: SampleRequest) -> Loaded | None:
        if not (self.counts_uses and request.picks):
            return super()._load_with_all(request)
        self._repeats.begin()
        loaded = super()._load_with_all(request)
        first, epoch = next(self._reads(request.picks[0])), request.position.epoch
        remark = self._repeats.remark(name_of(first.indices[0]), partial(self._read, first, epoch))
        return loaded if loaded is None or remark is None else loaded._replace(remark=remark)

    def _lane(self, picks: Picks, position: Position) -> Any:
        samples = self._samples(picks, position.epoch)
        return self.source.collate(samples, position.epoch, position.step, picks.lane)

    def _samples(self, picks: Picks, epoch: int) -> Any:
        """The lane's samples. See Note [Chance of a sample]."""
        samples = []
        for part in self._reads(picks):
            if self._repeats.awaits:
                sample, drew = self._read(part, epoch)
                self._repeats.saw(sample, drew)
            else:
                self._seed(epoch, part)
                sample = self._get(part)
            samples.append(sample)
        return samples[0] if self._reads_lists else samples

    def _reads(self, picks: Picks) -> Iterator[Picks]:
        """What is read at once: one sample, or all, where the data set reads lists."""
        if self._reads_lists:
            yield picks
            return
        for place, index in enumerate(picks.indices):
            yield Picks(picks.lane, (index,), picks.uses[place : place + 1])

    def _read(self, picks: Picks, epoch: int, *others: str) -> tuple[Any, bool]:
        """What is read at once, and whether random numbers were drawn for it: with `others`, not those of its place."""
        self._seed(epoch, picks, *others)
        before = self._chance()
        sample = self._get(picks)
        return sample, self._chance() != before

    def _get(self, picks: Picks) -> Any:
        dataset = self.source.dataset
        return dataset.__getitems__(list(picks.indices)) if self._reads_lists else dataset[picks.indices[0]]

    def _seed(self, epoch: int, picks: Picks, *others: str) -> None:
        if self.counts_uses:
            names = sample_names(picks.indices, picks.uses)
            self.source.set_generators(self.source.keys.of("augment", epoch, *names, *others))

    def _chance(self) -> list[str]:
        """Where the generators stand."""
        now = Generators.on_cpu()
        return [
            contents([now.torch_cpu, repr(now.python), now.numpy]),
            *(one.digest() for one in self.source.own),
        ]


class WholeFetch(Fetch):
    """For `batch_size=None`: reads one item for each global batch and keeps the shares of the requested lanes."""

    counts_uses = True

    def load(self, request: LaneRequest) -> Loaded:
        draw, source = request.draw, self.source
        names = sample_names(draw.indices, draw.uses)
        source.set_generators(source.keys.of("augment", draw.position.epoch, *names))
        return source.shares_of_whole(source.dataset[draw.indices[0]], draw.position, request.lanes, request.least)


def sample_names(indices: Sequence[Any], uses: Sequence[int]) -> list[int | str]:
    """The samples as parts of a key: the index, and the number of earlier uses where there are any."""
    names = [name_of(index) for index in indices]
    return [f"{name}*{used}" if used else name for name, used in zip(names, uses, strict=True)] if uses else names


def draws_nothing(dataset: Any) -> bool:
    """Whether reading a sample draws no random number, by construction: seeding costs 10 us a sample."""
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(draws_nothing, dataset.datasets))
    return type(dataset) is TensorDataset


def reads_lists(dataset: Any) -> bool:
    """Whether the data set itself reads many samples at once; a Subset does where its data set does."""
    if type(dataset) is Subset:
        return reads_lists(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))
