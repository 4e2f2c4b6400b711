"""The histories of scripts.py: all who live end in one generation, newcomers too, and the steps go on."""

from collections.abc import Callable

import pytest
import scripts
from simulation import Simulation

from lockstep.elastic.membership import Liveness, Member, joining
from lockstep.elastic.membership.actions import FindMembers, SendClaim
from lockstep.elastic.membership.events import MembersFound, Probed


@pytest.mark.parametrize("script", scripts.ALL, ids=lambda script: script.__name__)
def test_all_who_live_go_on_together(script: Callable[[], Simulation]) -> None:
    script()


def test_a_replacement_does_not_become_the_host_before_those_who_were_there() -> None:
    simulation = scripts.newcomer_waiting_while_a_lower_slot_is_admitted()
    keepers = [worker.uid for worker in simulation.present if worker.machine.is_coordinator]
    assert keepers == ["w1"]


def test_ranks_follow_slots_whoever_was_admitted_first() -> None:
    simulation = scripts.newcomer_waiting_while_a_lower_slot_is_admitted()
    assert [member.uid for member in simulation.workers["w1"].machine.view.members] == ["w0'", "w1", "w3"]


ZERO, ONE = Member("w0", 0, "a:1"), Member("w1", 1, "b:1")


@pytest.mark.parametrize(
    ("slot", "found", "asks"),
    [
        (2, Liveness.UNREACHABLE, FindMembers(silent=(ONE,))),
        (1, Liveness.ALIVE, FindMembers(taken=(ONE,))),
        (1, Liveness.DEAD, None),
    ],
    ids=["it does not reach one", "its slot is taken", "the one in its slot is dead"],
)
def test_a_newcomer_asks_only_where_it_reaches_all_and_its_slot_is_free(
    slot: int, found: Liveness, asks: FindMembers | None
) -> None:
    state, _ = joining(Member("new", slot, "c:1"))
    for event in (MembersFound((ZERO, ONE)), Probed("w0", Liveness.ALIVE), Probed("w1", found)):
        state, todo = state.on(event)
    assert todo == ((SendClaim(ZERO, state.claim),) if asks is None else (asks,))
