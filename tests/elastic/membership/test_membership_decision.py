"""What is decided from the claims, and that it survives being written down."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.elastic.membership import Claim, Decision, LaneDeal, Member, Outnumbered, Poll, Verdict, View, decide
from lockstep.elastic.membership.quorum import Overtaken, mutually_reachable
from lockstep.elastic.membership.view import ONE_LANE, Attempt, GenerationId, claim_from_json, claim_to_json
from lockstep.lanes import Assignment

FIRST = GenerationId(1, "w0")


def _member(slot: int) -> Member:
    return Member(f"w{slot}", slot, f"127.0.0.1:{5000 + slot}")


def _claim(slot: int, step: int = 4, prepared: bool = False, leaving: bool = False) -> Claim:
    return Claim(_member(slot), 1, step, prepared, leaving, formed=FIRST)


def _verdict(
    claims: Sequence[Claim], lost: Sequence[Member] = (), silent: Sequence[Member] = (), deal: LaneDeal = ONE_LANE
) -> Verdict:
    """What is decided where all of them, and those who are gone, were the first generation."""
    members = [claim.member for claim in claims if not claim.is_newcomer] + [*lost, *silent]
    own = Attempt(FIRST, tuple(member.uid for member in sorted(members, key=lambda member: member.slot)))
    return decide(Poll(tuple(claims), tuple(lost), tuple(silent), own), deal)


def _decide(*polled: Any) -> Decision:
    """The same, where a tie is won by the longest member."""
    verdict = _verdict(*polled)
    if not all(tie.has_longest for tie in verdict.ties):
        raise Outnumbered
    return verdict.decision


def _newcomer(slot: int) -> Claim:
    return Claim(_member(slot), 0, 0)


def _uids(decision: Decision) -> list[str]:
    return [member.uid for member in decision.view.members]


def test_a_step_for_which_somebody_has_not_done_its_part_is_computed_again() -> None:
    assert _decide([_claim(0, prepared=True), _claim(1)], [], []).step == 4


def test_a_step_that_nobody_has_gone_past_is_computed_again_although_all_who_are_left_have_done_their_part() -> None:
    assert _decide([_claim(0, prepared=True), _claim(1, prepared=True)], [_member(2)], []).step == 4


def test_a_step_that_somebody_has_committed_is_completed_by_all() -> None:
    assert _decide([_claim(0, prepared=True), _claim(1, step=5)], [], []).step == 5


def test_a_step_that_only_a_leaver_has_committed_is_completed_by_those_who_stay() -> None:
    decision = _decide([_claim(0, prepared=True), _claim(1, step=5, leaving=True)], [], [])
    assert (decision.step, _uids(decision)) == (5, ["w0"])


def test_no_newcomer_is_admitted_while_somebody_completes_a_step() -> None:
    assert _decide([_claim(0, step=5), _claim(1, prepared=True), _newcomer(2)], [], []).newcomers == ()


def test_newcomers_that_have_asked_are_admitted_together() -> None:
    assert _decide([_claim(0), _newcomer(3), _newcomer(2)], [], []).newcomers == ("w3", "w2")


def test_of_two_newcomers_in_one_slot_the_later_is_admitted() -> None:
    later = replace(_newcomer(2), member=Member("again", 2, ""))
    assert _decide([_claim(0), _newcomer(2), later], [], []).newcomers == ("again",)


def test_a_newcomer_is_junior_to_all_who_were_there_whatever_its_slot() -> None:
    decision = _decide([_claim(1), _claim(2), _newcomer(0)], [], [])
    assert [member.slot for member in sorted(decision.view.members, key=lambda member: member.seniority)] == [1, 2, 0]


def test_the_next_generation_is_higher_than_any_that_somebody_has_heard_of() -> None:
    assert _decide([_claim(0), replace(_claim(1), generation=7)], [], []).view.generation == 8


@pytest.mark.parametrize(
    ("here", "silent"),
    [([2], [0, 1]), ([1, 2], [0, 3]), ([1], [0])],
    ids=["fewer", "a tie with slot 0 there", "one and one"],
)
def test_those_who_may_be_the_lesser_half_do_not_go_on(here: Sequence[int], silent: Sequence[int]) -> None:
    with pytest.raises(Outnumbered):
        _decide([_claim(slot) for slot in here], [], [_member(slot) for slot in silent])


@pytest.mark.parametrize(("here", "silent"), [([1, 2], [0]), ([0, 3], [1, 2]), ([0], [1])])
def test_those_who_are_the_greater_half_go_on(here: Sequence[int], silent: Sequence[int]) -> None:
    decision = _decide([_claim(slot) for slot in here], [], [_member(slot) for slot in silent])
    assert [member.slot for member in decision.view.members] == list(here)


def test_the_dead_do_not_count_against_those_who_live() -> None:
    assert _uids(_decide([_claim(3)], [_member(slot) for slot in (0, 1, 2)], [])) == ["w3"]


def test_the_dead_count_as_soon_as_somebody_is_silent_with_whom_they_may_have_gone_on() -> None:
    with pytest.raises(Outnumbered):
        _decide([_claim(3)], [_member(0), _member(1)], [_member(2)])


def test_two_equal_halves_are_a_tie_that_each_names_alike() -> None:
    here = _verdict([_claim(0), _claim(1)], [], [_member(2), _member(3)]).ties
    there = _verdict([_claim(2), _claim(3)], [], [_member(0), _member(1)]).ties
    assert [(tie.id, tie.here, tie.has_longest) for tie in (*here, *there)] == [
        (FIRST, ("w0", "w1"), True),
        (FIRST, ("w2", "w3"), False),
    ]


_TRIED = Attempt(GenerationId(2, "w1"), ("w1", "w2", "w3"))


def test_those_who_go_on_must_be_most_of_a_generation_that_one_of_them_has_tried_to_form() -> None:
    silent = [_member(3), _member(4)]
    with pytest.raises(Outnumbered):  # workers 2 and 3 may have formed it, and worker 1 not
        _decide([_claim(0), replace(_claim(1), attempts=(_TRIED,)), _claim(5)], [], [_member(2), *silent][:2])


def test_an_attempt_that_a_member_of_it_has_not_tried_does_not_count() -> None:
    tried = replace(_claim(1), attempts=(_TRIED,))
    assert _uids(_decide([_claim(0), tried, _claim(2)], [], [_member(3)])) == ["w0", "w1", "w2"]


def test_a_coordinator_without_which_others_went_on_does_not_decide() -> None:
    later = replace(_claim(1), formed=GenerationId(2, "w1"))
    with pytest.raises(Overtaken):
        _decide([_claim(0), later])


def _cut(slot: int, *silent: int) -> Claim:
    return replace(_claim(slot), silent=tuple(f"w{other}" for other in silent))


@pytest.mark.parametrize(
    ("claims", "kept"),
    [
        ([_cut(0), _cut(1, 2), _cut(2)], [0, 1]),
        ([_cut(0, 1), _cut(1), _cut(2)], [0, 2]),
        ([_cut(0, 1), _cut(1, 2), _cut(2)], [0, 2]),
        ([_cut(0, 2, 3, 4), _cut(1, 2, 3, 4), _cut(2), _cut(3), _cut(4)], [2, 3, 4]),
        ([_cut(slot, *({*range(40)} - {slot})) for slot in range(40)], [0]),
    ],
    ids=["the lower slot", "heard from one side", "the middle one", "the larger host", "more than can be tried"],
)
def test_the_largest_set_that_reach_one_another_is_kept(claims: list[Claim], kept: list[int]) -> None:
    assert [claim.member.slot for claim in mutually_reachable(claims)] == kept


def test_those_who_claim_and_are_not_kept_are_told_who_goes_on() -> None:
    decision = _decide([_cut(0), _cut(1, 2), _cut(2, 1)])
    assert (_uids(decision), [member.uid for member in decision.left]) == (["w0", "w1"], ["w2"])


def test_leavers_do_not_count_for_those_who_stay() -> None:
    with pytest.raises(Outnumbered):
        _decide([_claim(1), _claim(2, leaving=True)], [], [_member(0)])


_MEMBERS = st.builds(Member, st.text(), st.integers(0, 99), st.text(), st.integers(0, 99))
_SETS = st.lists(_MEMBERS, max_size=4, unique_by=lambda member: member.slot).map(
    lambda members: tuple(sorted(members, key=lambda member: member.slot))
)
_VIEWS = st.builds(View, st.integers(1, 99), _SETS)
_LANES = st.none() | st.builds(Assignment.even, st.integers(1, 9), st.integers(1, 4))
_TEXTS = st.lists(st.text()).map(tuple)
_DECISIONS = st.builds(Decision, _VIEWS, st.integers(0, 99), _LANES, _TEXTS, _SETS, _SETS, st.text())
_IDS = st.builds(GenerationId, st.integers(0, 9), st.text())
_ATTEMPTS = st.lists(st.builds(Attempt, _IDS, _TEXTS), max_size=3).map(tuple)


@given(_DECISIONS)
def test_a_decision_survives_being_written_as_json(decision: Decision) -> None:
    assert Decision.from_json(decision.to_json()) == decision


@given(st.builds(Claim, _MEMBERS, st.integers(0, 9), st.integers(0, 9), *[st.booleans()] * 2, _IDS, _ATTEMPTS, _TEXTS))
def test_a_claim_survives_being_written_as_json(claim: Claim) -> None:
    assert claim_from_json(claim_to_json(claim)) == claim


def test_the_lanes_of_all_are_part_of_the_decision() -> None:
    decision = _decide([_claim(0), _claim(2)], [_member(1)], [], LaneDeal(5))
    assert decision.assignment == Assignment.even(5, 2)


def test_a_newcomer_carries_lanes_from_the_first_step() -> None:
    fresh = Claim(replace(_member(1), uid="new", fresh=True), 0, 0)
    decision = _decide([_claim(0), _claim(2), fresh], [], [], LaneDeal(5))
    assert decision.assignment == Assignment.even(5, 3)


def test_lanes_given_by_hand_stay_with_their_slots_and_those_of_the_lost_go_to_others() -> None:
    deal = LaneDeal(4, ((3,), (0, 1), (2,)))
    assert _decide([_claim(0), _claim(2)], [_member(1)], [], deal).assignment.lanes_of == ((0, 3), (1, 2))


def test_a_decision_in_which_nobody_stays_has_no_lanes() -> None:
    assert _decide([_claim(0, leaving=True)], [], [], LaneDeal(4)).assignment is None
