"""Which samples come, and with which random numbers: the same on any number of workers."""

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from noisy_data import (
    Noisy,
    NoisyInLists,
    assert_same_bits,
    indices_of,
    over_workers,
    passes,
    sharded,
    told_apart,
)
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from lockstep.data import Position
from lockstep.data.samples import draws_nothing, reads_lists


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 30),
    batch_size=st.integers(1, 12),
    num_lanes=st.integers(1, 6),
    num_workers=st.integers(1, 7),
    drop_last=st.booleans(),
)
def test_every_sample_of_an_epoch_is_read_exactly_once_over_any_split(
    size: int, batch_size: int, num_lanes: int, num_workers: int, drop_last: bool
) -> None:
    dataset = Noisy(size)
    over_workers(
        lambda: DataLoader(dataset, batch_size, shuffle=True, drop_last=drop_last),
        num_workers,
        num_lanes=num_lanes,
    )
    assert len(dataset.read) == len(set(dataset.read)) == (size // batch_size * batch_size if drop_last else size)


@pytest.mark.parametrize("num_workers", [2, 3, 5])
def test_shares_are_the_same_bits_on_any_number_of_workers(num_workers: int) -> None:
    def make() -> "DataLoader[Any]":
        return DataLoader(Noisy(23), 7, shuffle=True)

    assert_same_bits(over_workers(make, num_workers, num_passes=2), over_workers(make, 1, num_passes=2))


def test_sequential_order_is_that_of_the_data_set() -> None:
    assert indices_of(passes(sharded(DataLoader(Noisy(10), 4)))) == list(range(10))


def test_shuffling_gives_another_order_in_every_epoch() -> None:
    lanes = passes(sharded(DataLoader(Noisy(50), 50, shuffle=True)), 2)
    first = indices_of({place: data for place, data in lanes.items() if place[0] == 0})
    second = indices_of({place: data for place, data in lanes.items() if place[0] == 1})
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


@pytest.mark.parametrize("other", [{"seed": 1}, {"index": 1}])
def test_another_seed_or_another_loader_has_another_order(other: dict[str, int]) -> None:
    loader: DataLoader[Any] = DataLoader(Noisy(50), 50, shuffle=True)
    assert indices_of(passes(sharded(loader))) != indices_of(passes(sharded(loader, **other)))


def test_a_sample_is_augmented_differently_in_every_epoch() -> None:
    lanes = passes(sharded(DataLoader(Noisy(1), 1), num_lanes=1), 2)
    assert (lanes[0, 0, 0][:, 1:] != lanes[1, 0, 0][:, 1:]).all()


def test_order_and_augmentation_do_not_depend_on_what_the_training_loop_draws() -> None:
    quiet = passes(sharded(DataLoader(Noisy(20), 4, shuffle=True)))
    loud = []
    for batch in sharded(DataLoader(Noisy(20), 4, shuffle=True)):
        torch.rand(3), random.random(), numpy.random.rand()
        loud.append(batch)
    assert_same_bits(quiet, told_apart(loud))


def drawn_outside() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(numpy.random.rand())


def noisy_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(()) + random.random() + numpy.random.rand()


@pytest.mark.parametrize("batch_size", [4, None])
def test_loading_in_the_training_process_leaves_its_generators_untouched(batch_size: int | None) -> None:
    for reading in (False, True):
        torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
        if reading:
            passes(sharded(DataLoader(Noisy(12), batch_size, shuffle=True, collate_fn=_noisy_any)))
        else:
            untouched = drawn_outside()
    assert drawn_outside() == untouched


def _noisy_any(samples: Any) -> Any:
    return noisy_collate(samples if isinstance(samples, list) else list(samples))


def test_generators_are_untouched_also_when_a_sample_raises() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> torch.Tensor:
            super().__getitem__(index)
            raise OSError("no such picture")

    torch.manual_seed(5)
    untouched = torch.rand(())
    torch.manual_seed(5)
    with pytest.raises(OSError, match="no such picture"):
        passes(sharded(DataLoader(Broken(4), 4)))
    assert torch.rand(()) == untouched


def test_a_collate_function_draws_by_lane_not_by_worker() -> None:
    def make() -> "DataLoader[Any]":
        return DataLoader(Noisy(16), 8, collate_fn=noisy_collate)

    assert_same_bits(over_workers(make, 4), over_workers(make, 1))


class LazySampler(Sampler[int]):
    """Draws an index whenever asked, for ever, from two of the global generators."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(10, ())) * 10 + random.randrange(10)


def first(num_batches: int, loader: Any) -> Any:
    batches = [batch for batch, _ in zip(loader, range(num_batches), strict=False)]
    loader.close()
    return told_apart(batches)


def test_an_endless_sampler_that_draws_lazily_is_the_same_on_every_worker() -> None:
    def make() -> "DataLoader[Any]":
        return DataLoader(Noisy(100), 6, sampler=LazySampler())

    whole = first(5, sharded(make()))
    halves = [first(5, sharded(make(), lanes=lanes)) for lanes in ([0, 1], [2, 3])]
    assert_same_bits(whole, halves[0] | halves[1])


def test_a_lazy_sampler_goes_on_where_it_stopped_whatever_is_drawn_between() -> None:
    drawn = first(5, sharded(DataLoader(Noisy(100), 6, sampler=LazySampler())))
    assert len(set(indices_of(drawn))) > 6


def test_drawing_with_replacement_augments_every_use_anew() -> None:
    sampler = RandomSampler(range(2), replacement=True, num_samples=40)
    lanes = passes(sharded(DataLoader(Noisy(2), 8, sampler=sampler)))
    assert len({row[1].item() for data in lanes.values() for row in data}) == 40


def test_repeated_samples_are_the_same_bits_on_any_number_of_workers() -> None:
    def make() -> "DataLoader[Any]":
        return DataLoader(Noisy(5), 8, sampler=WeightedRandomSampler([1.0, 2.0, 3.0, 4.0, 5.0], 33))

    assert_same_bits(over_workers(make, 3, 2), over_workers(make, 1, 2))


def test_a_batch_sampler_keeps_its_batches_and_is_told_the_epoch() -> None:
    class ByEpoch(BatchSampler):
        def set_epoch(self, epoch: int) -> None:
            self.batch_size = 3 + epoch

    batches = ByEpoch(SequentialSampler(range(8)), 1, False)
    loader = sharded(DataLoader(Noisy(8), batch_sampler=batches))
    assert [[batch.num_samples for batch in loader] for _ in range(2)] == [[3, 3, 2], [4, 4]]


def test_batches_given_as_plain_lists_or_tensors_work() -> None:
    for batches in ([[3, 1], [2]], [torch.tensor([3, 1]), torch.tensor([2])]):
        assert indices_of(passes(sharded(DataLoader(Noisy(4), batch_sampler=batches)))) == [3, 1, 2]


def test_a_sampler_that_gives_tensors_draws_the_same_augmentation_as_one_that_gives_numbers() -> None:
    numbers, tensors = ([2, 0, 1], list(torch.tensor([2, 0, 1])))
    lanes = [passes(sharded(DataLoader(Noisy(3), 3, sampler=sampler))) for sampler in (numbers, tensors)]
    assert_same_bits(*lanes)


@pytest.mark.parametrize("given_to", ["loader", "sampler"])
def test_a_generator_of_the_users_is_seeded_for_the_pass_and_left_as_it_was(given_to: str) -> None:
    def make(generator: torch.Generator) -> "DataLoader[Any]":
        if given_to == "loader":
            return DataLoader(Noisy(30), 4, shuffle=True, generator=generator)
        return DataLoader(Noisy(30), 4, sampler=RandomSampler(range(30), True, generator=generator))

    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    assert_same_bits(*(passes(sharded(make(generator))) for generator in generators))
    assert torch.equal(generators[0].get_state(), torch.Generator().manual_seed(1).get_state())


def test_a_data_set_that_reads_lists_is_called_once_for_each_lane() -> None:
    calls = []

    class Counting(NoisyInLists):
        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            calls.append(indices)
            return super().__getitems__(indices)

    passes(sharded(DataLoader(Counting(8), 8), num_lanes=2, lanes=[1]))
    assert calls == [[4, 5, 6, 7]]


def test_a_data_set_that_reads_lists_gives_the_same_bits_on_any_number_of_workers() -> None:
    def make() -> "DataLoader[Any]":
        return DataLoader(NoisyInLists(21), 8, shuffle=True)

    assert_same_bits(over_workers(make, 3), over_workers(make, 1))


def test_a_subset_reads_by_samples_unless_its_data_set_reads_lists() -> None:
    assert not reads_lists(Subset(Noisy(3), [0]))
    assert reads_lists(Subset(NoisyInLists(3), [0]))


def test_only_data_sets_of_stored_tensors_are_trusted_to_draw_nothing() -> None:
    class Augmenting(TensorDataset):
        pass

    stored = TensorDataset(torch.ones(3))
    assert draws_nothing(ConcatDataset([stored, Subset(stored, [0])]))
    assert not any(map(draws_nothing, (Augmenting(torch.ones(3)), ConcatDataset([stored, Noisy(3)]))))


def test_stored_tensors_are_shared_like_any_data_set() -> None:
    def make() -> "DataLoader[Any]":
        return DataLoader(TensorDataset(torch.arange(22).reshape(11, 2)), 4, shuffle=True, collate_fn=_first_columns)

    assert_same_bits(over_workers(make, 3), over_workers(make, 1))


def _first_columns(samples: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    return torch.stack([sample[0] for sample in samples])


class WholeBatches(Noisy):
    """Item `i` is a global batch of `i + 1` samples."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([super(WholeBatches, self).__getitem__(index) for _ in range(index + 1)])


def test_items_that_are_whole_batches_are_cut_into_lanes() -> None:
    def make() -> "DataLoader[Any]":
        return DataLoader(WholeBatches(6), batch_size=None, shuffle=True)

    assert_same_bits(over_workers(make, 3, 2), over_workers(make, 1, 2))


def test_whole_batches_count_their_samples_on_every_worker() -> None:
    loader = sharded(DataLoader(WholeBatches(3), batch_size=None), lanes=())
    assert [(batch.num_samples, dict(batch.shares)) for batch in loader] == [(1, {}), (2, {}), (3, {})]


def test_a_batch_smaller_than_the_lanes_leaves_some_absent() -> None:
    (batch,) = sharded(DataLoader(Noisy(2), 8))
    assert (batch.num_samples, sorted(batch.shares)) == (2, [1, 3])


def test_an_empty_data_set_gives_nothing() -> None:
    assert list(sharded(DataLoader(Noisy(0), 8))) == []


def test_lanes_that_change_take_effect_for_the_next_batch() -> None:
    carried = [[0, 1], [0, 1], [1, 2, 3], []]
    dataset = Noisy(16)
    loader = sharded(DataLoader(dataset, 4, shuffle=True), lanes=lambda: carried[loader.position.step % 4])
    batches = list(loader)
    assert [sorted(batch.shares) for batch in batches] == carried
    whole = passes(sharded(DataLoader(Noisy(16), 4, shuffle=True)))
    assert_same_bits(told_apart(batches), {place: whole[place] for place in told_apart(batches)})
    assert len(dataset.read) == 2 + 2 + 3


def test_an_error_of_the_data_set_comes_through_with_its_type_and_place() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 3:
                raise ZeroDivisionError("sample 3 is broken")
            return super().__getitem__(index)

    loader = sharded(DataLoader(Broken(6), 2), num_lanes=1)
    with pytest.raises(ZeroDivisionError, match="sample 3 is broken") as error:
        list(loader)
    assert loader.position == Position(0, 1)
    assert error.traceback[-1].name == "__getitem__"


def test_an_error_is_raised_only_where_the_sample_is_read() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> torch.Tensor:
            assert index != 3
            return super().__getitem__(index)

    assert len(list(sharded(DataLoader(Broken(4), 4), lanes=[0, 1, 2]))) == 1


def test_a_data_set_that_raises_stop_iteration_does_not_end_the_pass_in_silence() -> None:
    class Ending(Noisy):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise StopIteration

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(sharded(DataLoader(Ending(4), 2)))


def test_an_index_that_reads_differently_in_every_process_is_refused() -> None:
    class Nameless:
        pass

    with pytest.raises(ValueError, match="give the class a __repr__"):
        list(sharded(DataLoader(Noisy(4), 1, sampler=[Nameless()])))
