"""What the coordinator decides for all.

# Note [Complete or redo]
# A worker goes past a step when every member has signalled that it has done its part. A worker that has done its part
# and misses a signal does not know whether the gradient in its memory is complete; but if anybody has gone past the
# step, it is. So then all who are left complete the step. If nobody has, it is computed again: from the same samples,
# with the same random numbers, to the same bits; so it does not matter what a worker that died had made of it.

# Note [Dead or silent]
# A worker whose kernel refuses the connection is dead: whatever it knew is gone with it. One that does not answer may
# live on behind a broken link, and decide the same of us. So those who go on must be more than those who are
# silent; of two equal halves the one with the lowest slot goes on. Those who leave do not count: the others may have
# decided without them already.

# Note [One newcomer at a time]
# When forming a generation fails halfway, a newcomer of it may have the state or not, and only itself knows. Everyone
# else was a member before it, so nobody looks to it for a decision, and whether it comes back as a member or as a
# newcomer, it comes. With two newcomers in one generation, one that has the state could not tell whether the other has.
"""

from collections.abc import Collection
from dataclasses import replace

from lockstep.elastic.membership.view import ONE_LANE, Claim, Decision, LaneDeal, Member, View


class Outnumbered(Exception):  # noqa: N818 - a verdict, not an accident
    """Those whose claims have come may not go on: the others may be alive without them."""


def decide(
    claims: Collection[Claim], lost: Collection[Member], silent: Collection[Member], deal: LaneDeal = ONE_LANE
) -> Decision:
    """The next generation of those who claim, and the lanes of each.

    See Note [Complete or redo] and Note [Dead or silent].
    """
    current = [claim for claim in claims if not claim.is_newcomer]
    _refuse_minority(current, silent)
    step = _step(current)
    staying = [claim for claim in current if not claim.leaving and _can_follow(claim, step)]
    generation = max(claim.generation for claim in current) + 1
    newcomers = [replace(claim.member, since=generation) for claim in _admitted(claims, staying, step)]
    members = sorted([claim.member for claim in staying] + newcomers, key=lambda member: member.slot)
    proving = {claim.member.uid for claim in staying if claim.is_proving}
    proving |= {member.uid for member in newcomers if member.fresh and deal.spares_newcomers}
    return Decision(
        view=View(generation, tuple(members)),
        step=step,
        assignment=deal.assignment(members, proving) if members else None,
        newcomers=tuple(member.uid for member in newcomers),
        lost=tuple(lost) + tuple(silent),
        left=tuple(claim.member for claim in current if claim not in staying),
    )


def completes(claim: Claim, step: int) -> bool:
    """Whether a worker with this claim has a gradient to hand over before `step`."""
    return claim.step == step - 1 and claim.prepared


def _step(current: Collection[Claim]) -> int:
    """The step after the last that anybody has gone past. See Note [Complete or redo]."""
    return max(claim.step for claim in current)


def _can_follow(claim: Claim, step: int) -> bool:
    return claim.step == step or completes(claim, step)


def _admitted(claims: Collection[Claim], staying: Collection[Claim], step: int) -> list[Claim]:
    """The newcomer that has waited longest, if any may come. See Note [One newcomer at a time].

    It is given the state as it is before `step`, which nobody has as long as somebody must complete one. When all
    others leave, nobody could give it.
    """
    if not staying or any(claim.step != step for claim in staying):
        return []
    by_slot = {claim.member.slot: claim for claim in claims if claim.is_newcomer}  # of two, the later is alive
    taken = {claim.member.slot for claim in staying}
    free = [claim for slot, claim in by_slot.items() if slot not in taken]
    return sorted(free, key=lambda claim: claim.member.fresh)[:1]  # a copy of a member cannot wait


def _refuse_minority(current: Collection[Claim], silent: Collection[Member]) -> None:
    if not silent:
        return
    here = [claim.member.slot for claim in current if not claim.leaving]
    there = [member.slot for member in silent]
    if len(here) < len(there) or (len(here) == len(there) and min(here) > min(there)):
        raise Outnumbered
