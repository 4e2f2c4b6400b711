"""Batches whose lanes hold two samples or none: every way of loading cuts them alike."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from noisy_data import Noisy, NoisyStream, nothing_to_say
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep.data import GlobalBatch, ShardedLoader
from lockstep.lanes import Assignment, present_lanes, share

LANES = 5


class Wholes(Dataset[torch.Tensor]):
    """Each item is a whole batch, of as many samples as its number says."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(self.sizes[index]) + 100 * index


class WholeStream(IterableDataset[torch.Tensor]):
    def __init__(self, sizes: list[int]) -> None:
        self.items = Wholes(sizes)

    def __iter__(self) -> Any:
        return (self.items[index] for index in range(len(self.items)))


WAYS: dict[str, Callable[[int, int], "DataLoader[Any]"]] = {
    "samples": lambda size, rest: DataLoader(Noisy(size + rest), size),
    "a stream": lambda size, rest: DataLoader(NoisyStream(size + rest), size),
    "whole items": lambda size, rest: DataLoader(Wholes([size, rest]), None),
    "a stream of whole items": lambda size, rest: DataLoader(WholeStream([size, rest]), None),
}


def loaded(loader: "DataLoader[Any]", lanes: Any = range(LANES), least: Callable[[], int] = lambda: 2) -> ShardedLoader:
    return ShardedLoader(loader, seed=0, num_lanes=LANES, lanes=lambda: lanes, index=0, say=nothing_to_say, least=least)


def assert_cut(batch: GlobalBatch, least: int) -> None:
    assert batch.least == least
    sizes = {lane: len(data) for lane, data in batch.shares.items()}
    present = present_lanes(batch.num_samples, LANES, least)
    assert sizes == {lane: len(share(batch.num_samples, lane, LANES, least)) for lane in present}


@given(st.sampled_from(sorted(WAYS)), st.integers(1, 14), st.integers(1, 14), st.integers(1, 4))
def test_every_worker_has_its_part_of_the_same_cut(way: str, size: int, rest: int, num_workers: int) -> None:
    def loader(lanes: Any) -> ShardedLoader:
        return loaded(WAYS[way](size, min(rest, size)), lanes)

    alone = list(loader(range(LANES)))
    together: list[dict[int, Any]] = [{} for _ in alone]
    for lanes in Assignment.even(LANES, num_workers).lanes_of:
        for found, batch in zip(together, loader(lanes), strict=True):
            found.update(batch.shares)
    for batch, found in zip(alone, together, strict=True):
        assert_cut(batch, 2)
        assert batch.shares.keys() == found.keys()
        assert all(torch.equal(batch.shares[lane], found[lane]) for lane in found)


@pytest.mark.parametrize("way", WAYS)
def test_lanes_that_are_got_again_are_those_of_the_same_cut(way: str) -> None:
    whole = list(loaded(WAYS[way](8, 3)))
    for batch, none in zip(whole, loaded(WAYS[way](8, 3), []), strict=True):
        again = none.reload(range(LANES))
        assert_cut(again, 2)
        assert all(torch.equal(again.shares[lane], batch.shares[lane]) for lane in batch.shares)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_model_that_comes_in_the_middle_of_a_pass_holds_for_the_next_batch(num_workers: int) -> None:
    """Also where loading processes have read ahead."""
    least = [1]
    loader = loaded(DataLoader(Noisy(21), 7, num_workers=num_workers), least=lambda: least[0])
    batches = iter(loader)
    assert_cut(next(batches), 1)
    least[0] = 2
    for batch in batches:
        assert_cut(batch, 2)
    loader.close()


def test_a_batch_that_is_held_whole_is_cut_by_the_same_rule() -> None:
    batch = GlobalBatch.cut(torch.arange(7), LANES, range(LANES), 2)
    assert_cut(batch, 2)
    assert torch.cat([batch.shares[lane] for lane in sorted(batch.shares)]).tolist() == list(range(7))
    assert_cut(GlobalBatch.cut(torch.arange(7), LANES, [], 2).for_lanes(range(LANES)), 2)


def test_the_most_samples_of_a_lane_are_told() -> None:
    assert loaded(DataLoader(Noisy(30), 5)).lane_batch_size == 3
    assert loaded(DataLoader(Noisy(30), 5), least=lambda: 1).lane_batch_size == 1
    assert loaded(DataLoader(Noisy(30), 11)).lane_batch_size == 3
