"""One worker's part in forming generations: `membership.on(event)` gives the next state and what to do.

# Note [The coordinator]
# Every worker keeps a small store, its endpoint. When a generation breaks, or is to change, every worker sends its
# claim to the coordinator: the member of longest standing that is alive. The coordinator gathers a claim from every
# member, or the certainty that it is dead, decides (see decision.py) and sends all the decision. If it dies before some
# worker has the decision, that one turns to the next coordinator; those who have it fail to form the generation and
# turn there too. A generation's number is higher than all that its members know of, so no two are taken for one
# another.

# Note [The longest member coordinates]
# All must find the same coordinator although they may know of different decisions: a generation can be formed for some
# and fail for others. What all know alike is who was there before them: a worker is admitted by a decision that names
# all members, and takes part only when all of them have that decision. So the order is that of admission; founders, and
# only they, stand in the order of their slots. A worker that knows a longer member alive turns to it; those admitted
# later turn to this one. By slot alone, a replacement would stand before those who do not know yet that it is in.
# Newcomers need not look for another coordinator either when others are admitted before them.

# Note [Until all have met]
# While a generation is not formed, `known` only grows: by the members of each decision that failed, newcomers
# included. So every worker that may have the state is waited for, until its claim comes or it is found dead.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from lockstep.elastic.membership.decision import Outnumbered, completes, decide
from lockstep.elastic.membership.view import ONE_LANE, Claim, Decision, LaneDeal, Liveness, Member, View

ASKED_TO_LEAVE = "it was asked to leave"

# -- what happens ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """This worker has done its part of the step under way, and is about to signal that to all."""


@dataclass(frozen=True)
class AllPrepared:
    """Every member has signalled that it has done its part of the step under way: all have its gradient."""


@dataclass(frozen=True)
class Broken:
    """An exchange with the members failed, or all have agreed to form another generation."""


@dataclass(frozen=True)
class Leaving:
    """This worker was asked to leave."""


@dataclass(frozen=True)
class MembersFound:
    """A newcomer has learned who the members are."""

    members: tuple[Member, ...]


@dataclass(frozen=True)
class Probed:
    """A member was probed."""

    uid: str
    health: Liveness


@dataclass(frozen=True)
class ClaimReceived:
    """The claim of another worker has come.

    At any time: what cannot be decided now is kept. The coordinator (see `Membership.is_coordinator`) must look for
    claims at the beginning of a step at least: when it is alone, or all others are dead, it decides at once, and admits
    only those whose claims have come.
    """

    claim: Claim


@dataclass(frozen=True)
class DecisionReceived:
    """The coordinator has decided."""

    decision: Decision


@dataclass(frozen=True)
class CoordinatorLost:
    """The coordinator does not answer any more."""


@dataclass(frozen=True)
class Formed:
    """The wire of the decided generation is open, and newcomers have the state."""


@dataclass(frozen=True)
class Unformed:
    """The wire of the decided generation could not be opened.

    Also when somebody in it does not come: it may not have the decision, and never will, if the host is gone.
    """


Event = (
    Prepared
    | AllPrepared
    | Broken
    | Leaving
    | MembersFound
    | Probed
    | ClaimReceived
    | DecisionReceived
    | CoordinatorLost
    | Formed
    | Unformed
)

# -- what to do -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CloseWire:
    """Let go of the broken generation's wire: peers that wait for us notice."""


@dataclass(frozen=True)
class Commit:
    """Hand the gradient over: `step` counts."""

    step: int


@dataclass(frozen=True)
class Redo:
    """Compute `step`, again or for the first time, in the new generation."""

    step: int


@dataclass(frozen=True)
class Probe:
    """Find out whether a member is alive; report by Probed."""

    member: Member


@dataclass(frozen=True)
class SendClaim:
    """Send the claim to the coordinator; report by DecisionReceived, or CoordinatorLost."""

    host: Member
    claim: Claim


@dataclass(frozen=True)
class GatherClaims:
    """Wait for claims at this worker's endpoint, and probe the members that are missing."""

    missing: tuple[Member, ...]


@dataclass(frozen=True)
class SendDecision:
    """Send the decision to a worker whose claim has come."""

    uid: str
    decision: Decision


@dataclass(frozen=True)
class Open:
    """Open the wire of the decided generation, give newcomers the state; report by Formed or Unformed."""

    decision: Decision


@dataclass(frozen=True)
class FindMembers:
    """Find out who the members are now; report by MembersFound."""


@dataclass(frozen=True)
class Leave:
    """This worker has no part in the run any more."""

    reason: str


