"""Data sets whose samples are random numbers, and many workers simulated by many loaders in one process."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lockstep.data import GlobalBatch, ShardedLoader
from lockstep.lanes import Assignment


def noise(index: int) -> torch.Tensor:
    """The index, and a number from each of the three generators that an augmentation may use."""
    return torch.tensor(
        [float(index), torch.rand(()).item(), random.random(), numpy.random.rand()], dtype=torch.float64
    )


class Noisy(Dataset[torch.Tensor]):
    """Augments every sample at random and writes down which samples were read in this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(int(index))
        return noise(index)


class NoisyInLists(Noisy):
    """Reads a list of samples at once."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class NoisyStream(IterableDataset[torch.Tensor]):
    """Gives every sample once, in order, split between loader processes as torch's manual shows."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info is not None else (0, 1)
        for index in range(first, self.size, stride):
            yield noise(index)


def nothing_to_say(text: str) -> None:
    raise AssertionError(f"said: {text}")


def sharded(
    loader: Any,
    *,
    num_lanes: int = 4,
    lanes: Sequence[int] | Callable[[], Sequence[int]] | None = None,
    seed: int = 0,
    index: int = 0,
    say: Callable[[str], None] = nothing_to_say,
    batch: Any = "split",
) -> ShardedLoader:
    """The loader as the only worker has it, unless told which lanes it carries."""
    carried = range(num_lanes) if lanes is None else lanes
    give = carried if callable(carried) else lambda: carried
    return ShardedLoader(loader, seed=seed, num_lanes=num_lanes, lanes=give, index=index, say=say, batch=batch)


Lanes = dict[tuple[int, int, int], Any]
"""What each lane got, by epoch, step and lane."""


def told_apart(batches: list[GlobalBatch]) -> Lanes:
    return {
        (batch.position.epoch, batch.position.step, lane): data
        for batch in batches
        if batch.position is not None
        for lane, data in batch.shares.items()
    }


def passes(loader: ShardedLoader, num_passes: int = 1) -> Lanes:
    """All shares of some passes; the loader's processes have ended."""
    batches = [batch for _ in range(num_passes) for batch in loader]
    loader.close()
    return told_apart(batches)


def over_workers(make: Callable[[], "DataLoader[Any]"], num_workers: int, num_passes: int = 1, **told: Any) -> Lanes:
    """The union of what the workers get, each with a loader of its own. No lane comes from two of them.

    The workers' own generators stand anywhere, so whatever draws from them is told apart.
    """
    union: Lanes = {}
    for lanes in Assignment.even(told.get("num_lanes", 4), num_workers).lanes_of:
        torch.seed(), random.seed(), numpy.random.seed()
        theirs = passes(sharded(make(), lanes=lanes, **told), num_passes)
        assert not union.keys() & theirs.keys()
        union |= theirs
    return union


def assert_same_bits(ours: Lanes, theirs: Lanes) -> None:
    assert ours.keys() == theirs.keys()
    for place, data in ours.items():
        assert torch.equal(data, theirs[place]), place


def indices_of(lanes: Lanes) -> list[int]:
    """The index of every sample of noise, in the order of epochs, steps and lanes."""
    return [int(index) for place in sorted(lanes) for index in lanes[place][:, 0]]
