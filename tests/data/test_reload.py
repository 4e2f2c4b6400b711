"""Lanes that move within a step: their data of a batch that was already handed out, as any worker would have it."""

import multiprocessing
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from noisy_data import Noisy, NoisyInLists, NoisyStream, assert_same_bits, noise, passes, sharded, told_apart
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler, get_worker_info

from lockstep.data import GlobalBatch, Position
from lockstep.errors import BadArgument, Misuse

Make = Callable[[], "DataLoader[Any]"]
LANES = st.lists(st.integers(0, 3), unique=True)


def noisy_collate(samples: Any) -> torch.Tensor:
    rows = samples if isinstance(samples, torch.Tensor) else torch.stack(samples)
    return rows + torch.rand(()) + random.random() + numpy.random.rand()


class NoisyBatches(Dataset[torch.Tensor]):
    """Each item is a whole global batch, of another size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.stack([noise(index) for _ in range(1 + index * 5 % 7)])


class NoisyStreamOfBatches(IterableDataset[torch.Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(map(NoisyBatches(self.size).__getitem__, range(self.size)))


class OwnIterator(IterableDataset[torch.Tensor]):
    """Keeps its place in itself, as many streams do."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.place = 0
        return self

    def __next__(self) -> torch.Tensor:
        if self.place == self.size:
            raise StopIteration
        self.place += 1
        return noise(self.place - 1)


KINDS: dict[str, Callable[[int, int, dict[str, Any]], "DataLoader[Any]"]] = {
    "samples": lambda size, batch, more: DataLoader(Noisy(size), batch, shuffle=True, **more),
    "lists of samples": lambda size, batch, more: DataLoader(NoisyInLists(size), batch, shuffle=True, **more),
    "samples that come again": lambda size, batch, more: DataLoader(
        Noisy(size), batch, sampler=WeightedRandomSampler([1.0] * size, size), **more
    ),
    "samples that draw nothing": lambda size, batch, more: DataLoader(
        TensorDataset(torch.arange(size)), batch, shuffle=True, **more
    ),
    "whole batches": lambda size, batch, more: DataLoader(NoisyBatches(size), None, shuffle=True, **more),
    "stream": lambda size, batch, more: DataLoader(NoisyStream(size), batch, **more),
    "stream that is its own iterator": lambda size, batch, more: DataLoader(OwnIterator(size), batch, **more),
    "stream of whole batches": lambda size, batch, more: DataLoader(NoisyStreamOfBatches(size), None, **more),
}


def made(kind: str, size: int = 11, batch_size: int = 4, collating: bool = False, processes: int = 0) -> Make:
    more: dict[str, Any] = {"num_workers": processes}
    if collating and kind != "samples that draw nothing":
        more["collate_fn"] = noisy_collate
    return lambda: KINDS[kind](size, batch_size, more)


def ignore(text: str) -> None:
    """For tests that are not about what is said."""


def moved_in_every_step(make: Make, first: Sequence[int], then: Sequence[int], num_lanes: int = 4) -> list[GlobalBatch]:
    """What a worker holds that carries lanes `first` and in the middle of every step is given `then` instead."""
    loader = sharded(make(), lanes=first, num_lanes=num_lanes, say=ignore)
    batches = [batch.for_lanes(then) for _ in range(2) for batch in loader]
    loader.close()
    return batches


def told(batches: list[GlobalBatch]) -> Any:
    """The shares by place, each a tensor."""
    lanes = told_apart(batches)
    return {place: data[0] if isinstance(data, list) else data for place, data in lanes.items()}


def held_from_the_start(make: Make, lanes: Sequence[int], num_lanes: int = 4) -> Any:
    loader = sharded(make(), lanes=lanes, num_lanes=num_lanes, say=ignore)
    batches = [batch for _ in range(2) for batch in loader]
    loader.close()
    return told(batches)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(
    size=st.integers(1, 20),
    batch_size=st.integers(1, 9),
    num_lanes=st.integers(1, 6),
    collating=st.booleans(),
    data=st.data(),
)
def test_lanes_that_move_within_a_step_get_what_they_would_have_had_from_the_start(
    kind: str, size: int, batch_size: int, num_lanes: int, collating: bool, data: st.DataObject
) -> None:
    lanes = st.lists(st.integers(0, num_lanes - 1), unique=True)
    first, then = data.draw(lanes, "first"), data.draw(lanes, "then")
    make = made(kind, size, batch_size, collating)
    moved = moved_in_every_step(make, first, then, num_lanes)
    assert_same_bits(told(moved), held_from_the_start(make, then, num_lanes))


