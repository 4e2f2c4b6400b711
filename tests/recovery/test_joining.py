"""Workers that join and leave a run under way."""

import random
from itertools import groupby

import pytest
from disturbed import LIMIT_S, Arrival, Leaving, Plan, disturbed
from faults import Fault, sampled
from trainings import Training, Work

SHORT = Training()


def _await_the_newcomer(number: int, work: Work) -> None:
    """Three steps before the end, whoever lost the first host is at the door of the next, or was admitted."""
    recovery = work.run.guard.recovery
    assert recovery is not None
    if work.run.step == 5 and work.run.size < 3 and recovery.is_coordinator and not recovery._newcomers:
        recovery.endpoint.await_claim(LIMIT_S)


@pytest.mark.parametrize("model", ["mlp", "conv"])
def test_a_worker_that_joins_ends_with_the_bits_of_the_others(model: str) -> None:
    result = disturbed(Training(model=model), 2, Plan(arrivals=(Arrival(2, 2),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {3}


@pytest.mark.parametrize("wire", ["gloo", "hierarchical"])
def test_a_worker_joins_on_any_wire(wire: str) -> None:
    result = disturbed(Training(options=(("wire", wire),)), 2, Plan(arrivals=(Arrival(2, 2),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {3}


def test_one_worker_alone_is_joined() -> None:
    result = disturbed(SHORT, 1, Plan(arrivals=(Arrival(2, 1),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {2}


TWO = (Arrival(2, 2), Arrival(2, 3))


def test_two_that_have_asked_join_together() -> None:
    result = disturbed(SHORT, 2, Plan(arrivals=TWO))
    assert [[size for size, _ in groupby(sizes)] for sizes in result.values("sizes")] == [[2, 4]] * 2 + [[4]] * 2


@pytest.mark.parametrize("point", ["before computes", "before waits"])
def test_two_that_joined_go_on_when_all_others_are_lost_in_their_first_step(point: str) -> None:
    result = disturbed(SHORT, 2, Plan((Fault(0, 3, point), Fault(1, 3, point)), TWO))
    assert {sizes[-1] for sizes in result.values("sizes")} == {2}


def test_one_that_helps_to_give_the_state_to_two_is_killed() -> None:
    result = disturbed(SHORT, 2, Plan((Fault(1, None, "before receive in hand_over"),), TWO))
    assert {sizes[-1] for sizes in result.values("sizes")} == {3}


@pytest.mark.parametrize("lost", [0, 1])
def test_one_joins_in_the_slot_of_a_worker_that_was_lost(lost: int) -> None:
    result = disturbed(SHORT, 3, Plan((Fault(lost, 2, "before waits"),), (Arrival(4, lost),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {3}


def test_the_slot_of_a_worker_that_joined_and_was_lost_is_taken_again() -> None:
    plan = Plan((Fault(1, 1, "before waits"), Fault(3, 5, "after reduce")), (Arrival(2, 1), Arrival(6, 1)))
    result = disturbed(Training(epochs=3), 3, plan)
    assert {sizes[-1] for sizes in result.values("sizes")} == {3}


@pytest.mark.parametrize("point", sampled(["after SendClaim", "before Open", "before hand_over", "after hand_over"], 2))
def test_one_that_joins_is_killed_before_it_has_the_state(point: str) -> None:
    result = disturbed(SHORT, 2, Plan((Fault(2, None, point),), (Arrival(2, 2),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {2}


@pytest.mark.parametrize("nth", sampled([1, 2, 3, 4], 4))
@pytest.mark.parametrize("when", ["before", "after"])
def test_one_that_joins_is_killed_while_it_is_given_the_state(when: str, nth: int) -> None:
    plan = Plan((Fault(2, None, f"{when} receive in hand_over", nth),), (Arrival(2, 2),))
    result = disturbed(SHORT, 2, plan)
    assert {sizes[-1] for sizes in result.values("sizes")} == {2}


@pytest.mark.parametrize("nth", sampled([1, 2, 3, 4], 4))
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_one_that_gives_the_state_is_killed_while_giving(when: str, nth: int) -> None:
    plan = Plan((Fault(0, None, f"{when} send in hand_over", nth),), (Arrival(2, 3),), extra=_await_the_newcomer)
    result = disturbed(SHORT, 3, plan)
    assert {sizes[-1] for sizes in result.values("sizes")} == {3}


@pytest.mark.parametrize(
    "point", sampled(["before GatherClaims", "before SendDecision", "after SendDecision", "after Open"], 2)
)
def test_the_host_is_killed_while_it_admits_another(point: str) -> None:
    plan = Plan((Fault(0, 3, point),), (Arrival(2, 3),), extra=_await_the_newcomer)
    result = disturbed(SHORT, 3, plan)
    assert {sizes[-1] for sizes in result.values("sizes")} == {3}


def test_the_host_is_killed_when_it_has_answered_the_newcomer_and_not_the_member() -> None:
    plan = Plan((Fault(0, 3, "before SendDecision", 2),), (Arrival(2, 3),), extra=_await_the_newcomer)
    result = disturbed(SHORT, 3, plan)
    assert {sizes[-1] for sizes in result.values("sizes")} == {3}


@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_is_lost_in_the_first_step_of_one_that_joined(worker: int) -> None:
    result = disturbed(SHORT, 2, Plan((Fault(worker, 3, "after computes"),), (Arrival(2, 2),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {2}


@pytest.mark.parametrize("point", sampled(["before send in commit exchange", "before waits", "before update"], 3))
def test_one_that_joined_is_lost_in_its_first_step(point: str) -> None:
    result = disturbed(SHORT, 2, Plan((Fault(2, 3, point),), (Arrival(2, 2),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {2}


@pytest.mark.parametrize("worker", sampled([0, 1, 2], 3))
def test_a_worker_that_is_asked_to_leave_leaves_after_the_step(worker: int) -> None:
    result = disturbed(SHORT, 3, Plan(leavings=(Leaving(2, worker),)))
    assert result.values("sizes") == [[3, 3, 3, 3, 2, 2, 2, 2]] * 2


def test_one_leaves_while_another_joins() -> None:
    result = disturbed(SHORT, 2, Plan(arrivals=(Arrival(2, 2),), leavings=(Leaving(2, 0),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {2}


@pytest.mark.parametrize("other", [0, 1])
def test_one_is_lost_in_the_step_in_which_another_leaves(other: int) -> None:
    result = disturbed(SHORT, 3, Plan((Fault(other, 2, "before prepares"),), leavings=(Leaving(2, 2),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {1}


@pytest.mark.parametrize("seed", sampled([1, 2], 2))
def test_from_one_worker_to_four_to_two_to_three(seed: int) -> None:
    chance = random.Random(seed)
    joins, leaves, joins_again = chance.randrange(1, 5), chance.randrange(10, 15), chance.randrange(18, 24)
    arrivals = (*(Arrival(joins, slot) for slot in chance.sample([1, 2, 3], 3)), Arrival(joins_again, 4))
    plan = Plan(arrivals=arrivals, leavings=tuple(Leaving(leaves, worker) for worker in chance.sample(range(4), 2)))
    result = disturbed(Training(epochs=7), 1, plan)
    lasting = [sizes for sizes in result.values("sizes") if 4 in sizes]
    assert [[size for size, _ in groupby(sizes)][-3:] for sizes in lasting] == [[4, 2, 3]] * 2


def test_a_worker_whose_loop_counts_from_the_beginning_leaves_with_its_name_and_the_others_go_on() -> None:
    result = disturbed(Training(script="from the start"), 2, Plan(arrivals=(Arrival(3, 2),)), others=[2])
    assert result.outcomes[2].error == "OutOfPlace"
    assert "`step` (trainings.py) is 0 and should be 4" in result.outcomes[2].message
