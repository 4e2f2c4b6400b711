"""A second worker is killed while the others recover from the loss of the first."""

import pytest
from disturbed import Plan, disturbed
from faults import Fault, sampled
from trainings import Training

SHORT = Training()
HOST = ["recovers", "CloseWire", "GatherClaims", "SendDecision", "Open", "hand_over"]
GUEST = ["recovers", "CloseWire", "Probe", "SendClaim", "Open", "hand_over"]
WHEN = ["before", "after"]


@pytest.mark.parametrize(("action", "when"), sampled([(action, when) for action in HOST for when in WHEN], 4, skip=1))
def test_the_one_at_whose_door_all_meet_is_killed_at_any_action(action: str, when: str) -> None:
    result = disturbed(SHORT, 4, Plan((Fault(2, 2, "before waits"), Fault(0, 2, f"{when} {action}"))))
    assert {sizes[-1] for sizes in result.values("sizes")} == {2}


@pytest.mark.parametrize(("action", "when"), sampled([(action, when) for action in GUEST for when in WHEN], 4, skip=1))
def test_one_that_comes_to_the_door_is_killed_at_any_action(action: str, when: str) -> None:
    result = disturbed(SHORT, 4, Plan((Fault(2, 2, "before waits"), Fault(3, 2, f"{when} {action}"))))
    assert {sizes[-1] for sizes in result.values("sizes")} == {2}


@pytest.mark.parametrize("action", ["GatherClaims", "SendDecision", "Open"])
def test_the_second_host_is_killed_after_the_first(action: str) -> None:
    faults = (Fault(0, 2, "before waits"), Fault(1, 2, f"after {action}"))
    result = disturbed(SHORT, 4, Plan(faults))
    assert {sizes[-1] for sizes in result.values("sizes")} == {2}


def test_the_host_is_killed_when_it_has_answered_one_and_not_the_other() -> None:
    disturbed(SHORT, 4, Plan((Fault(3, 2, "before waits"), Fault(0, 2, "before SendDecision", 2))))


@pytest.mark.parametrize("first", ["before send in commit exchange", "after prepares"])
@pytest.mark.parametrize("worker", [0, 1])
def test_a_step_that_some_hold_is_settled_although_another_dies(first: str, worker: int) -> None:
    disturbed(SHORT, 4, Plan((Fault(3, 2, first, 1), Fault(worker, 2, "before Open"))))


def test_the_host_is_killed_when_it_has_committed_and_another_has_not() -> None:
    faults = (Fault(2, 2, "before send in commit exchange", 2), Fault(0, 2, "after commits"))
    disturbed(SHORT, 4, Plan(faults))


@pytest.mark.parametrize("worker", [0, 1])
def test_a_kill_in_the_step_that_is_computed_again_costs_nothing(worker: int) -> None:
    disturbed(SHORT, 3, Plan((Fault(2, 2, "before waits"), Fault(worker, 2, "before waits", 2))))


def test_everyone_but_one_is_killed_while_recovering() -> None:
    faults = (Fault(3, 2, "before waits"), Fault(0, 2, "after SendDecision"), Fault(1, 2, "before Open"))
    result = disturbed(SHORT, 4, Plan(faults))
    assert [sizes[-1] for sizes in result.values("sizes")] == [1]


@pytest.mark.soak
@pytest.mark.parametrize("wire", ["gloo", "hierarchical"])
@pytest.mark.parametrize(("worker", "point"), [(0, "after SendDecision"), (1, "before Open")])
def test_a_generation_that_fails_to_form_is_formed_again_on_any_wire(wire: str, worker: int, point: str) -> None:
    faults = (Fault(2, 2, "before waits"), Fault(worker, 2, point))
    disturbed(Training(options=(("wire", wire),)), 4, Plan(faults))
