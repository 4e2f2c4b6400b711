"""Where each worker has its own parameters, as on GPUs, a worker is killed inside of an update: nothing is lost."""

import random
from dataclasses import replace

import pytest
from disturbed import Arrival, Plan, disturbed, undisturbed
from faults import Fault, sampled
from own_parameters import AsOnGpus
from test_kills_in_updates import _kill_some
from trainings import Training

OPTIONS = {level: (("strategy", AsOnGpus(level)),) for level in ("optimizer", "gradients", "parameters")}
SHORT = {
    "optimizer": Training(options=OPTIONS["optimizer"]),
    "gradients": Training(options=OPTIONS["gradients"], lanes=3),  # one for each worker: buckets take turns in buffers
    "parameters": Training(options=OPTIONS["parameters"], model="gpt"),
}

POINTS = [
    ("before meets", 1), ("after meets", 1), ("in batch", 1), ("before store", 1), ("before done", 1),
    ("after store", 1), ("before part", 1), ("after part", 1), ("before gather", 1), ("after gather", 1),
    ("after round", 1), ("before round", 2),
    ("before send in part", 1), ("after send in part", 1), ("after send in part", 2), ("after send in meets", 1),
]  # fmt: skip
IN_SUMS = [("before gradient", 1), ("after gradient", 1), ("before gradient", 3), ("after gradient", 3)]
IN_LANES = [("before leave", 1), ("after leave", 2), ("before fetch", 1), ("after fetch", 9)]
MORE = {"optimizer": [], "gradients": IN_SUMS, "parameters": [*IN_SUMS, *IN_LANES]}
EVERY = [(level, worker, *point) for level in OPTIONS for point in (*POINTS, *MORE[level]) for worker in (0, 1, 2)]


@pytest.mark.parametrize("training", SHORT.values(), ids=SHORT)
def test_the_undisturbed_run_ends_like_the_replicated_one(training: Training) -> None:
    assert undisturbed(training) == undisturbed(replace(training, options=()))


@pytest.mark.parametrize(("level", "worker", "point", "nth"), sampled(EVERY, 7, skip=1))
def test_a_kill_at_any_point_of_an_update_on_gpus_costs_nothing(level: str, worker: int, point: str, nth: int) -> None:
    result = disturbed(SHORT[level], 3, Plan((Fault(worker, 3, point, nth),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {2}


@pytest.mark.parametrize(("level", "optimizer"), [("optimizer", "sgd"), ("gradients", "rmsprop")])
def test_a_kill_in_the_first_update_on_gpus_costs_nothing(level: str, optimizer: str) -> None:
    """There is no optimizer state before it."""
    disturbed(Training(optimizer=optimizer, options=OPTIONS[level]), 3, Plan((Fault(1, 1, "in batch"),)))


@pytest.mark.parametrize("point", ["before hold", "after hold"])
def test_a_kill_while_the_host_gets_the_parameters_costs_nothing(point: str) -> None:
    """When a run begins, and when the survivors of another one go on."""
    disturbed(SHORT["parameters"], 3, Plan((Fault(0, 0, point), Fault(1, 3, "in batch"))))
    disturbed(SHORT["parameters"], 3, Plan((Fault(1, 3, "in batch"), Fault(0, 3, point))))


@pytest.mark.parametrize("second", ["before finish", "before store", "after finish"])
def test_one_that_dies_while_it_finishes_for_another_on_gpus_costs_nothing(second: str) -> None:
    """Worker 0 finishes for worker 1, and dies in it; worker 2 finishes for both."""
    nth = 2 if second == "before store" else 1  # the first one is its own
    disturbed(SHORT["gradients"], 3, Plan((Fault(1, 3, "in batch"), Fault(0, 3, second, nth))))


@pytest.mark.parametrize("level", ["gradients", "parameters"])
def test_who_joins_after_a_kill_in_an_update_on_gpus_has_its_part(level: str) -> None:
    plan = Plan((Fault(0, 2, "in batch"), Fault(1, 6, "before gather")), (Arrival(4, 0),))
    result = disturbed(SHORT[level], 3, plan)
    assert max(sizes[-1] for sizes in result.values("sizes")) == 2


@pytest.mark.parametrize("level", ["gradients", "parameters"])
def test_the_last_one_left_holds_all_of_the_state_and_divides_it_with_one_that_joins(level: str) -> None:
    plan = Plan((Fault(0, 2, "in batch"), Fault(1, 3, "before store")), (Arrival(5, 0),))
    result = disturbed(Training(epochs=3, options=OPTIONS[level]), 3, plan)
    assert max(sizes[-1] for sizes in result.values("sizes")) == 2


@pytest.mark.parametrize("level", OPTIONS)
def test_three_workers_killed_at_random_where_state_is_divided_cost_nothing(level: str) -> None:
    _kill_some(1, AsOnGpus(level), "mlp")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("level", OPTIONS)
def test_five_hundred_workers_killed_at_random_where_state_is_divided_cost_nothing(level: str) -> None:
    for seed in range(167):
        _kill_some(2000 + seed, AsOnGpus(level), random.Random(seed).choice(["mlp", "conv", "gpt"]))
