"""A wrong sum stops the benchmark, wherever it is. With real workers."""

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from workers import on_workers

from lockstep.elastic.rendezvous import open_store
from lockstep.programs.bench.allreduce.plan import GLOO, LOCKSTEP, title_of
from lockstep.programs.bench.allreduce.worker import (
    RIGHT,
    AllreduceSide,
    AllreduceSite,
    first_wrong,
    lockstep_side,
    object_to,
    open_gloo,
    reduce_by,
    refusal,
)
from lockstep.programs.explain.schedules.catalogue import CATALOGUE
from lockstep.settings.environment import find_place, process_environment
from lockstep.wire import in_shared_memory, over_gloo

Spoil = Callable[[int, torch.Tensor], object]


class Spoilt:
    """A side whose sum is spoilt after it was right."""

    def __init__(self, side: AllreduceSide, spoil: Callable[[torch.Tensor], object]) -> None:
        self.tensor = side.tensor
        self._side = side
        self._spoil = spoil

    def operate(self) -> None:
        self._side.operate()
        self._spoil(self.tensor)


def _object(num_bytes: int, guilty: str, spoil: Spoil) -> str | None:
    """What a worker says when one side is spoilt."""
    place = find_place(process_environment())
    store = open_store(place, 20.0)
    with ExitStack() as stack:
        wire = stack.enter_context(in_shared_memory(place.world, store, 20.0))
        group = stack.enter_context(open_gloo(place.world, store, 20.0))
        sides = stack.enter_context(AllreduceSite(wire, group).open_sides(num_bytes, reduce_by("shared", wire)))
        sides[guilty] = Spoilt(sides[guilty], lambda sum_: spoil(place.world.rank, sum_))
        return object_to(title_of(num_bytes, place.world.size), sides, wire.transport)


@pytest.mark.parametrize("num_workers", [2, 3])
def test_right_sums_of_any_size_raise_no_objection(num_workers: int) -> None:
    for num_bytes in (4, 4096, 1024 * 1024 + 4):
        assert on_workers(num_workers, _object, num_bytes, LOCKSTEP, lambda rank, sum_: None) == [None] * num_workers


@pytest.mark.parametrize("guilty", [LOCKSTEP, GLOO])
def test_a_wrong_sum_on_one_worker_is_named_on_all(guilty: str) -> None:
    def spoil(rank: int, sum_: torch.Tensor) -> None:
        sum_[77] += float(rank == 1)

    sentence = f"4 KiB on 3 workers: the sum by {guilty} is wrong on worker 1, first at element 77."
    found = on_workers(3, _object, 4096, guilty, spoil)
    assert [text[: len(sentence)] for text in found] == [sentence] * 3


def test_a_sum_that_is_not_a_number_is_wrong() -> None:
    found = on_workers(2, _object, 64, LOCKSTEP, lambda rank, sum_: sum_.fill_(float("nan")))
    assert all("is wrong on worker 0, first at element 0" in text for text in found)


def _add_by_every_algorithm() -> dict[str, int]:
    place = find_place(process_environment())
    store = open_store(place, 20.0)
    found = {}
    with over_gloo(place.world, store, 20.0) as wire:
        for name in CATALOGUE["all_reduce"]:
            side = lockstep_side(wire, reduce_by(name, wire), num_elements=1003)
            found[name] = first_wrong(side, place.world.rank, place.world.size)
    return found


@pytest.mark.parametrize("num_workers", [2, 3])
def test_every_algorithm_of_the_catalogue_adds_right(num_workers: int) -> None:
    expected = dict.fromkeys(CATALOGUE["all_reduce"], RIGHT)
    assert on_workers(num_workers, _add_by_every_algorithm) == [expected] * num_workers


def test_an_operation_that_does_nothing_is_wrong() -> None:
    class Idle:
        tensor = torch.zeros(10)

        def operate(self) -> None:
            pass

    assert first_wrong(Idle(), rank=0, num_workers=2) == 1  # element 0 is a sum of zeros


def test_right_everywhere_is_no_objection() -> None:
    assert refusal("8 B on 2 workers", [[RIGHT, RIGHT], [RIGHT, RIGHT]]) is None