@pytest.mark.parametrize("kind", KINDS)
def test_loader_processes_that_read_ahead_do_not_change_what_is_loaded_again(kind: str) -> None:
    make = made(kind, collating=True, processes=2)
    moved = moved_in_every_step(make, first=[0, 2], then=[1, 2, 3])
    assert_same_bits(told(moved), held_from_the_start(made(kind, collating=True), [1, 2, 3]))


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_pass_goes_on_as_if_no_lane_had_moved(kind: str, processes: int) -> None:
    loader = sharded(made(kind, processes=processes)(), lanes=[0, 1], say=ignore)
    batches = []
    for batch in loader:
        batch.for_lanes(range(4))
        batches.append(batch)
    loader.close()
    undisturbed = sharded(made(kind)(), lanes=[0, 1])
    assert_same_bits(told(batches), told(list(undisturbed)))


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_can_move_after_the_loader_went_on(kind: str) -> None:
    loader = sharded(made(kind)(), lanes=[0])
    running = iter(loader)
    old = next(running)
    moved = [next(running).for_lanes([1, 2, 3]), old.for_lanes([1, 2, 3])]
    moved += [batch.for_lanes([1, 2, 3]) for batch in running]
    expected = held_from_the_start(made(kind), [1, 2, 3])
    assert_same_bits(told(moved), {key: expected[key] for key in expected if key[0] == 0})


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_can_move_after_the_loader_was_given_other_keys(kind: str) -> None:
    loader = sharded(made(kind)(), lanes=[0])
    batch = next(iter(loader))
    loader.rekey(seed=9, num_lanes=2)
    expected = held_from_the_start(made(kind), [1, 2, 3])
    assert_same_bits(told([batch.for_lanes([1, 2, 3])]), {key: expected[key] for key in expected if key[:2] == (0, 0)})


@pytest.mark.parametrize("kind", KINDS)
def test_loading_again_leaves_the_training_loops_generators_untouched(kind: str) -> None:
    generator = torch.Generator()
    loader = sharded(KINDS[kind](11, 4, {"collate_fn": noisy_collate_any, "generator": generator}), lanes=[0])
    batch = next(iter(loader))
    before = torch.get_rng_state(), random.getstate(), repr(numpy.random.get_state()), generator.get_state()
    batch.for_lanes(range(4))
    after = torch.get_rng_state(), random.getstate(), repr(numpy.random.get_state()), generator.get_state()
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[3], after[3])
    assert before[1:3] == after[1:3]


def noisy_collate_any(samples: Any) -> Any:
    torch.rand(()), random.random(), numpy.random.rand()
    return samples


def test_shares_that_are_here_are_not_read_again() -> None:
    dataset = Noisy(8)
    batch = next(iter(sharded(DataLoader(dataset, 8), lanes=[0, 1])))
    moved = batch.for_lanes([1, 2])
    assert dataset.read == [0, 1, 2, 3, 4, 5]
    assert moved.shares[1] is batch.shares[1]


@pytest.mark.parametrize("batch_size", [2, None])
def test_nothing_is_read_for_lanes_that_are_empty(batch_size: int | None) -> None:
    dataset: Any = Noisy(2) if batch_size else NoisyBatches(1)
    batch = next(iter(sharded(DataLoader(dataset, batch_size), lanes=[1, 3])))
    num_read = len(dataset.read)
    assert list(batch.for_lanes([0, 2]).shares) == []
    assert len(dataset.read) == num_read


def test_it_stays_the_same_batch() -> None:
    batch = list(sharded(DataLoader(Noisy(7), 4), index=3, lanes=[0]))[1]
    moved = batch.for_lanes([1, 2])
    assert (moved.num_samples, moved.position, moved.loader) == (3, Position(0, 1), 3)


def test_the_batch_that_was_handed_out_keeps_its_own_lanes() -> None:
    batch = next(iter(sharded(DataLoader(Noisy(8), 8), lanes=[0, 1])))
    batch.for_lanes([2, 3])
    assert sorted(batch.shares) == [0, 1]


