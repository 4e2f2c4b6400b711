"""One worker's part in forming generations: `membership.on(event)` gives the next state and what to do.

# Note [Meeting at a door]
# Every worker keeps a small store, its door. When a generation breaks, or is to change, everyone goes to the door of
# the longest member that is alive. That worker gathers a claim from every member, or the certainty that it is dead,
# decides (see decision.py) and answers all. If it dies before somebody has its answer, that one goes to the next door;
# those who have the answer fail to form the generation and go there too. A generation's number is higher than all that
# its members have heard of, so no two are taken for one another.

# Note [The longest member hosts]
# All must go to the same door although they may have heard of different decisions: a generation can be formed for some
# and fail for others. What all know alike is who was there before them: a worker is admitted by a decision that names
# all members, and takes part only when all of them have that decision. So the order is that of admission; founders, and
# only they, stand in the order of their slots. A worker that knows a longer member alive goes there; whoever was
# admitted later comes to it. By slot alone, a replacement would stand before those who do not know yet that it is in.
# Newcomers at the door of the longest member need not move either when others are admitted before them.

# Note [Until all have met]
# While a generation is not formed, `known` only grows: by the members of each decision that failed, newcomers
# included. So whoever may have the state is waited for, until it calls or is found dead.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from lockstep.elastic.membership.decision import Outnumbered, completes, decide
from lockstep.elastic.membership.view import Claim, Decision, Health, Member, View

ASKED_TO_LEAVE = "it was asked to leave"

# -- what happens ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """This worker has done its part of the step under way, and says so to all."""


@dataclass(frozen=True)
class AllPrepared:
    """Every member has said that it has done its part of the step under way: all have its gradient."""


@dataclass(frozen=True)
class Broken:
    """An exchange with the members failed, or all have agreed to form another generation."""


@dataclass(frozen=True)
class Leaving:
    """This worker was asked to leave."""


@dataclass(frozen=True)
class Known:
    """A newcomer has heard who the members are."""

    members: tuple[Member, ...]


@dataclass(frozen=True)
class Probed:
    """Somebody knocked at a member's door."""

    uid: str
    health: Health


@dataclass(frozen=True)
class Called:
    """A worker has come to this one's door.

    May be told at any time: what cannot be decided now is kept. A worker that keeps the door (see
    `Membership.keeps_door`) must look for callers at the beginning of a step at least: when it is alone, or all others
    are dead, it decides at once, and admits only those it has heard of.
    """

    claim: Claim


@dataclass(frozen=True)
class Answered:
    """The one at whose door we are has decided."""

    decision: Decision


@dataclass(frozen=True)
class HostLost:
    """The one at whose door we are does not answer any more."""


@dataclass(frozen=True)
class Formed:
    """The wire of the decided generation is open, and newcomers have the state."""


@dataclass(frozen=True)
class Unformed:
    """The wire of the decided generation could not be opened.

    Also when somebody in it does not come: it may not have heard of the decision, and never will, if the host is gone.
    """


Event = Prepared | AllPrepared | Broken | Leaving | Known | Probed | Called | Answered | HostLost | Formed | Unformed

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
class Knock:
    """Find out whether a member is alive; tell by Probed."""

    member: Member


@dataclass(frozen=True)
class Call:
    """Bring the claim to the host's door; tell its answer by Answered, or HostLost."""

    host: Member
    claim: Claim


@dataclass(frozen=True)
class Listen:
    """Wait for claims at this worker's door, and knock at the doors of those who are missing."""

    missing: tuple[Member, ...]


@dataclass(frozen=True)
class Answer:
    """Tell a worker that has called what was decided."""

    uid: str
    decision: Decision


@dataclass(frozen=True)
class Open:
    """Open the wire of the decided generation, give newcomers the state; tell by Formed or Unformed."""

    decision: Decision


@dataclass(frozen=True)
class FindMembers:
    """Find out who the members are now; tell by Known."""


@dataclass(frozen=True)
class Leave:
    """This worker has no part in the run any more."""

    reason: str


Action = CloseWire | Commit | Redo | Knock | Call | Listen | Answer | Open | FindMembers | Leave
Next = tuple["Membership", tuple[Action, ...]]


class Stage(Enum):
    """What a worker is doing about its membership."""

    MEMBER = "in a generation"
    JOINING = "not a member yet, looking for one"
    SEEKING = "looking for the door at which all meet"
    CLAIMING = "at another's door, awaiting the decision"
    GATHERING = "gathering claims at its own door"
    FORMING = "opening the wire of the new generation"
    OUT = "not part of the run any more"


