"""Where each worker has its own parameters, as on GPUs, a worker is killed inside of an update: nothing is lost."""

import random

import pytest
from disturbed import Arrival, Plan, disturbed, undisturbed
from faults import Fault, sampled
from own_parameters import AsOnGpus
from test_kills_in_updates import _kill_some
from trainings import Training

OPTIONS = (("strategy", AsOnGpus()),)
SHORT = Training(options=OPTIONS)

POINTS = [
    ("before meets", 1), ("after meets", 1), ("in batch", 1), ("before store", 1), ("before done", 1),
    ("after store", 1), ("before part", 1), ("after part", 1), ("before gather", 1), ("after gather", 1),
    ("after round", 1), ("before round", 2),
    ("before send in part", 1), ("after send in part", 1), ("after send in part", 2), ("after send in meets", 1),
]  # fmt: skip
EVERY = [(worker, *point) for point in POINTS for worker in (0, 1, 2)]


def test_the_undisturbed_run_ends_like_the_replicated_one() -> None:
    assert undisturbed(SHORT) == undisturbed(Training())


@pytest.mark.parametrize(("worker", "point", "nth"), sampled(EVERY, 5, skip=1))
def test_a_kill_at_any_point_of_an_update_on_gpus_costs_nothing(worker: int, point: str, nth: int) -> None:
    result = disturbed(SHORT, 3, Plan((Fault(worker, 3, point, nth),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {2}


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop"])
def test_a_kill_in_the_first_update_on_gpus_costs_nothing(optimizer: str) -> None:
    """There is no optimizer state before it."""
    disturbed(Training(optimizer=optimizer, options=OPTIONS), 3, Plan((Fault(1, 1, "in batch"),)))


@pytest.mark.parametrize("second", ["before finish", "before store", "after finish"])
def test_one_that_dies_while_it_finishes_for_another_on_gpus_costs_nothing(second: str) -> None:
    """Worker 0 finishes for worker 1, and dies in it; worker 2 finishes for both."""
    nth = 2 if second == "before store" else 1  # the first one is its own
    disturbed(SHORT, 3, Plan((Fault(1, 3, "in batch"), Fault(0, 3, second, nth))))


def test_who_joins_after_a_kill_in_an_update_on_gpus_has_its_part() -> None:
    plan = Plan((Fault(0, 2, "in batch"), Fault(1, 6, "before gather")), (Arrival(4, 0),))
    result = disturbed(SHORT, 3, plan)
    assert max(sizes[-1] for sizes in result.values("sizes")) == 2


def test_the_last_one_left_holds_all_of_the_state_and_divides_it_with_one_that_joins() -> None:
    plan = Plan((Fault(0, 2, "in batch"), Fault(1, 3, "before store")), (Arrival(5, 0),))
    result = disturbed(Training(epochs=3, options=OPTIONS), 3, plan)
    assert max(sizes[-1] for sizes in result.values("sizes")) == 2


def test_three_workers_killed_at_random_where_state_is_divided_cost_nothing() -> None:
    _kill_some(1, AsOnGpus(), "mlp")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_five_hundred_workers_killed_at_random_where_state_is_divided_cost_nothing() -> None:
    for seed in range(167):
        _kill_some(2000 + seed, AsOnGpus(), random.Random(seed).choice(["mlp", "conv", "gpt"]))
