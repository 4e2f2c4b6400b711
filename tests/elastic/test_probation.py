"""When newcomers carry lanes, and who leaves where workers disagree."""

from lockstep.elastic.membership import Member
from lockstep.elastic.newcomer import Probation, misfits

FOUNDERS = [Member("a", 0, ""), Member("b", 1, "")]
NEWCOMER = Member("c", 2, "", since=3, fresh=True)


def test_probation_is_over_after_a_whole_turn_with_an_update_in_it() -> None:
    probation = Probation(frozenset("c"), turn=7, updates=3)
    assert not probation.is_over(turn=7, updates=4)
    assert not probation.is_over(turn=8, updates=3)
    assert probation.is_over(turn=8, updates=4)


def test_a_script_that_updates_without_an_optimizer_is_not_waited_for() -> None:
    assert Probation(frozenset("c"), turn=7, updates=0).is_over(turn=8, updates=0)


def test_a_newcomer_that_disagrees_with_the_founders_leaves() -> None:
    assert misfits([(0, 1), (2,)], [*FOUNDERS, NEWCOMER]) == [2]


def test_founders_that_disagree_are_the_scripts_fault() -> None:
    assert misfits([(0,), (1, 2)], [*FOUNDERS, NEWCOMER]) is None


def test_where_all_founders_are_gone_the_longest_member_is_right() -> None:
    members = [Member("d", 0, "", since=5, fresh=True), NEWCOMER]
    assert misfits([(0,), (1,)], members) == [0]


def test_a_copy_of_a_founder_is_believed_like_one() -> None:
    copied = Member("e", 2, "", since=4)
    assert misfits([(0, 1), (2,)], [*FOUNDERS, copied]) is None


def test_workers_that_were_only_compared_in_pairs_send_nobody_away() -> None:
    assert misfits((), [*FOUNDERS, NEWCOMER]) is None
