"""A data set whose samples depend on those that were read before is named; others are not."""

from typing import Any

import numpy as np
import pytest
import torch
from noisy_data import sharded
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from workers import on_workers

import lockstep
from lockstep.data.repeats import bits
from lockstep.events import KEPT_BY_DATA


class Samples(Dataset[Tensor]):
    def __init__(self) -> None:
        self.x, self.read = torch.arange(24.0).view(12, 2), list[int]()
        self.begin()

    def begin(self) -> None: ...

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        return self.sample(index)

    def sample(self, index: int) -> Tensor:
        return self.x[index] + 0.1 * torch.randn(2)


class Centred(Samples):
    """A running mean."""

    def begin(self) -> None:
        self.mean = torch.zeros(2)

    def sample(self, index: int) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * self.x[index]
        return self.x[index] - self.mean


class Mixed(Samples):
    """Each sample is mixed with the one before."""

    before: Tensor | None = None

    def sample(self, index: int) -> Tensor:
        now = self.x[index]
        mixed = now if self.before is None else 0.5 * (now + self.before)
        self.before = now
        return mixed


class Warming(Samples):
    """Noise that grows with each sample."""

    def begin(self) -> None:
        self.count = 0

    def sample(self, index: int) -> Tensor:
        self.count += 1
        return self.x[index] + min(1.0, self.count / 100) * torch.randn(2)


class KeptAugmented(Samples):
    """A cache behind the augmentation."""

    def begin(self) -> None:
        self.cache = dict[int, Tensor]()

    def sample(self, index: int) -> Tensor:
        if index not in self.cache:
            self.cache[index] = super().sample(index)
        return self.cache[index]


class Kept(KeptAugmented):
    """A cache before the augmentation."""

    def sample(self, index: int) -> Tensor:
        if index not in self.cache:
            self.cache[index] = 2 * self.x[index]
        return self.cache[index] + 0.1 * torch.randn(2)


class Counted(Samples):
    def begin(self) -> None:
        self.count, self.last = 0, 0

    def sample(self, index: int) -> Tensor:
        self.count, self.last = self.count + 1, index
        if self.count > 1000:
            print(self.last)
        return super().sample(index)


class InLists(Centred):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


def said_of(dataset: Any, num_processes: int = 0) -> list[str]:
    said: list[str] = []
    loader = sharded(DataLoader(dataset, 6, num_workers=num_processes), num_lanes=2, say=said.append)
    for _ in range(2):
        for _ in loader:
            pass
    loader.close()
    return said


@pytest.mark.parametrize(
    ("make", "name"), [(Centred, "mean"), (Mixed, "before"), (Warming, "count"), (InLists, "mean")]
)
def test_one_whose_samples_depend_on_those_before_is_named_with_the_attribute(make: type[Samples], name: str) -> None:
    (text,) = said_of(make())
    assert text.startswith(f"{KEPT_BY_DATA}: {make.__name__}[0] was another sample when it was read again")
    assert f"`{name}` of {make.__name__}, which reading changes" in text


def test_it_is_named_inside_of_another_one_and_from_a_loading_process() -> None:
    (text,) = said_of(Subset(Centred(), range(12)), num_processes=1)
    assert "`mean` of Centred" in text


def test_one_that_keeps_augmented_samples_is_named() -> None:
    (text,) = said_of(KeptAugmented())
    assert "KeptAugmented[0] had drawn random numbers, and was the same when it was read again from others" in text
    assert "`cache` of KeptAugmented" in text


@pytest.mark.parametrize("make", [Kept, Counted])
def test_one_that_gives_the_same_samples_again_is_not(make: type[Samples]) -> None:
    assert said_of(make()) == []


def test_where_nothing_changes_that_is_read_back_each_sample_is_read_once() -> None:
    dataset = Samples()
    assert said_of(dataset) == []
    assert dataset.read == [*range(12), *range(12)]


def _noted(num_workers: int) -> list[str]:
    said: list[str] = []
    with lockstep.start(lanes=4, seed=0) as run:
        run._events.subscribe(lambda event: said.append(event.text), lockstep.events.Note)
        model = torch.nn.Linear(2, 1)
        run.replicate(model, torch.optim.SGD(model.parameters(), 0.01))
        for batch in run.shard(DataLoader(Mixed(), 6)):
            for x in run.lanes(batch):
                model(x).mean().backward()
    return said


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_run_notes_it_once(num_workers: int) -> None:
    (text,) = on_workers(num_workers, _noted, num_workers)[0]
    assert text.startswith(KEPT_BY_DATA)


def test_what_is_compared_of_a_sample_are_bits_that_mean_something() -> None:
    def sample() -> list[Any]:
        return [1, 1.5, "a", torch.ones(2), {"x": torch.tensor(True)}, np.ones(2), np.array(object())]

    assert bits(sample()) == bits(sample())
    assert bits(sample()) != bits([2, *sample()[1:]])
    assert bits(torch.tensor([0.0])) != bits(torch.tensor([-0.0]))
    assert bits(torch.eye(2).to_sparse()) == []
