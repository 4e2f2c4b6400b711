"""Generators that a script has made itself: known, set for each sample where a data set holds them, else left alone."""

import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from noisy_data import passes, sharded
from torch.utils.data import DataLoader, Dataset, IterableDataset
from workers import on_workers

import lockstep
from lockstep.chance import Stream, set_cpu_generators
from lockstep.data.batch import Position
from lockstep.data.own_generators import OwnGenerator, held_by, is_own

MAKE: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "Python": lambda: random.Random(1),
    "PCG64": lambda: np.random.default_rng(1),
    "Philox": lambda: np.random.Generator(np.random.Philox(1)),
    "MT19937": lambda: np.random.Generator(np.random.MT19937(1)),
    "RandomState": lambda: np.random.RandomState(1),
}
KINDS = pytest.mark.parametrize("kind", MAKE)
IN_THE_FILE = random.Random(5)


def draw(generator: Any) -> list[float]:
    """Normal numbers: some generators make two at a time, and keep one."""
    if isinstance(generator, torch.Generator):
        return [torch.randn((), generator=generator).item() for _ in range(3)]
    return [float(generator.gauss(0, 1) if isinstance(generator, random.Random) else generator.normal()) for _ in "123"]


@KINDS
def test_one_that_is_set_draws_the_same_whatever_it_drew_before(kind: str) -> None:
    first, second = MAKE[kind](), MAKE[kind]()
    draw(second)
    drawn = []
    for generator in (first, second):
        OwnGenerator(generator).manual_seed(7)
        drawn.append(draw(generator))
    OwnGenerator(first).manual_seed(8)
    assert drawn[0] == drawn[1] != draw(first)


@KINDS
def test_one_that_is_put_back_goes_on_from_there(kind: str) -> None:
    generator = MAKE[kind]()
    draw(generator)
    state = OwnGenerator(generator).get_state()
    drawn = draw(generator)
    OwnGenerator(generator).set_state(state)
    assert draw(generator) == drawn


@KINDS
def test_a_digest_is_another_one_after_every_draw_and_the_same_without(kind: str) -> None:
    generator = MAKE[kind]()
    digests = [OwnGenerator(generator).digest() for _ in range(2)]
    for _ in range(3):
        draw(generator)
        digests.append(OwnGenerator(generator).digest())
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_those_that_the_run_sets_itself_are_no_generators_of_the_script() -> None:
    own = (torch.default_generator, random._inst, np.random.mtrand._rand)  # type: ignore[attr-defined]
    assert not any(map(is_own, own))
    assert not is_own(random.SystemRandom())


class Holder:
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    "hidden",
    [
        lambda one: Holder(one),
        lambda one: [Holder({"rng": one})],
        lambda one: partial(draw, one),
        lambda one: lambda: draw(one),
        lambda one: Holder(one).__call__,
    ],
    ids=["attribute", "table in a list", "partial", "closure", "method"],
)
def test_it_is_found_where_data_sets_keep_it(hidden: Callable[[Any], Any]) -> None:
    generator = np.random.default_rng(0)
    found = [one.generator for one in held_by(Holder(hidden(generator)))]
    assert generator in found
    assert found[-1] is IN_THE_FILE or IN_THE_FILE in found


class Proxy:
    """As lazy objects of web frameworks do."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("asked for its class")


def test_objects_that_run_code_when_they_are_asked_for_their_class_are_not_asked() -> None:
    assert IN_THE_FILE in [one.generator for one in held_by(Holder([Proxy(), np.random]))]


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, kind: str) -> None:
        self.rng = MAKE[kind]()

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([float(index), *draw(self.rng), IN_THE_FILE.random()]), torch.tensor(index % 2)


class Pairs(IterableDataset[list[float]]):
    """Draws from two generators that were made alike, and from torch's own."""

    def __init__(self) -> None:
        self.first, self.second = torch.Generator(), torch.Generator()

    def __iter__(self) -> Any:
        yield draw(self.first) + draw(self.second) + [torch.randn(()).item() for _ in "123"]

    def __getitem__(self, _: int) -> list[float]:
        return next(iter(self))


