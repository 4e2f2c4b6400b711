"""What the coordinator decides for all.

# Note [Complete or redo]
# A worker goes past a step when every member has signalled that it has done its part. A worker that has done its part
# and misses a signal does not know whether the gradient in its memory is complete; but if anybody has gone past the
# step, it is. So then all who are left complete the step. If nobody has, it is computed again: from the same samples,
# with the same random numbers, to the same bits; so it does not matter what a worker that died had made of it.

# Note [All who have asked]
# Newcomers that wait are admitted together: the wire is opened once, and the state is sent to all at the same time. See
# Note [Several newcomers] in machine.py for what becomes of them when the forming fails halfway.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from lockstep.elastic.membership.quorum import Tie, last_formed, mutually_reachable, ties
from lockstep.elastic.membership.view import NEVER, ONE_LANE, Attempt, Claim, Decision, LaneDeal, Member, View


@dataclass(frozen=True)
class Poll:
    """What a coordinator knows when nobody is missing: the claims that have come, and who is gone without one.

    `own` is the generation that the coordinator was part of last. Of the `lost`, those in `doubted` (by uid) were
    silent before they were found dead.
    """

    claims: tuple[Claim, ...]
    lost: tuple[Member, ...] = ()
    silent: tuple[Member, ...] = ()
    own: Attempt = NEVER
    doubted: frozenset[str] = frozenset()

    @property
    def members(self) -> list[Claim]:
        """The claims of those who have a state."""
        return [claim for claim in self.claims if not claim.is_newcomer]


@dataclass(frozen=True)
class Verdict:
    """A decision, which holds if all `ties` are won."""

    decision: Decision
    ties: tuple[Tie, ...] = ()


def decide(poll: Poll, deal: LaneDeal = ONE_LANE, decider: str = "") -> Verdict:
    """The next generation of those who claim and reach one another, and the lanes of each.

    Raises Outnumbered and Overtaken. See Note [Complete or redo], and Note [Who may go on] in quorum.py.
    """
    current = poll.members
    last = last_formed(current, poll.own)
    entitled = [claim for claim in current if claim.member.uid in last.uids]
    step = _step(entitled)
    able = [claim for claim in entitled if not claim.leaving and _can_follow(claim, step)]
    staying = mutually_reachable(able)
    dead = {member.uid for member in poll.lost} - poll.doubted
    generation = max(claim.generation for claim in current) + 1
    admitted = _admitted(poll.claims, staying, step)
    newcomers = [replace(claim.member, since=generation) for claim in admitted]
    members = sorted([claim.member for claim in staying] + newcomers, key=lambda member: member.slot)
    decision = Decision(
        view=View(generation, tuple(members)),
        step=step,
        assignment=deal.assignment(members) if members else None,
        newcomers=tuple(member.uid for member in newcomers),
        lost=poll.lost + poll.silent,
        left=tuple(claim.member for claim in current if claim not in staying),
        decider=decider,
    )
    return Verdict(decision, ties(last, poll.claims, [*staying, *admitted], dead))


def completes(claim: Claim, step: int) -> bool:
    """Whether a worker with this claim has a gradient to hand over before `step`."""
    return claim.step == step - 1 and claim.prepared


def _step(current: Collection[Claim]) -> int:
    """The step after the last that anybody has gone past. See Note [Complete or redo]."""
    return max(claim.step for claim in current)


def _can_follow(claim: Claim, step: int) -> bool:
    return claim.step == step or completes(claim, step)


def _admitted(claims: Collection[Claim], staying: Collection[Claim], step: int) -> list[Claim]:
    """The newcomers that have asked, if any may come. See Note [All who have asked].

    They are given the state as it is before `step`, which nobody has as long as somebody must complete one. When all
    others leave, nobody could give it.
    """
    if not staying or any(claim.step != step for claim in staying):
        return []
    by_slot = {claim.member.slot: claim for claim in claims if claim.is_newcomer}  # of two, the later is alive
    taken = {claim.member.slot for claim in staying}
    return [claim for slot, claim in by_slot.items() if slot not in taken]
