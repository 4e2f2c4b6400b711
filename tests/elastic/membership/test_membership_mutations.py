"""The simulation notices: the machine is broken on purpose, one rule at a time, and some history must fail."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import scripts
from histories import disturbed, parted_amid_faults, partitioned
from simulation import Violation

from lockstep.elastic.membership import Member, Membership, actions, events, machine, quorum
from lockstep.elastic.membership import decision as deciding
from lockstep.elastic.membership.view import Liveness

Patch = pytest.MonkeyPatch


def commits_without_hearing_all(patch: Patch) -> None:
    right = Membership.on

    def on(self: Membership, event: events.Event) -> machine.Next:
        match event:
            case events.Prepared():
                return replace(self, prepared=True)._committed()
            case events.AllPrepared():
                return self, ()
        return right(self, event)

    patch.setattr(Membership, "on", on)


def redoes_what_somebody_has_committed(patch: Patch) -> None:
    patch.setattr(deciding, "_step", lambda current: min(claim.step for claim in current))


def completes_what_only_some_are_prepared_for(patch: Patch) -> None:
    patch.setattr(deciding, "_step", lambda current: max(claim.step + claim.prepared for claim in current))


def completes_what_all_who_are_left_are_prepared_for(patch: Patch) -> None:
    def step(current: Any) -> int:
        furthest: int = max(claim.step for claim in current)
        return furthest + all(claim.step == furthest and claim.prepared for claim in current)

    patch.setattr(deciding, "_step", step)


def never_completes(patch: Patch) -> None:
    patch.setattr(machine, "completes", lambda claim, step: False)


def reuses_the_number_of_a_generation(patch: Patch) -> None:
    right = deciding.View
    patch.setattr(deciding, "View", lambda generation, members: right(generation - 1, members))


def admits_newcomers_while_somebody_completes(patch: Patch) -> None:
    def admitted(claims: Any, staying: Any, step: int) -> list[Any]:
        taken = {claim.member.slot for claim in staying}
        return [claim for claim in claims if claim.is_newcomer and claim.member.slot not in taken][:1]

    patch.setattr(deciding, "_admitted", admitted)


def newcomers_are_taken_for_members(patch: Patch) -> None:
    right = Membership._noting

    def noting(self: Membership, uid: str, health: Liveness) -> Membership:
        return right(self, uid, Liveness.ALIVE if health is Liveness.NEW else health)

    patch.setattr(Membership, "_noting", noting)


def one_worker_looks_for_the_highest_slot(patch: Patch) -> None:
    right = Membership._turn_to_longest

    def turn(self: Membership) -> machine.Next:
        candidates = [member for member in self.known if member.uid in self.alive]
        if self.me.slot != 1 or not candidates or self.is_newcomer:
            return right(self)
        host = candidates[-1]
        return replace(self, stage=machine.MembershipStage.CLAIMING, host=host), (actions.SendClaim(host, self.claim),)

    patch.setattr(Membership, "_turn_to_longest", turn)


def meets_at_the_lowest_slot(patch: Patch) -> None:
    patch.setattr(Member, "seniority", property(lambda self: (0, self.slot)))


def forgets_the_newcomers_of_a_failed_generation(patch: Patch) -> None:
    right = Membership._unformed

    def unformed(self: Membership) -> machine.Next:
        assert self.decision is not None
        new = self.decision.newcomers
        state, todo = right(self)
        known = tuple(member for member in state.known if member.uid not in new)
        if state.stage is machine.MembershipStage.GATHERING:
            state, todo = replace(state, known=known)._settle()
            return state, (actions.CloseWire(), *todo)
        return replace(state, known=known), todo

    patch.setattr(Membership, "_unformed", unformed)


def forgets_newcomers_that_could_not_be_admitted(patch: Patch) -> None:
    right = Membership._answer

    def answer(self: Membership, decision: Any) -> machine.Next:
        state, todo = right(self, decision)
        return replace(state, claims=()), todo

    patch.setattr(Membership, "_answer", answer)


def decides_without_those_who_live_but_have_not_called(patch: Patch) -> None:
    right = Membership._probed

    def probed(self: Membership, uid: str, health: Any) -> machine.Next:
        if self.stage is machine.MembershipStage.GATHERING:
            return replace(self, dead=self.dead | {uid})._settle()
        return right(self, uid, health)

    patch.setattr(Membership, "_probed", probed)


def keeps_the_number_of_a_failed_generation(patch: Patch) -> None:
    right = Membership._unformed

    def unformed(self: Membership) -> machine.Next:
        assert self.decision is not None
        low = replace(self.decision, view=replace(self.decision.view, generation=self.view.generation))
        return right(replace(self, decision=low))

    patch.setattr(Membership, "_unformed", unformed)


def both_halves_of_a_tie_go_on(patch: Patch) -> None:
    patch.setattr(Membership, "_break_tie", lambda self, verdict: self._answer(verdict.decision))


def nobody_is_outnumbered(patch: Patch) -> None:
    patch.setattr(deciding, "ties", lambda *polled: ())


def every_half_wins_with_the_witness(patch: Patch) -> None:
    right = Membership._witnessed
    patch.setattr(Membership, "_witnessed", lambda self, has_won, why: right(self, True, why))


def who_was_left_behind_is_not_told(patch: Patch) -> None:
    right = Membership._probed

    def probed(self: Membership, uid: str, health: Liveness) -> machine.Next:
        return right(self, uid, Liveness.ALIVE if health is Liveness.ELSEWHERE else health)

    patch.setattr(Membership, "_probed", probed)


def those_who_do_not_reach_one_another_try_together(patch: Patch) -> None:
    patch.setattr(deciding, "mutually_reachable", list)


def the_dead_never_count(patch: Patch) -> None:
    right = quorum._weigh

    def weigh(attempt: Any, here: Any, leaving: Any, harmless: Any) -> Any:
        return right(attempt, here, leaving | (harmless - here), harmless)

    patch.setattr(quorum, "_weigh", weigh)


MUTATIONS = (
    commits_without_hearing_all,
    redoes_what_somebody_has_committed,
    completes_what_only_some_are_prepared_for,
    completes_what_all_who_are_left_are_prepared_for,
    never_completes,
    reuses_the_number_of_a_generation,
    keeps_the_number_of_a_failed_generation,
    admits_newcomers_while_somebody_completes,
    newcomers_are_taken_for_members,
    one_worker_looks_for_the_highest_slot,
    meets_at_the_lowest_slot,
    forgets_the_newcomers_of_a_failed_generation,
    forgets_newcomers_that_could_not_be_admitted,
    decides_without_those_who_live_but_have_not_called,
    both_halves_of_a_tie_go_on,
    nobody_is_outnumbered,
    every_half_wins_with_the_witness,
    who_was_left_behind_is_not_told,
    those_who_do_not_reach_one_another_try_together,
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_broken_rule_is_noticed(mutation: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    with pytest.raises(Violation):
        _try_everything()


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_that_the_dead_never_count_is_noticed(monkeypatch: Patch) -> None:
    the_dead_never_count(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(3000):
            partitioned(seed)


def _try_everything() -> None:
    for script in scripts.ALL:
        try:
            script()
        except AssertionError as error:  # a broken rule may keep a script from reaching its moment: that proves nothing
            if isinstance(error, Violation):
                raise
    for seed in range(200):
        disturbed(seed)
        parted_amid_faults(seed)
        partitioned(seed)
