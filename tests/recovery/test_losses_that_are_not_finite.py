"""A loss that is not finite in a run that keeps such steps: it is said, once, and nothing else changes."""

import math
from dataclasses import replace

import pytest
from disturbed import Plan, disturbed, undisturbed
from faults import Fault
from trainings import Training

from lockstep.gradients.finite import BadLosses
from lockstep.gradients.health import REMARK_STEPS, Remarks
from lockstep.gradients.plan import StepPlan
from lockstep.lanes import Assignment

STEP, LANE = 1, 5
CARRIERS = {1: 0, 2: 1, 3: 2}
"""Which of so many workers carries the lane."""

ASSIGNMENT = Assignment.even(8, 3)


def _poisoned(**changes: object) -> Training:
    """One lane's loss is NaN in one step; then the weights are NaN, and so are all losses after it."""
    training = Training(**changes)  # type: ignore[arg-type]
    _, _, used = undisturbed(training)
    return replace(training, poison=(STEP, used[STEP][LANE][0]))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_lane_worker_and_step_of_the_first_one_are_said_and_no_later_one(num_workers: int) -> None:
    result = disturbed(_poisoned(), num_workers, Plan())
    assert result.values("said") == [[_sentence(worker=CARRIERS[num_workers])]] * num_workers


def test_the_sentence_names_who_computed_the_lane_when_another_was_lost_in_that_step() -> None:
    result = disturbed(_poisoned(), 3, Plan((Fault(1, STEP, "before waits"),)))
    assert result.values("said") == [[_sentence(worker=2)]] * 2


def test_losses_that_are_finite_are_not_spoken_of() -> None:
    result = disturbed(Training(), 2, Plan())
    assert result.values("said") == [[], []]


def test_where_gradients_are_looked_at_losses_are_not_spoken_of() -> None:
    result = disturbed(replace(_poisoned(), options=(("not_finite", "skip"),)), 2, Plan())
    assert all("the loss of lane" not in text for said in result.values("said") for text in said)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_every_number_that_is_not_finite_counts(bad: float) -> None:
    found = BadLosses.of([1.0, None, bad, 0.0, None, bad, 2.0, 3.0], ASSIGNMENT)
    assert found is not None
    assert (found.lanes, found.worker) == ((2, 5), 1)
    assert f"lane 2 (worker 5) is not finite: {bad}; also of lane 5;" in found.sentence(7, [4, 5, 6])


def test_losses_that_were_not_told_are_not_judged() -> None:
    assert BadLosses.of([None] * 8, ASSIGNMENT) is None


def test_it_is_said_again_when_enough_steps_have_passed() -> None:
    remarks = Remarks()
    steps = [step for step in range(3 * REMARK_STEPS) if remarks.on([math.nan] * 8, StepPlan(step, 52, ASSIGNMENT))]
    assert steps == [0, REMARK_STEPS, 2 * REMARK_STEPS]


def test_good_steps_before_the_first_bad_one_delay_nothing() -> None:
    remarks = Remarks()
    for step in range(3):
        assert remarks.on([1.0] * 8, StepPlan(step, 52, ASSIGNMENT)) is None
    assert remarks.on([math.nan] * 8, StepPlan(3, 52, ASSIGNMENT)) is not None


def _sentence(worker: int) -> str:
    return (
        f"step {STEP}: the loss of lane {LANE} (worker {worker}) is not finite: nan; the step is applied as it is on "
        'every worker. Start with not_finite="skip" or "stop" to have the parameter and the samples named'
    )
