"""Random numbers that a script draws outside of lanes: all workers draw the same, whoever comes and goes."""

import pytest
from disturbed import Arrival, Plan, disturbed, observed
from faults import Fault, sampled
from trainings import STEPS_PER_EPOCH, Training

DRAWING = Training(script="drawing")
LAST_OF_EPOCH = STEPS_PER_EPOCH - 1


def _last_draw(training: Training) -> object:
    """What is drawn after the last step by one worker that nothing happens to."""
    return observed(training, 1, Plan()).values("notes")[0]


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.soak), 2, LAST_OF_EPOCH])
def test_a_worker_that_joins_draws_what_the_others_draw(step: int) -> None:
    """Before the step it joins in, that is: its digest is theirs. After it, too: so is its last draw."""
    result = disturbed(DRAWING, 2, Plan(arrivals=(Arrival(step, 2),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {3}
    assert result.values("notes") == [_last_draw(DRAWING)] * 3


def test_a_worker_that_joins_draws_the_same_when_batches_are_loaded_ahead() -> None:
    training = Training(script="drawing", num_workers=2, epochs=1)
    result = disturbed(training, 2, Plan(arrivals=(Arrival(1, 2),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {3}
    assert result.values("notes") == [_last_draw(training)] * 3


def test_a_worker_that_joins_a_loop_over_plain_tensors_draws_the_same_after_its_steps() -> None:
    training = Training(script="drawing after plain steps")
    result = disturbed(training, 2, Plan(arrivals=(Arrival(1, 2),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {3}
    assert result.values("notes") == [_last_draw(training)] * 3


@pytest.mark.parametrize("point", sampled(["after computes", "before waits", "after prepares", "before update"], 4))
def test_those_who_go_on_after_a_loss_draw_the_same(point: str) -> None:
    result = disturbed(DRAWING, 3, Plan((Fault(1, 2, point),)))
    assert result.values("notes") == [_last_draw(DRAWING)] * 2


@pytest.mark.soak
def test_one_that_joins_in_the_slot_of_a_lost_worker_draws_the_same() -> None:
    result = disturbed(DRAWING, 3, Plan((Fault(0, 1, "before waits"),), (Arrival(3, 0),)))
    assert result.values("notes") == [_last_draw(DRAWING)] * 3
