"""batch="grow": every lane has as many samples as the loader's batch, and the order of the epoch stays."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from noisy_data import (
    Lanes,
    Noisy,
    NoisyInLists,
    NoisyStream,
    assert_same_bits,
    indices_of,
    over_workers,
    passes,
    sharded,
    told_apart,
)
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, WeightedRandomSampler

from lockstep.data import Position, ShardedLoader


def ignore(text: str) -> None:
    """For tests that are not about what is said."""


def grown(loader: Any, **told: Any) -> ShardedLoader:
    return sharded(loader, batch="grow", **{"say": ignore, **told})


def grown_over_workers(make: Callable[[], "DataLoader[Any]"], num_workers: int, num_passes: int = 1) -> Lanes:
    return over_workers(make, num_workers, num_passes, batch="grow", say=ignore)


def noisy_collate(samples: Any) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(()) + random.random() + numpy.random.rand()


class Lengthy(NoisyStream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return self.size


class OneByOne(Sampler[int]):
    """Draws each index when it is asked for it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.size))
        while left:
            yield left.pop(random.randrange(len(left)))


KINDS: dict[str, Callable[..., "DataLoader[Any]"]] = {
    "in order": lambda size, batch, **more: DataLoader(Noisy(size), batch, **more),
    "shuffled": lambda size, batch, **more: DataLoader(Noisy(size), batch, shuffle=True, **more),
    "shuffled by a generator": lambda size, batch, **more: DataLoader(
        Noisy(size), batch, shuffle=True, generator=torch.Generator(), **more
    ),
    "shuffled one by one": lambda size, batch, **more: DataLoader(Noisy(size), batch, sampler=OneByOne(size), **more),
    "samples that come again": lambda size, batch, **more: DataLoader(
        Noisy(size), batch, sampler=WeightedRandomSampler([1.0] * size, size), **more
    ),
    "stream": lambda size, batch, **more: DataLoader(NoisyStream(size), batch, **more),
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
DROPPING_OR_NOT = pytest.mark.parametrize("drop_last", [False, True])


@pytest.mark.parametrize("kind", [*KINDS, "lists of samples"])
@settings(max_examples=15, deadline=None)
@given(size=st.integers(1, 40), batch_size=st.integers(1, 5), num_lanes=st.integers(1, 5), drop_last=st.booleans())
def test_growing_is_a_loader_with_batches_that_much_larger_bit_for_bit(
    kind: str, size: int, batch_size: int, num_lanes: int, drop_last: bool
) -> None:
    def make(batch_size: int) -> "DataLoader[Any]":
        if kind == "lists of samples":
            return DataLoader(NoisyInLists(size), batch_size, shuffle=True, drop_last=drop_last)
        return KINDS[kind](size, batch_size, drop_last=drop_last, collate_fn=noisy_collate)

    larger = passes(sharded(make(batch_size * num_lanes), num_lanes=num_lanes), 2)
    assert_same_bits(passes(grown(make(batch_size), num_lanes=num_lanes), 2), larger)


@EACH_KIND
@DROPPING_OR_NOT
@pytest.mark.parametrize("num_workers", [2, 3])
def test_grown_batches_are_the_same_bits_on_any_number_of_workers(kind: str, drop_last: bool, num_workers: int) -> None:
    def make() -> "DataLoader[Any]":
        return KINDS[kind](43, 3, drop_last=drop_last)

    assert_same_bits(grown_over_workers(make, num_workers, 2), grown_over_workers(make, 1, 2))


@pytest.mark.parametrize("kind", ["shuffled", "stream"])
def test_loading_processes_change_no_bit_of_grown_batches(kind: str) -> None:
    alone = grown_over_workers(lambda: KINDS[kind](43, 3), 1, 2)
    assert_same_bits(grown_over_workers(lambda: KINDS[kind](43, 3, num_workers=2), 2, 2), alone)


@EACH_KIND
def test_order_and_augmentation_of_an_epoch_are_those_of_split_batches(kind: str) -> None:
    def rows(lanes: Lanes) -> torch.Tensor:
        return torch.cat([lanes[place] for place in sorted(lanes)])

    split, grow = sharded(KINDS[kind](43, 3)), grown(KINDS[kind](43, 3))
    assert torch.equal(rows(passes(grow, 2)), rows(passes(split, 2)))


@DROPPING_OR_NOT
def test_global_batches_are_those_of_a_plain_loader_with_the_batch_size_of_all_lanes(drop_last: bool) -> None:
    plain = DataLoader(torch.arange(43), 3 * 4, drop_last=drop_last)  # type: ignore[arg-type]
    batches = list(grown(DataLoader(Noisy(43), 3, drop_last=drop_last)))
    assert [indices_of(told_apart([batch])) for batch in batches] == [batch.tolist() for batch in plain]


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 40), batch_size=st.integers(1, 5), num_workers=st.integers(1, 5))
def test_every_sample_of_an_epoch_is_read_exactly_once(size: int, batch_size: int, num_workers: int) -> None:
    dataset = Noisy(size)
    grown_over_workers(lambda: DataLoader(dataset, batch_size, shuffle=True), num_workers)
    assert sorted(dataset.read) == list(range(size))


def test_every_lane_has_the_loaders_batch_size_in_a_full_batch() -> None:
    full, _ = grown(DataLoader(Noisy(23), 5))
    assert [len(full.shares[lane]) for lane in range(4)] == [5, 5, 5, 5]


def test_a_short_last_batch_is_spread_over_all_lanes() -> None:
    _, short = grown(DataLoader(Noisy(26), 5))
    assert [len(short.shares[lane]) for lane in range(4)] == [1, 2, 1, 2]