@given(size=st.integers(0, 20), num_lanes=st.integers(1, 6), moves=st.lists(LANES, min_size=1, max_size=3))
def test_lanes_of_a_whole_batch_move_as_often_as_wanted(size: int, num_lanes: int, moves: list[list[int]]) -> None:
    whole = {"x": torch.arange(size), "name": [f"sample {i}" for i in range(size)]}
    batch = GlobalBatch.cut(whole, num_lanes, [0])
    for lanes in moves:
        held = [lane for lane in lanes if lane < num_lanes]
        batch = batch.for_lanes(held)
        fresh = GlobalBatch.cut(whole, num_lanes, held)
        assert str(dict(batch.shares)) == str(dict(fresh.shares))


def test_a_batch_that_knows_no_source_says_which_lanes_it_lacks() -> None:
    with pytest.raises(Misuse, match="lanes 1, 2 of this global batch are not here"):
        GlobalBatch(4, {0: "a"}).for_lanes([0, 1, 2])


def test_a_batch_that_knows_no_source_can_still_give_up_lanes() -> None:
    assert dict(GlobalBatch(4, {0: "a", 1: "b"}).for_lanes([1]).shares) == {1: "b"}


def test_a_stream_that_does_not_repeat_itself_is_named() -> None:
    class Once(IterableDataset[int]):
        """Gives what is left of one reading, whoever asks."""

        left = iter(range(6))

        def __iter__(self) -> Iterator[int]:
            return self.left

    batch = next(iter(sharded(DataLoader(Once(), 4), lanes=[0])))
    with pytest.raises(BadArgument, match=r"batch 0 of epoch 0 held 4 samples and holds 2 .* data set Once"):
        batch.for_lanes([1])


@pytest.mark.parametrize(("processes", "held_meanwhile"), [(0, 1), (1, 0)])
def test_a_stream_read_again_holds_open_only_what_is_read_on_here(processes: int, held_meanwhile: int) -> None:
    opened: list[int] = []

    class Holding(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            opened.append(1)
            try:
                yield from count()
            finally:
                opened.pop()

    loader = sharded(DataLoader(Holding(), 4, num_workers=processes), lanes=[0])
    for batch in loader:
        batch.for_lanes([1])
        assert len(opened) == held_meanwhile
        break
    assert opened == []


class Configured(Dataset[int]):
    """Gives what its loader process was set up with."""

    offset = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index + self.offset


def set_up(worker_id: int) -> None:
    info: Any = get_worker_info()
    info.dataset.offset = 100


def test_a_data_set_that_is_set_up_in_loader_processes_is_read_again_in_one() -> None:
    loader = sharded(DataLoader(Configured(), 8, num_workers=2, worker_init_fn=set_up), lanes=[0])
    running = iter(loader)
    batch = next(running).for_lanes([3])
    loader.close()
    assert batch.shares[3].tolist() == [106, 107]


def test_no_loader_process_is_started_where_none_is_set_up() -> None:
    class Telling(Noisy):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor(int(multiprocessing.parent_process() is not None))

    loader = sharded(DataLoader(Telling(8), 8, num_workers=1), lanes=[0])
    batch = next(iter(loader)).for_lanes([0, 3])
    loader.close()
    assert {lane: data.tolist() for lane, data in batch.shares.items()} == {0: [1, 1], 3: [0, 0]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_admitted_in_the_middle_of_a_pass_reads_on_where_the_others_stand(kind: str) -> None:
    member = sharded(made(kind)(), lanes=[0, 1])
    running = iter(member)
    next(running)
    joiner = sharded(made(kind)(), lanes=[2, 3])
    joiner.seek(member.position)
    theirs = told([batch.for_lanes([0, 1, 2]) for batch in joiner])
    assert_same_bits(theirs, told([batch.for_lanes([0, 1, 2]) for batch in running]))


def test_one_pass_of_samples_is_read_whole_when_all_lanes_move_to_one_worker() -> None:
    moved = moved_in_every_step(made("samples"), first=[], then=range(4))
    whole = passes(sharded(made("samples")()), 2)
    assert_same_bits(told(moved), whole)