def test_generators_that_are_set_together_draw_different_numbers() -> None:
    chance, pairs = Stream(7, held_by(data := Pairs())), held_by(data)
    with chance.drawing():
        of_stream = data[0]
    for generator in pairs:
        generator.manual_seed(7)
    set_cpu_generators(7)
    assert len(set(of_stream)) == len(set(data[0])) == 9


class NoisyStream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, kind: str) -> None:
        self.samples = Noisy(kind)

    def __iter__(self) -> Any:
        return (self.samples[index] for index in range(len(self.samples)))


class Lazy(Noisy):
    """Makes its generator when it reads the first sample, and another one that few samples need."""

    rng: Any = None

    def __init__(self, kind: str) -> None:
        self.kind, self.made = kind, dict[int, Any]()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.rng is None:
            self.rng = MAKE[self.kind]()
        if index % 5 == 0 and os.getpid() not in self.made:
            self.made = {os.getpid(): random.Random(3), **self.made}
        x, y = super().__getitem__(index)
        return x + (self.made[os.getpid()].random() if index % 5 == 0 else 0.0), y


class LazyStream(NoisyStream):
    def __init__(self, kind: str) -> None:
        self.samples = Lazy(kind)


class Renewed(Noisy):
    """Has another generator for each sample."""

    num_made = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.rng = random.Random(index)
        self.num_made += 1
        return super().__getitem__(index)


def _digest(make: Callable[[str], Any], kind: str, num_processes: int) -> tuple[str, bool]:
    """After two epochs; and whether the data set's generator stands where it stood in this process."""
    with lockstep.start(lanes=6, seed=2) as run:
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        run.replicate(model, optimizer)
        dataset = make(kind)
        loader = run.shard(DataLoader(dataset, 7, num_workers=num_processes))
        for _ in run.epochs(2):
            for batch in loader:
                for x, y in run.lanes(batch):
                    torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        holder = dataset if isinstance(dataset, Noisy) else dataset.samples
        stands = isinstance(holder, Lazy) or OwnGenerator(holder.rng).digest() == OwnGenerator(MAKE[kind]()).digest()
        return run.digest(), stands


@KINDS
def test_a_data_set_that_draws_from_its_own_gives_the_same_bits_on_any_workers(kind: str) -> None:
    found = [one for workers in (1, 2, 3) for one in on_workers(workers, _digest, Noisy, kind, 0)]
    assert len({digest for digest, _ in found}) == 1
    assert all(stands for _, stands in found)


@pytest.mark.parametrize("make", [Noisy, NoisyStream], ids=["indices", "stream"])
def test_it_has_the_same_bits_in_loader_processes_as_in_the_training_process(make: Callable[[str], Any]) -> None:
    found = [on_workers(workers, _digest, make, "PCG64", processes) for workers, processes in ((1, 0), (3, 0), (2, 2))]
    assert len({digest for one in found for digest, _ in one}) == 1


LAZY = pytest.mark.parametrize("make", [Lazy, LazyStream], ids=["indices", "stream"])


@LAZY
def test_one_that_is_made_while_reading_is_set_for_the_sample_that_makes_it(make: Callable[[str], Any]) -> None:
    found = [on_workers(workers, _digest, make, "PCG64", processes) for workers, processes in ((1, 0), (3, 0), (2, 2))]
    assert len({digest for one in found for digest, _ in one}) == 1


@LAZY
def test_it_is_in_a_process_that_goes_on_in_a_later_pass_too(make: Callable[[str], Any]) -> None:
    def second_pass(from_the_first: bool) -> list[Any]:
        loader = sharded(DataLoader(make("Python"), 7), num_lanes=3)
        if from_the_first:
            passes(loader)
        loader.seek(Position(1, 2))
        return [x.tolist() for _, (x, _) in sorted(passes(loader).items())]

    assert second_pass(from_the_first=True) == second_pass(from_the_first=False)


def test_samples_that_make_another_one_each_time_are_read_again_once() -> None:
    dataset = Renewed("Python")
    passes(sharded(DataLoader(dataset, 2)), 2)
    assert dataset.num_made == 2 * 22 + 2