@dataclass(frozen=True)
class Membership:
    """One worker's state. `step` is the step under way or next; `prepared`: this worker has done its part of it.

    `known` are those who may be members: of the view, or of a generation that could not be formed. `dead` and `silent`
    (by uid) are what was found out about them since the generation broke; `claims` are those of all who are at this
    worker's door and not answered yet.
    """

    me: Member
    view: View
    stage: Stage
    step: int = 0
    prepared: bool = False
    leaving: bool = False
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
            case Known(members):
                others = tuple(member for member in members if member.uid != self.me.uid)
                return replace(self, known=others, dead=frozenset(), silent=frozenset())._seek()
            case Probed(uid, health):
                return self._probed(uid, health)
            case Called(claim):
                return self._called(claim)
            case Answered(decision):
                return self._follow(decision)
            case HostLost():
                return self._look_again()
            case Formed():
                return self._formed()
            case Unformed():
                return self._unformed()

    @property
    def claim(self) -> Claim:
        return Claim(self.me, self.view.generation, self.step, self.prepared, self.leaving)

    @property
    def keeps_door(self) -> bool:
        """Whether all meet at this worker's door, newcomers too: it asks for a change when somebody waits there."""
        longest = min(self.view.members, key=lambda member: member.seniority, default=None)
        return longest is not None and longest.uid == self.me.uid

    @property
    def waiting(self) -> tuple[Claim, ...]:
        """Newcomers at this worker's door that a change would admit.

        One whose slot has a member waits for nothing yet: it is dead itself, or that member is and will be missed.
        """
        taken = {member.slot for member in self.view.members}
        return tuple(claim for claim in self.claims if claim.is_newcomer and claim.member.slot not in taken)

    # -- steps ----------------------------------------------------------------------------------------------

    def _committed(self) -> Next:
        assert self.prepared, "a step that this worker has no part in cannot count"
        return replace(self, step=self.step + 1, prepared=False), (Commit(self.step),)

    # -- finding the door -----------------------------------------------------------------------------------

    def _seek_anew(self) -> Next:
        return replace(self, dead=frozenset(), silent=frozenset(), decision=None)._seek()

    def _seek(self) -> Next:
        """To the door of the longest member that is not known to be gone. See Note [Meeting at a door]."""
        candidates = [member for member in self.known if member.uid not in self.dead | self.silent]
        if not candidates:
            return replace(self, stage=Stage.JOINING), (FindMembers(),)
        host = min(candidates, key=lambda member: member.seniority)
        if host.uid == self.me.uid:
            return replace(self, stage=Stage.GATHERING)._settle()
        return replace(self, stage=Stage.SEEKING), (Knock(host),)

    def _probed(self, uid: str, health: Health) -> Next:
        state = self._noting(uid, health)
        if self.stage is Stage.GATHERING:
            return state._settle()
        if self.stage is not Stage.SEEKING:
            return state, ()
        if health is Health.ALIVE:
            host = next(member for member in self.known if member.uid == uid)
            return replace(state, stage=Stage.CLAIMING), (Call(host, self.claim),)
        return state._seek()

    def _noting(self, uid: str, health: Health) -> "Membership":
        dead = self.dead | {uid} if health is Health.DEAD else self.dead
        silent = self.silent | {uid} if health is Health.UNREACHABLE else self.silent - {uid}
        return replace(self, dead=dead, silent=silent)

    def _look_again(self) -> Next:
        if self.leaving:  # the others may have decided without it already: nobody would come to meet it
            return replace(self, stage=Stage.OUT), (Leave(ASKED_TO_LEAVE),)
        if self.view.generation == 0:
            return replace(self, stage=Stage.JOINING), (FindMembers(),)
        return self._seek_anew()

    # -- deciding for all -----------------------------------------------------------------------------------

    def _called(self, claim: Claim) -> Next:
        others = tuple(known for known in self.claims if known.member.uid != claim.member.uid)
        # Whoever calls is neither dead nor silent, whatever a knock before had told.
        heard = replace(self, claims=(*others, claim), dead=self.dead - {claim.member.uid})
        heard = replace(heard, silent=self.silent - {claim.member.uid})
        return heard._settle() if self.stage is Stage.GATHERING else (heard, ())

    def _settle(self) -> Next:
        """Decides once nobody is missing."""
        claims = (self.claim, *self.claims)
        heard = {claim.member.uid for claim in claims}
        missing = [member for member in self.known if member.uid not in heard | self.dead | self.silent]
        if missing:
            return self, (Listen(tuple(missing)),)
        try:
            decision = decide(claims, self._those(self.dead - heard), self._those(self.silent - heard))
        except Outnumbered:
            return replace(self, stage=Stage.OUT), (Leave(self._outnumbered()),)
        return self._answer(decision)

    def _answer(self, decision: Decision) -> Next:
        """Newcomers that could not be admitted this time are not answered: they stay at the door."""
        admitted = set(decision.newcomers)
        staying = tuple(claim for claim in self.claims if claim.is_newcomer and claim.member.uid not in admitted)
        answers = tuple(Answer(claim.member.uid, decision) for claim in self.claims if claim not in staying)
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
            return replace(self, stage=Stage.FORMING, decision=decision), (Open(decision),)
        reason = ASKED_TO_LEAVE if self.leaving else "the others have gone on without it"
        return replace(self, stage=Stage.OUT, decision=decision), (Leave(reason),)

    def _formed(self) -> Next:
        assert self.decision is not None
        decision, claim = self.decision, self.claim
        me = decision.view.members[decision.view.rank_of(self.me.uid)]
        member = replace(
            self, me=me, stage=Stage.MEMBER, view=decision.view, step=decision.step, prepared=False, decision=None
        )
        if not claim.is_newcomer and completes(claim, decision.step):
            return member, (Commit(claim.step),)
        return member, (Redo(decision.step),)

    def _unformed(self) -> Next:
        """Its number is used up, and newcomers go back to the door: they may have no state, or half of one.

        See Note [Until all have met].
        """
        assert self.decision is not None
        decision = self.decision
        if self.view.generation == 0:
            return replace(self, stage=Stage.JOINING, decision=None), (CloseWire(), FindMembers())
        again = replace(
            self,
            view=replace(self.view, generation=decision.view.generation),
            known=(*(member for member in self.known if member.uid not in decision.view), *decision.view.members),
        )
        return _first(CloseWire(), again._seek_anew())


def founded(me: Member, members: tuple[Member, ...]) -> Membership:
    """A member of the first generation."""
    return Membership(me, View(1, members), Stage.MEMBER)


def joining(me: Member) -> Next:
    """A newcomer: it finds the members and asks to be admitted."""
    return Membership(me, View(0, ()), Stage.JOINING), (FindMembers(),)


def _first(action: Action, then: Next) -> Next:
    return then[0], (action, *then[1])


def _after(actions: tuple[Action, ...], then: Next) -> Next:
    return then[0], (*actions, *then[1])
