"""When a probation is over, and who leaves where workers disagree."""

from types import SimpleNamespace

import pytest

from lockstep.elastic.guard import Guard
from lockstep.elastic.membership import Member
from lockstep.elastic.newcomer import Probation, misfits
from lockstep.launch.exits import OutOfPlace

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


class Probationer(Guard):
    """A guard of which only what it says is asked."""

    def __init__(self, *, is_on_probation: bool) -> None:
        self.said: list[str] = []
        self.formation = SimpleNamespace(is_on_probation=is_on_probation)  # type: ignore[assignment]
        self._state = SimpleNamespace(steps=SimpleNamespace(step=7))  # type: ignore[assignment]
        self._events = SimpleNamespace(note=lambda text, **_: self.said.append(text))  # type: ignore[assignment]


def test_what_a_resumed_run_only_notes_may_send_a_newcomer_away() -> None:
    newcomer, resumed = Probationer(is_on_probation=True), Probationer(is_on_probation=False)
    for guard in (newcomer, resumed):
        guard.note("it may be meant so")
    resumed.note("it begins anew", may_join=False)
    assert (newcomer.said, resumed.said) == (["it may be meant so"], ["it may be meant so", "it begins anew"])
    with pytest.raises(OutOfPlace, match="cannot join at step 7: it begins anew"):
        newcomer.note("it begins anew", may_join=False)
