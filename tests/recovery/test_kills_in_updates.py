"""Under a sharded strategy a worker is killed inside of an update: the bits are those of one that nobody died in."""

import random
from functools import partial

import pytest
from disturbed import Arrival, Plan, disturbed, undisturbed
from faults import Fault, sampled
from test_random_kills import _arm
from trainings import Training

from lockstep.strategies import Strategy

SHARDED = (("strategy", "sharded:parameters"),)
SHORT = Training(options=SHARDED)

POINTS = [
    ("before meets", 1), ("after meets", 1), ("before batch begins", 1), ("in journal", 1), ("in journal", 2),
    ("after batch begins", 1), ("in batch", 1), ("in batch", 2), ("after batch ends", 1), ("after batch ends", 2),
    ("before part", 1), ("after part", 1), ("before send in part", 1), ("after send in part", 1),
    ("after send in part", 2), ("before send in meets", 2), ("after send in meets", 1),
]  # fmt: skip
EVERY = [(worker, *point) for point in POINTS for worker in (0, 1, 2)]


def test_the_undisturbed_sharded_run_ends_like_the_replicated_one() -> None:
    assert undisturbed(SHORT) == undisturbed(Training())


@pytest.mark.parametrize(("worker", "point", "nth"), sampled(EVERY, 5, skip=1))
def test_a_kill_at_any_point_of_an_update_costs_nothing(worker: int, point: str, nth: int) -> None:
    result = disturbed(SHORT, 3, Plan((Fault(worker, 3, point, nth),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {2}


@pytest.mark.parametrize(
    ("point", "nth"), sampled([("in batch", 1), ("in batch", 2), ("in journal", 1), ("after done", 1)], 4)
)
@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop"])
def test_a_kill_in_the_first_update_costs_nothing(optimizer: str, point: str, nth: int) -> None:
    """There is no optimizer state before it."""
    training = Training(optimizer=optimizer, options=SHARDED)
    disturbed(training, 3, Plan((Fault(1, 1, point, nth),)))


@pytest.mark.parametrize(("point", "nth"), sampled([("before done", 2), ("before done", 1), ("in journal", 2)], 3))
def test_a_kill_between_the_batches_of_one_call_costs_nothing(point: str, nth: int) -> None:
    """A fused optimizer updates all its batches in one call of `step`."""
    disturbed(Training(optimizer="adamw fused", options=SHARDED), 3, Plan((Fault(1, 3, point, nth),)))


@pytest.mark.parametrize("second", sampled(["before finish", "in batch", "after finish"], 2))
def test_one_that_dies_while_it_finishes_for_another_costs_nothing(second: str) -> None:
    """Worker 0 finishes for worker 1, and dies in it; worker 2 finishes for both."""
    nth = 4 if second == "in batch" else 1  # the first three are its own
    disturbed(SHORT, 3, Plan((Fault(1, 3, "in batch", 2), Fault(0, 3, second, nth))))


def test_who_joins_after_a_kill_in_an_update_shares_the_memory_too() -> None:
    plan = Plan((Fault(0, 2, "in batch", 2), Fault(1, 6, "in batch", 2)), (Arrival(4, 0),))
    result = disturbed(SHORT, 3, plan)
    assert max(sizes[-1] for sizes in result.values("sizes")) == 2


LENT = Training(lanes=3, options=SHARDED)
"""Every worker has one lane, until one of them dies: their buckets take turns in two buffers."""


REDUCTIONS = [(worker, f"{when} reduce", nth) for when in ("before", "after") for nth in (1, 2, 4) for worker in (0, 2)]


@pytest.mark.parametrize(("worker", "point", "nth"), sampled(REDUCTIONS, 4, skip=1))
def test_a_kill_while_the_gradient_that_stands_once_is_added_costs_nothing(worker: int, point: str, nth: int) -> None:
    result = disturbed(LENT, 3, Plan((Fault(worker, 3, point, nth),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {2}


def _kill_some(seed: int, strategy: str | Strategy, model: str) -> None:
    """All but one of four workers, at random moments of random steps."""
    chance = random.Random(seed)
    victims = chance.sample(range(4), 3)
    deaths = {victim: (chance.randrange(7), chance.random() * 0.02) for victim in victims}
    training = Training(model=model, lanes=chance.choice([4, 8]), options=(("strategy", strategy),))
    disturbed(training, 4, Plan(extra=partial(_arm, deaths), dying=tuple(victims)))


@pytest.mark.parametrize("level", ["optimizer", "gradients"])
def test_three_workers_killed_at_random_under_a_sharded_strategy_cost_nothing(level: str) -> None:
    _kill_some(1, f"sharded:{level}", "mlp")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("level", ["optimizer", "gradients", "parameters"])
def test_five_hundred_workers_killed_at_random_under_each_level_cost_nothing(level: str) -> None:
    for seed in range(167):
        _kill_some(2000 + seed, f"sharded:{level}", random.Random(seed).choice(["mlp", "conv", "gpt"]))
