"""Data sets without indices: read whole by every worker, kept by lanes."""

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from noisy_data import (
    NoisyStream,
    assert_same_bits,
    indices_of,
    noise,
    over_workers,
    passes,
    sharded,
    told_apart,
)
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lockstep.data import Position


def ignore(text: str) -> None:
    """For tests that are not about what is said."""


@pytest.mark.parametrize("num_workers", [2, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_is_the_same_bits_on_any_number_of_workers(num_workers: int, drop_last: bool) -> None:
    def make() -> "DataLoader[Any]":
        return DataLoader(NoisyStream(22), 7, drop_last=drop_last)

    assert_same_bits(over_workers(make, num_workers, 2), over_workers(make, 1, 2))


@pytest.mark.parametrize(("drop_last", "num_read"), [(False, 22), (True, 21)])
def test_every_sample_of_a_stream_comes_once_and_in_order(drop_last: bool, num_read: int) -> None:
    lanes = over_workers(lambda: DataLoader(NoisyStream(22), 7, drop_last=drop_last), 3)
    assert indices_of(lanes) == list(range(num_read))


def test_a_stream_draws_other_numbers_in_every_epoch() -> None:
    lanes = passes(sharded(DataLoader(NoisyStream(4), 4), num_lanes=1), 2)
    assert (lanes[0, 0, 0][:, 1:] != lanes[1, 0, 0][:, 1:]).all()


def test_a_stream_has_chance_of_its_own() -> None:
    quiet = passes(sharded(DataLoader(NoisyStream(20), 4)))
    loud = []
    random.seed(3)
    outside = [random.random() for _ in range(5)]
    random.seed(3)
    for batch in sharded(DataLoader(NoisyStream(20), 4, collate_fn=_noisy_collate)):
        assert random.random() == outside[batch.position.step if batch.position else 0]
        loud.append(batch)
    assert_same_bits(quiet, told_apart(loud))


def _noisy_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    torch.rand(()), random.random()
    return torch.stack(samples)


def test_a_collate_function_over_a_stream_draws_by_lane() -> None:
    def make() -> "DataLoader[Any]":
        return DataLoader(NoisyStream(16), 8, collate_fn=lambda samples: torch.stack(samples) + torch.rand(()))

    assert_same_bits(over_workers(make, 4), over_workers(make, 1))


def test_an_endless_stream_can_be_left() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from count()

    batches = [batch for batch, _ in zip(sharded(DataLoader(Endless(), 4)), range(3), strict=False)]
    assert [int(data) for batch in batches for _, data in sorted(batch.shares.items())] == list(range(12))


def test_a_stream_that_is_left_lets_go_of_what_it_holds() -> None:
    ended = []

    class Holding(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            try:
                yield from count()
            finally:
                ended.append(True)

    for _ in sharded(DataLoader(Holding(), 4)):
        break
    assert ended == [True]


def test_a_stream_that_has_ended_is_not_asked_again() -> None:
    class Restarting(IterableDataset[int]):
        """Its own iterator, which begins anew when asked after the end."""

        left = 6

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            self.left = (self.left or 7) - 1
            if self.left == 0:
                raise StopIteration
            return self.left

    assert [len(batch) for batch in sharded(DataLoader(Restarting(), 4))] == [4, 1]


def test_a_stream_that_begins_anew_whenever_it_is_iterated_is_iterated_once_a_pass() -> None:
    class OwnIterator(IterableDataset[int]):
        place = 0

        def __iter__(self) -> Iterator[int]:
            self.place = 0
            return self

        def __next__(self) -> int:
            self.place += 1
            if self.place > 5:
                raise StopIteration
            return self.place

    batches = zip(sharded(DataLoader(OwnIterator(), 2), num_lanes=1), range(9), strict=False)
    assert [batch.shares[0].tolist() for batch, _ in batches] == [[1, 2], [3, 4], [5]]


def test_a_stream_of_whole_batches_is_cut_into_lanes() -> None:
    class Batches(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for size in (5, 2, 9):
                yield torch.stack([noise(i) for i in range(size)])

    def make() -> "DataLoader[Any]":
        return DataLoader(Batches(), batch_size=None)

    assert_same_bits(over_workers(make, 3), over_workers(make, 1))
    assert [len(batch) for batch in sharded(make(), lanes=())] == [5, 2, 9]


@pytest.mark.parametrize("num_processes", [0, 2])
def test_a_stream_started_in_the_middle_gives_what_was_left_of_it(num_processes: int) -> None:
    def make() -> Any:
        return sharded(DataLoader(NoisyStream(22), 4, num_workers=num_processes), say=ignore)

    loader = make()
    loader.seek(Position(1, 3))
    rest = told_apart(list(loader))
    whole = passes(make(), 2)
    assert_same_bits(rest, {place: whole[place] for place in whole if place[0] == 1 and place[1] >= 3})


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_processes_do_not_change_a_stream(persistent: bool) -> None:
    in_process = sharded(DataLoader(NoisyStream(22), 4, num_workers=2, persistent_workers=persistent), say=ignore)
    assert_same_bits(passes(in_process, 2), passes(sharded(DataLoader(NoisyStream(22), 4)), 2))


def test_a_stream_is_read_by_one_process_that_knows_to_be_alone() -> None:
    class Telling(IterableDataset[tuple[int, int]]):
        def __iter__(self) -> Iterator[tuple[int, int]]:
            info = get_worker_info()
            assert info is not None
            assert info.dataset is self
            yield info.id, info.num_workers

    (batch,) = sharded(DataLoader(Telling(), 1, num_workers=2), num_lanes=1, say=ignore)
    assert [int(part) for part in batch.shares[0]] == [0, 1]


def test_it_is_said_once_that_one_process_reads_the_stream() -> None:
    said: list[str] = []
    loader = sharded(DataLoader(NoisyStream(2), 2, num_workers=2), say=said.append)
    passes(loader, 2)
    assert len(said) == 1
    assert "in one loading process instead of 2" in said[0]


def test_lanes_that_change_take_effect_for_the_next_batch_of_a_stream() -> None:
    for num_processes in (0, 1):
        carried = [[0, 1], [2], [2], [1, 3]]
        data: DataLoader[Any] = DataLoader(NoisyStream(16), 4, num_workers=num_processes)
        loader = sharded(data, lanes=lambda carried=carried: carried[loader.position.step % 4])  # noqa: B023
        batches = list(loader)
        whole = passes(sharded(DataLoader(NoisyStream(16), 4)))
        assert [sorted(batch.shares) for batch in batches] == carried
        assert_same_bits(told_apart(batches), {place: whole[place] for place in told_apart(batches)})


def test_an_error_of_a_stream_comes_through() -> None:
    class Broken(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise OSError("the line is dead")

    with pytest.raises(OSError, match="the line is dead"):
        list(sharded(DataLoader(Broken(), 2)))
