"""When a probation is over, and who leaves where workers disagree."""

from types import SimpleNamespace

import pytest

from lockstep.elastic.formation import Formation
from lockstep.elastic.guard import Guard
from lockstep.elastic.membership import Member
from lockstep.elastic.newcomer import Probation, misfits
from lockstep.launch.channels.exits import OutOfPlace

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


class Formed(Formation):
    """A formation of which only those on probation are asked. Turn 7 has begun, and three updates were made."""

    def __init__(self) -> None:
        self._probation, self.looks_closely = Probation(), False
        self._places = SimpleNamespace(  # type: ignore[assignment]
            turn=SimpleNamespace(number=7), updates={"optimizer": 3}, begins_turn=True
        )

    def come(self, *members: Member, newcomers: tuple[str, ...] = ()) -> frozenset[str]:
        view = SimpleNamespace(members=[*FOUNDERS, *members])
        self.recovery = SimpleNamespace(membership=SimpleNamespace(view=view))  # type: ignore[assignment]
        self._put_on_probation(newcomers)
        return self._probation.uids

    def step(self, turn: int, updates: int, *, begins_turn: bool = True) -> frozenset[str]:
        self._places.turn.number, self._places.updates = turn, {"optimizer": updates}
        self._places = SimpleNamespace(**{**vars(self._places), "begins_turn": begins_turn})  # type: ignore[assignment]
        self.prove()
        self.committed(None)
        return self._probation.uids


def test_newcomers_are_looked_at_closely_until_they_have_proved_themselves() -> None:
    formed = Formed()
    assert formed.come(NEWCOMER, newcomers=("c",)) == {"c"}
    assert formed.looks_closely
    assert formed.step(7, 4) == {"c"}
    assert formed.step(8, 4, begins_turn=False) == {"c"}
    assert formed.looks_closely
    assert formed.step(8, 4) == set()
    assert not formed.looks_closely


def test_a_copy_is_looked_at_closely_in_its_first_step_alone() -> None:
    formed = Formed()
    assert formed.come(Member("e", 2, "", since=4), newcomers=("e",)) == set()
    assert formed.looks_closely
    formed.step(7, 3)
    assert not formed.looks_closely


def test_who_is_on_probation_stays_so_when_others_come_and_go() -> None:
    formed, other = Formed(), Member("d", 3, "", since=5, fresh=True)
    formed.come(NEWCOMER, newcomers=("c",))
    formed.step(8, 3)
    assert formed.come(NEWCOMER, other, newcomers=("d",)) == {"c", "d"}
    assert formed.step(8, 4) == {"c", "d"}
    assert formed.come(other) == {"d"}
    assert formed.looks_closely
    assert formed.come() == set()
    assert not formed.looks_closely