@DROPPING_OR_NOT
@pytest.mark.parametrize("dataset", [Noisy(43), Lengthy(43)], ids=["with indices", "stream"])
def test_its_length_is_the_number_of_global_batches(dataset: Any, drop_last: bool) -> None:
    loader = grown(DataLoader(dataset, 3, drop_last=drop_last))
    assert len(loader) == len(list(loader)) == (3 if drop_last else 4)


def test_a_stream_without_length_has_none_when_grown() -> None:
    with pytest.raises(TypeError):
        len(grown(DataLoader(NoisyStream(4))))


def test_the_batch_size_is_the_global_one_and_that_of_a_lane_is_the_users() -> None:
    loader = grown(DataLoader(Noisy(43), 3))
    assert (loader.batch_size, loader.lane_batch_size) == (12, 3)


def test_without_growing_the_batch_size_is_the_users_and_a_lane_has_its_part_of_it() -> None:
    loader = sharded(DataLoader(Noisy(43), 10))
    assert (loader.batch_size, loader.lane_batch_size) == (10, 3)


# -- positions ------------------------------------------------------------------------------------------------


@EACH_KIND
@pytest.mark.parametrize("where", [Position(0, 2), Position(1, 3)], ids=str)
def test_a_grown_pass_started_in_the_middle_gives_what_was_left_of_it(kind: str, where: Position) -> None:
    loader = grown(KINDS[kind](43, 3))
    loader.seek(where)
    whole = passes(grown(KINDS[kind](43, 3)), 2)
    left = {place: whole[place] for place in whole if (where.epoch, where.step) <= place < (where.epoch + 1,)}
    assert_same_bits(passes(loader), left)
    assert loader.position == Position(where.epoch + 1, 0)


def test_the_position_counts_grown_batches() -> None:
    loader = grown(DataLoader(Noisy(43), 3))
    running = iter(loader)
    next(running), next(running)
    assert loader.position == Position(0, 2)


@pytest.mark.parametrize("kind", ["shuffled", "samples that come again", "stream"])
@pytest.mark.parametrize("processes", [0, 2])
def test_lanes_that_move_within_a_step_have_the_data_of_the_grown_batch(kind: str, processes: int) -> None:
    def make(**more: Any) -> "DataLoader[Any]":
        return KINDS[kind](29, 3, collate_fn=noisy_collate, **more)

    loader = grown(make(num_workers=processes), lanes=[0])
    moved = told_apart([batch.for_lanes([1, 3]) for batch in loader])
    loader.close()
    assert_same_bits(moved, passes(grown(make(), lanes=[1, 3])))


@EACH_KIND
def test_a_resumed_run_with_other_lanes_grows_by_their_number(kind: str) -> None:
    loader = grown(KINDS[kind](43, 3), num_lanes=2, lanes=range(4))
    loader.rekey(7, 4)
    loader.seek(Position(1, 1))
    straight = grown(KINDS[kind](43, 3), num_lanes=4, seed=7)
    straight.seek(Position(1, 1))
    assert (loader.batch_size, loader.lane_batch_size) == (12, 3)
    assert_same_bits(passes(loader), passes(straight))


# -- batch samplers -------------------------------------------------------------------------------------------


class OfSizes:
    """A batch sampler of the user's own: batches of given sizes, one index after the other."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[torch.Tensor]:
        first = 0
        for size in self.sizes:
            yield torch.arange(first, first + size)
            first += size

    def __len__(self) -> int:
        return len(self.sizes)


class Endless:
    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield random.sample(range(20), 3)


def grown_over(sampler: Any, **told: Any) -> ShardedLoader:
    return grown(DataLoader(Noisy(40), batch_sampler=sampler), **told)


@DROPPING_OR_NOT
def test_torchs_own_batch_sampler_grows_as_a_batch_size_does(drop_last: bool) -> None:
    sampler = BatchSampler(RandomSampler(range(40)), 3, drop_last)
    by_size = grown(DataLoader(Noisy(40), 3, shuffle=True, drop_last=drop_last))
    assert_same_bits(passes(grown_over(sampler), 2), passes(by_size, 2))


def test_equal_batches_of_an_own_batch_sampler_become_the_lanes() -> None:
    lanes = passes(grown_over(OfSizes(3, 3, 3, 3, 3, 3, 3, 3)))
    assert [lanes[0, 0, lane][:, 0].tolist() for lane in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_uneven_batches_of_an_own_batch_sampler_are_put_together_and_cut_evenly() -> None:
    (batch,) = grown_over(OfSizes(1, 6, 3, 2))
    assert [len(batch.shares[lane]) for lane in range(4)] == [3, 3, 3, 3]


def test_batches_left_at_the_end_of_an_own_batch_sampler_are_a_global_batch_too() -> None:
    loader = grown_over(OfSizes(3, 3, 3, 3, 3, 2))
    assert len(loader) == 2
    assert [len(batch) for batch in loader] == [12, 5]


def test_an_own_batch_sampler_is_told_the_epoch_when_grown() -> None:
    sampler = OfSizes(3, 3)
    passes(grown_over(sampler), 2)
    assert sampler.epochs == [0, 1]


def test_an_endless_batch_sampler_grows_and_can_be_left_and_sought() -> None:
    read = [batch for batch, _ in zip(grown_over(Endless()), range(4), strict=False)]
    loader = grown_over(Endless())
    loader.seek(Position(0, 3))
    assert_same_bits(told_apart([next(iter(loader))]), told_apart(read[3:]))


def test_the_batch_size_over_an_own_batch_sampler_is_not_known() -> None:
    loader = grown_over(OfSizes(3, 3))
    assert (loader.batch_size, loader.lane_batch_size) == (None, None)
