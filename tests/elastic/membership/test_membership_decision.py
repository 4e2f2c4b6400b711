"""What is decided from the claims, and that it survives being written down."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.elastic.membership import Claim, Decision, LaneDeal, Member, Outnumbered, View, decide
from lockstep.elastic.membership.view import claim_from_json, claim_to_json
from lockstep.lanes import Assignment


def _member(slot: int) -> Member:
    return Member(f"w{slot}", slot, f"127.0.0.1:{5000 + slot}")


def _claim(slot: int, step: int = 4, prepared: bool = False, leaving: bool = False) -> Claim:
    return Claim(_member(slot), 1, step, prepared, leaving)


def _newcomer(slot: int) -> Claim:
    return Claim(_member(slot), 0, 0)


def _uids(decision: Decision) -> list[str]:
    return [member.uid for member in decision.view.members]


def test_a_step_for_which_somebody_has_not_done_its_part_is_computed_again() -> None:
    assert decide([_claim(0, prepared=True), _claim(1)], [], []).step == 4


def test_a_step_that_nobody_has_gone_past_is_computed_again_although_all_who_are_left_have_done_their_part() -> None:
    assert decide([_claim(0, prepared=True), _claim(1, prepared=True)], [_member(2)], []).step == 4


def test_a_step_that_somebody_has_committed_is_completed_by_all() -> None:
    assert decide([_claim(0, prepared=True), _claim(1, step=5)], [], []).step == 5


def test_a_step_that_only_a_leaver_has_committed_is_completed_by_those_who_stay() -> None:
    decision = decide([_claim(0, prepared=True), _claim(1, step=5, leaving=True)], [], [])
    assert (decision.step, _uids(decision)) == (5, ["w0"])


def test_no_newcomer_is_admitted_while_somebody_completes_a_step() -> None:
    assert decide([_claim(0, step=5), _claim(1, prepared=True), _newcomer(2)], [], []).newcomers == ()


def test_newcomers_are_admitted_one_at_a_time_in_the_order_in_which_they_came() -> None:
    assert decide([_claim(0), _newcomer(3), _newcomer(2)], [], []).newcomers == ("w3",)


def test_of_two_newcomers_in_one_slot_the_later_is_admitted() -> None:
    later = replace(_newcomer(2), member=Member("again", 2, ""))
    assert decide([_claim(0), _newcomer(2), later], [], []).newcomers == ("again",)


def test_a_newcomer_is_junior_to_all_who_were_there_whatever_its_slot() -> None:
    decision = decide([_claim(1), _claim(2), _newcomer(0)], [], [])
    assert [member.slot for member in sorted(decision.view.members, key=lambda member: member.seniority)] == [1, 2, 0]


def test_the_next_generation_is_higher_than_any_that_somebody_has_heard_of() -> None:
    assert decide([_claim(0), replace(_claim(1), generation=7)], [], []).view.generation == 8


@pytest.mark.parametrize(
    ("here", "silent"),
    [([2], [0, 1]), ([1, 2], [0, 3]), ([1], [0])],
    ids=["fewer", "a tie with slot 0 there", "one and one"],
)
def test_those_who_may_be_the_lesser_half_do_not_go_on(here: Sequence[int], silent: Sequence[int]) -> None:
    with pytest.raises(Outnumbered):
        decide([_claim(slot) for slot in here], [], [_member(slot) for slot in silent])


@pytest.mark.parametrize(("here", "silent"), [([1, 2], [0]), ([0, 3], [1, 2]), ([0], [1])])
def test_those_who_are_the_greater_half_go_on(here: Sequence[int], silent: Sequence[int]) -> None:
    decision = decide([_claim(slot) for slot in here], [], [_member(slot) for slot in silent])
    assert [member.slot for member in decision.view.members] == list(here)


def test_the_dead_do_not_count_against_those_who_live() -> None:
    assert _uids(decide([_claim(3)], [_member(slot) for slot in (0, 1, 2)], [])) == ["w3"]


def test_leavers_do_not_count_for_those_who_stay() -> None:
    with pytest.raises(Outnumbered):
        decide([_claim(1), _claim(2, leaving=True)], [], [_member(0)])


_MEMBERS = st.builds(Member, st.text(), st.integers(0, 99), st.text(), st.integers(0, 99))
_SETS = st.lists(_MEMBERS, max_size=4, unique_by=lambda member: member.slot).map(
    lambda members: tuple(sorted(members, key=lambda member: member.slot))
)
_VIEWS = st.builds(View, st.integers(1, 99), _SETS)
_LANES = st.none() | st.builds(Assignment.even, st.integers(1, 9), st.integers(1, 4))
_DECISIONS = st.builds(Decision, _VIEWS, st.integers(0, 99), _LANES, st.lists(st.text()).map(tuple), _SETS, _SETS)


@given(_DECISIONS)
def test_a_decision_survives_being_written_as_json(decision: Decision) -> None:
    assert Decision.from_json(decision.to_json()) == decision


@given(st.builds(Claim, _MEMBERS, st.integers(0, 9), st.integers(0, 9), *[st.booleans()] * 3))
def test_a_claim_survives_being_written_as_json(claim: Claim) -> None:
    assert claim_from_json(claim_to_json(claim)) == claim


def test_the_lanes_of_all_are_part_of_the_decision() -> None:
    decision = decide([_claim(0), _claim(2)], [_member(1)], [], LaneDeal(5))
    assert decision.assignment == Assignment.even(5, 2)


def test_a_newcomer_carries_no_lanes_until_it_has_proven_itself() -> None:
    fresh = Claim(replace(_member(1), uid="new", fresh=True), 0, 0)
    decision = decide([_claim(0), _claim(2), fresh], [], [], LaneDeal(4))
    assert decision.assignment.lanes_of == ((0, 1), (), (2, 3))
    proving = replace(_claim(1), is_proving=True)
    assert decide([_claim(0), proving, _claim(2)], [], [], LaneDeal(4)).assignment.lanes_of == ((0, 1), (), (2, 3))
    needed = decide([_claim(0), _claim(2), fresh], [], [], LaneDeal(3, spares_newcomers=False))
    assert needed.assignment.lanes_of == ((0,), (1,), (2,))


def test_lanes_given_by_hand_stay_with_their_slots_and_those_of_the_lost_go_to_others() -> None:
    deal = LaneDeal(4, ((3,), (0, 1), (2,)))
    assert decide([_claim(0), _claim(2)], [_member(1)], [], deal).assignment.lanes_of == ((0, 3), (1, 2))


def test_a_decision_in_which_nobody_stays_has_no_lanes() -> None:
    assert decide([_claim(0, leaving=True)], [], [], LaneDeal(4)).assignment is None
