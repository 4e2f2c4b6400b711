"""Attention, bfloat16, kept gradients, schedulers and running means: a kill or a newcomer changes no bit of them."""

import pytest
from disturbed import Arrival, Plan, disturbed, observed
from faults import Fault, sampled
from trainings import Training

GPT = Training(model="gpt", epochs=1)
ACCUMULATING = Training(script="keeping gradients")
AVERAGING = Training(script="averaging")

KILL_POINTS = sampled(["after computes", "after reduce", "before send in commit exchange", "before update"], 4)


@pytest.mark.parametrize("point", KILL_POINTS)
@pytest.mark.parametrize("worker", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_kill_costs_a_transformer_nothing(worker: int, point: str) -> None:
    disturbed(GPT, 3, Plan((Fault(worker, 1, point),)))


@pytest.mark.soak
def test_two_kills_in_one_step_cost_a_transformer_nothing() -> None:
    disturbed(GPT, 4, Plan((Fault(1, 2, "after computes"), Fault(3, 2, "before waits"))))


def test_a_transformer_is_joined() -> None:
    result = disturbed(GPT, 2, Plan(arrivals=(Arrival(1, 2),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {3}


@pytest.mark.parametrize("model", ["conv", pytest.param("gpt", marks=pytest.mark.soak)])
def test_a_kill_costs_a_model_in_bfloat16_nothing(model: str) -> None:
    disturbed(Training(model=model, autocast=True, epochs=1), 3, Plan((Fault(2, 1, "before waits"),)))


@pytest.mark.parametrize("point", sampled(["after computes", "after reduce"], 2))
@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.soak), 3], ids=["first of two", "second of two"])
def test_a_kill_leaves_gradients_kept_over_two_steps_whole(step: int, point: str) -> None:
    disturbed(ACCUMULATING, 3, Plan((Fault(1, step, point),)))


@pytest.mark.parametrize(
    "step", [pytest.param(1, marks=pytest.mark.soak), 2], ids=["nothing is kept", "a gradient is kept"]
)
def test_one_that_joins_has_the_gradients_that_are_kept(step: int) -> None:
    """It takes part from the step after the one in which it comes."""
    result = disturbed(ACCUMULATING, 2, Plan(arrivals=(Arrival(step, 2),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {3}


def test_the_one_with_the_kept_gradients_is_killed_when_it_has_given_them() -> None:
    plan = Plan((Fault(0, 3, "after computes"),), (Arrival(2, 2),))
    disturbed(ACCUMULATING, 2, plan)


@pytest.mark.parametrize("step", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_one_that_joins_has_the_scheduler_and_what_else_is_tracked(step: int) -> None:
    result = disturbed(AVERAGING, 2, Plan(arrivals=(Arrival(step, 2),)))
    assert result.values("notes") == observed(AVERAGING, 1, Plan()).values("notes") * 3


@pytest.mark.parametrize("point", sampled(["after computes", "before update"], 2))
def test_a_kill_leaves_what_is_tracked_as_it_was(point: str) -> None:
    result = disturbed(AVERAGING, 3, Plan((Fault(1, 2, point),)))
    assert result.values("notes") == observed(AVERAGING, 1, Plan()).values("notes") * 2