Action = CloseWire | Commit | Redo | Probe | SendClaim | GatherClaims | SendDecision | Open | FindMembers | Leave
Next = tuple["Membership", tuple[Action, ...]]


class MembershipStage(Enum):
    """What a worker is doing about its membership."""

    MEMBER = "in a generation"
    JOINING = "not a member yet, looking for one"
    SEEKING = "looking for the coordinator"
    CLAIMING = "awaiting the coordinator's decision"
    GATHERING = "gathering claims, as the coordinator"
    FORMING = "opening the wire of the new generation"
    OUT = "not part of the run any more"


@dataclass(frozen=True)
class Membership:
    """One worker's state. `step` is the step under way or next; `prepared`: this worker has done its part of it.

    `deal` is how the next generation's lanes are dealt out, if this worker decides it; `is_proving`: it is on probation
    itself. `known` are those who may be members: of the view, or of a generation that could not be formed. `dead` and
    `silent` (by uid) are what was found out about them since the generation broke; `claims` are those of all who are at
    this worker's endpoint and not answered yet.
    """

    me: Member
    view: View
    stage: MembershipStage
    step: int = 0
    prepared: bool = False
    leaving: bool = False
    deal: LaneDeal = ONE_LANE
    is_proving: bool = False
    known: tuple[Member, ...] = ()
    dead: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    claims: tuple[Claim, ...] = ()
    decision: Decision | None = None

    def on(self, event: Event) -> Next:
        """The state after `event`, and what to do, in order."""
        match event:
            case Prepared():
                return replace(self, prepared=True), ()
            case AllPrepared():
                return self._committed()
            case Leaving():
                return replace(self, leaving=True), ()
            case Broken():
                return _first(CloseWire(), replace(self, known=self.view.members)._seek_anew())
            case MembersFound(members):
                others = tuple(member for member in members if member.uid != self.me.uid)
                return replace(self, known=others, dead=frozenset(), silent=frozenset())._seek()
            case Probed(uid, health):
                return self._probed(uid, health)
            case ClaimReceived(claim):
                return self._called(claim)
            case DecisionReceived(decision):
                return self._follow(decision)
            case CoordinatorLost():
                return self._look_again()
            case Formed():
                return self._formed()
            case Unformed():
                return self._unformed()

    @property
    def claim(self) -> Claim:
        return Claim(self.me, self.view.generation, self.step, self.prepared, self.leaving, self.is_proving)

    @property
    def is_coordinator(self) -> bool:
        """Whether claims go to this worker, newcomers' too: it asks for a change when one has come."""
        longest = min(self.view.members, key=lambda member: member.seniority, default=None)
        return longest is not None and longest.uid == self.me.uid

    def asks_for_change(self, newcomers: Iterable[Claim]) -> bool:
        """Whether a claim asks for another generation: that of a member, or of one of `newcomers` with a free slot.

        One whose slot has a member waits for nothing yet: it is dead itself, or that member is and will be missed.
        """
        taken = {member.slot for member in self.view.members}
        is_from_member = any(not claim.is_newcomer for claim in self.claims)
        return is_from_member or any(claim.member.slot not in taken for claim in newcomers)

    # -- steps ----------------------------------------------------------------------------------------------

    def _committed(self) -> Next:
        assert self.prepared, "a step that this worker has no part in cannot count"
        return replace(self, step=self.step + 1, prepared=False), (Commit(self.step),)

    # -- finding the coordinator -----------------------------------------------------------------------------------

    def _seek_anew(self) -> Next:
        return replace(self, dead=frozenset(), silent=frozenset(), decision=None)._seek()

    def _seek(self) -> Next:
        """Turns to the longest member that is not known to be gone. See Note [The coordinator]."""
        candidates = [member for member in self.known if member.uid not in self.dead | self.silent]
        if not candidates:
            return replace(self, stage=MembershipStage.JOINING), (FindMembers(),)
        host = min(candidates, key=lambda member: member.seniority)
        if host.uid == self.me.uid:
            return replace(self, stage=MembershipStage.GATHERING)._settle()
        return replace(self, stage=MembershipStage.SEEKING), (Probe(host),)

    def _probed(self, uid: str, health: Liveness) -> Next:
        state = self._noting(uid, health)
        if self.stage is MembershipStage.GATHERING:
            return state._settle()
        if self.stage is not MembershipStage.SEEKING:
            return state, ()
        if health is Liveness.ALIVE:
            host = next(member for member in self.known if member.uid == uid)
            return replace(state, stage=MembershipStage.CLAIMING), (SendClaim(host, self.claim),)
        return state._seek()

    def _noting(self, uid: str, health: Liveness) -> "Membership":
        dead = self.dead | {uid} if health is Liveness.DEAD else self.dead
        silent = self.silent | {uid} if health is Liveness.UNREACHABLE else self.silent - {uid}
        return replace(self, dead=dead, silent=silent)

    def _look_again(self) -> Next:
        if self.leaving:  # the others may have decided without it already: nobody would come to meet it
            return replace(self, stage=MembershipStage.OUT), (Leave(ASKED_TO_LEAVE),)
        if self.view.generation == 0:
            return replace(self, stage=MembershipStage.JOINING), (FindMembers(),)
        return self._seek_anew()

    # -- deciding for all -----------------------------------------------------------------------------------

    def _called(self, claim: Claim) -> Next:
        others = tuple(known for known in self.claims if known.member.uid != claim.member.uid)
        # Whoever calls is neither dead nor silent, whatever a probe before had told.
        heard = replace(self, claims=(*others, claim), dead=self.dead - {claim.member.uid})
        heard = replace(heard, silent=self.silent - {claim.member.uid})
        return heard._settle() if self.stage is MembershipStage.GATHERING else (heard, ())

    def _settle(self) -> Next:
        """Decides once nobody is missing."""
        claims = (self.claim, *self.claims)
        heard = {claim.member.uid for claim in claims}
        missing = [member for member in self.known if member.uid not in heard | self.dead | self.silent]
        if missing:
            return self, (GatherClaims(tuple(missing)),)
        try:
            lost, silent = self._those(self.dead - heard), self._those(self.silent - heard)
            decision = decide(claims, lost, silent, self.deal)
        except Outnumbered:
            return replace(self, stage=MembershipStage.OUT), (Leave(self._outnumbered()),)
        return self._answer(decision)

    def _answer(self, decision: Decision) -> Next:
        """Newcomers that could not be admitted this time are not answered: they wait on."""
        admitted = set(decision.newcomers)
        staying = tuple(claim for claim in self.claims if claim.is_newcomer and claim.member.uid not in admitted)
        answers = tuple(SendDecision(claim.member.uid, decision) for claim in self.claims if claim not in staying)
        return _after(answers, replace(self, claims=staying)._follow(decision))

    def _those(self, uids: Iterable[str]) -> tuple[Member, ...]:
        return tuple(member for member in self.known if member.uid in set(uids))

    def _outnumbered(self) -> str:
        silent = ", ".join(str(member.slot) for member in self._those(self.silent))
        return (
            f"workers {silent} cannot be reached and may be going on without this one: of two halves only one may go "
            "on. Resume from the newest checkpoint if they are not"
        )

    # -- the new generation ---------------------------------------------------------------------------------

    def _follow(self, decision: Decision) -> Next:
        if self.me.uid in decision.view:
            return replace(self, stage=MembershipStage.FORMING, decision=decision), (Open(decision),)
        reason = ASKED_TO_LEAVE if self.leaving else "the others have gone on without it"
        return replace(self, stage=MembershipStage.OUT, decision=decision), (Leave(reason),)

    def _formed(self) -> Next:
        assert self.decision is not None
        decision, claim = self.decision, self.claim
        me = decision.view.members[decision.view.rank_of(self.me.uid)]
        member = replace(
            self,
            me=me,
            stage=MembershipStage.MEMBER,
            view=decision.view,
            step=decision.step,
            prepared=False,
            decision=None,
        )
        if not claim.is_newcomer and completes(claim, decision.step):
            return member, (Commit(claim.step),)
        return member, (Redo(decision.step),)

    def _unformed(self) -> Next:
        """Its number is used up, and newcomers ask again: they may have no state, or half of one.

        See Note [Until all have met].
        """
        assert self.decision is not None
        decision = self.decision
        if self.view.generation == 0:
            return replace(self, stage=MembershipStage.JOINING, decision=None), (CloseWire(), FindMembers())
        again = replace(
            self,
            view=replace(self.view, generation=decision.view.generation),
            known=(*(member for member in self.known if member.uid not in decision.view), *decision.view.members),
        )
        return _first(CloseWire(), again._seek_anew())


def founded(me: Member, members: tuple[Member, ...]) -> Membership:
    """A member of the first generation."""
    return Membership(me, View(1, members), MembershipStage.MEMBER)


def joining(me: Member) -> Next:
    """A newcomer: it finds the members and asks to be admitted."""
    return Membership(me, View(0, ()), MembershipStage.JOINING), (FindMembers(),)


def _first(action: Action, then: Next) -> Next:
    return then[0], (action, *then[1])


def _after(actions: tuple[Action, ...], then: Next) -> Next:
    return then[0], (*actions, *then[1])
