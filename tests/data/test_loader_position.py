"""Where a loader stands, and starting it anywhere."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from noisy_data import Noisy, NoisyStream, assert_same_bits, passes, sharded, told_apart
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler

from lockstep.data import Position
from lockstep.errors import BadArgument, Misuse


def test_the_position_counts_the_batches_handed_out() -> None:
    loader = sharded(DataLoader(Noisy(10), 4))
    assert loader.position == Position(0, 0)
    assert [(batch.position, loader.position) for batch in loader] == [
        (Position(0, step), Position(0, step + 1)) for step in range(3)
    ]


def test_a_pass_that_is_exhausted_counts_as_finished_at_once() -> None:
    loader = sharded(DataLoader(Noisy(10), 4))
    list(loader)
    assert (loader.position, loader.mid_pass) == (Position(1, 0), False)


def test_a_pass_left_by_break_has_ended() -> None:
    loader = sharded(DataLoader(Noisy(10), 4))
    for _ in loader:
        break
    assert (loader.position, loader.mid_pass) == (Position(1, 0), False)
    assert next(iter(loader)).position == Position(1, 0)


def test_a_pass_whose_iterator_is_held_goes_on() -> None:
    loader = sharded(DataLoader(Noisy(10), 4))
    batches = iter(loader)
    for _ in batches:
        break
    assert (loader.position, loader.mid_pass) == (Position(0, 1), True)
    assert next(batches).position == Position(0, 1)


def test_batches_that_were_taken_ahead_of_the_one_trained_on_come_again() -> None:
    loader = sharded(DataLoader(Noisy(20), 4))
    batches = iter(loader)
    first, _, _ = (next(batches) for _ in range(3))
    assert loader.resumes_at == Position(0, 3)  # never trained on: it may be for an evaluation now and then
    loader.committed(first.position)
    assert loader.resumes_at == Position(0, 1)


def test_a_batch_that_was_handed_out_since_the_last_step_comes_again() -> None:
    loader = sharded(DataLoader(Noisy(20), 4))
    batches = iter(loader)
    loader.committed(next(batches).position)
    next(batches)
    assert loader.resumes_at == Position(0, 1)


def test_a_batch_that_was_passed_over_before_the_last_step_does_not_come_again() -> None:
    loader = sharded(DataLoader(Noisy(20), 4))
    batches = iter(loader)
    loader.committed(next(batches).position)
    next(batches)
    loader.committed(None)  # of another loader's batch
    assert loader.resumes_at == Position(0, 2)


def test_nothing_of_a_pass_was_trained_before_its_first_step() -> None:
    loader = sharded(DataLoader(Noisy(20), 4))
    for batch in loader:
        loader.committed(batch.position)
    batches = iter(loader)
    next(batches)
    assert loader.resumes_at == Position(1, 0)


def test_passes_that_are_spent_give_nothing_and_the_one_after_them_starts_where_it_was_sought() -> None:
    loader = sharded(DataLoader(Noisy(20), 4))
    loader.seek(Position(3, 2), num_spent=2)
    assert [[batch.position for batch in loader] for _ in range(3)] == [[], [], [Position(3, n) for n in (2, 3, 4)]]


def test_no_pass_is_running_before_the_first() -> None:
    assert not sharded(DataLoader(Noisy(10), 4)).mid_pass


def test_reading_ahead_does_not_move_the_position() -> None:
    loader = sharded(DataLoader(Noisy(10), 1, num_workers=1, prefetch_factor=4))
    batches = iter(loader)
    next(batches)
    assert loader.position == Position(0, 1)
    loader.close()


@settings(max_examples=30, deadline=None)
@given(epoch=st.integers(0, 2), step=st.integers(0, 6), lanes=st.sets(st.integers(0, 3)))
def test_a_pass_started_in_the_middle_gives_what_was_left_of_it(epoch: int, step: int, lanes: set[int]) -> None:
    def make() -> Any:
        return sharded(DataLoader(Noisy(9), 2, sampler=WeightedRandomSampler([1.0] * 9, 11)), lanes=sorted(lanes))

    loader = make()
    loader.seek(Position(epoch, step))
    rest = told_apart(list(loader))
    whole = passes(make(), 3)
    assert_same_bits(rest, {place: whole[place] for place in whole if place[0] == epoch and place[1] >= step})
    assert loader.position == Position(epoch + 1, 0)


def test_seeking_reads_no_sample_before_the_position() -> None:
    dataset = Noisy(20)
    loader = sharded(DataLoader(dataset, 4))
    loader.seek(Position(0, 3))
    list(loader)
    assert dataset.read == list(range(12, 20))


def test_a_pass_goes_on_after_the_last_batch_with_nothing() -> None:
    loader = sharded(DataLoader(Noisy(8), 4))
    loader.seek(Position(4, 2))
    assert list(loader) == []
    assert loader.position == Position(5, 0)


def test_seeking_into_a_pass_is_being_in_it_and_seeking_to_its_start_is_not() -> None:
    loader = sharded(DataLoader(Noisy(8), 4))
    loader.seek(Position(4, 1))
    assert (loader.position, loader.mid_pass) == (Position(4, 1), True)
    loader.seek(Position(4, 0))
    assert not loader.mid_pass


def test_a_pass_is_sought_once_and_the_next_is_a_new_epoch() -> None:
    loader = sharded(DataLoader(Noisy(8), 4))
    loader.seek(Position(4, 1))
    next(iter(loader))
    assert next(iter(loader)).position == Position(5, 0)


@pytest.mark.parametrize("begin_another", [iter, lambda loader: loader.seek(Position())])
def test_an_iterator_that_was_overtaken_says_so(begin_another: Any) -> None:
    loader = sharded(DataLoader(Noisy(8), 4))
    overtaken = iter(loader)
    next(overtaken)
    begin_another(loader)
    with pytest.raises(Misuse, match=r"give run\.shard two loaders"):
        next(overtaken)


def test_a_position_before_the_beginning_is_refused() -> None:
    with pytest.raises(BadArgument, match="from 0"):
        sharded(DataLoader(Noisy(8), 4)).seek(Position(0, -1))


def test_a_change_of_lanes_draws_no_index_twice() -> None:
    drawn = []

    class Telling(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            for index in torch.randperm(12).tolist():
                drawn.append(index)
                yield index

    carried = [[0], [1], [2], [3]]
    list(
        loader := sharded(DataLoader(Noisy(12), 3, sampler=Telling()), lanes=lambda: carried[loader.position.step % 4])
    )
    assert sorted(drawn) == list(range(12))


def test_its_length_is_that_of_the_loader() -> None:
    assert [len(sharded(DataLoader(Noisy(10), 4, drop_last=drop))) for drop in (False, True)] == [3, 2]


def test_a_stream_without_length_has_none() -> None:
    with pytest.raises(TypeError):
        len(sharded(DataLoader(NoisyStream(4))))
