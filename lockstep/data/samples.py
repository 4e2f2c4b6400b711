"""Loading from a data set with indices: sample by sample and lane by lane, or items that are whole global batches.

# Note [Chance of a sample]
# Before a sample is read the CPU's generators are set from the epoch and the sample's index, and so are those that the
# data set holds (own_generators.py): its augmentation is the same on every worker and whatever was read before. A
# sampler may give an index again in the same pass (drawing with replacement, repeated augmentation, an endless pass).
# The number of earlier uses is then part of the key: otherwise the sample would look the same each time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lockstep.data.batch import Position
from lockstep.data.fetch import Fetch, LaneRequest, Loaded, Source
from lockstep.data.order import Draw, name_of
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
        return request.num_samples, {picks.lane: self._lane(picks, request.position) for picks in request.picks}

    def _lane(self, picks: Picks, position: Position) -> Any:
        samples = self._samples(picks, position.epoch)
        return self.source.collate(samples, position.epoch, position.step, picks.lane)

    def _samples(self, picks: Picks, epoch: int) -> Any:
        """The lane's samples. See Note [Chance of a sample]."""
        dataset = self.source.dataset
        if self._reads_lists:
            self._seed(epoch, picks.indices, picks.uses)
            return dataset.__getitems__(list(picks.indices))
        samples = []
        for place, index in enumerate(picks.indices):
            self._seed(epoch, (index,), picks.uses[place : place + 1])
            samples.append(dataset[index])
        return samples

    def _seed(self, epoch: int, indices: Sequence[Any], uses: Sequence[int]) -> None:
        if self.counts_uses:
            self.source.set_generators(self.source.keys.of("augment", epoch, *sample_names(indices, uses)))


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
