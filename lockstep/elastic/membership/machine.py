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

# Note [Several newcomers]
# Of the newcomers of one generation some may have formed it, and have the state, when its forming fails for the others,
# which ask again as newcomers. If all longer members die at that moment, those who have the state must find the
# longest of themselves: so a probe tells who was never part of a generation (`new`), and nobody turns to such a one. It
# is waited for, as all are who may have the state. If it is found to have formed the generation after all, and is
# longer, all turn to it.

# Note [Until all have met]
# While a generation is not formed, `known` only grows: by the members of each decision that failed, newcomers
# included. So every worker that may have the state is waited for, until its claim comes or it is found dead.

# Note [Several coordinators]
# Where links are broken between some only, workers turn to different coordinators. The longest one of all waits for
# nobody who has turned to another: all whom it reaches turn to it. So it decides, and either goes on with some, or
# ends. Who waits for one of those, or with one of those, finds it in a generation without itself, and leaves; or finds
# the coordinator gone, and turns to the next. A coordinator that may not go on answers so, and ends. Who reaches nobody
# else either ends too, at once; the others turn to the next.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from lockstep.elastic.membership.actions import (
    Action,
    AskWitness,
    CloseWire,
    Commit,
    FindMembers,
    GatherClaims,
    Leave,
    Open,
    Probe,
    Redo,
    SendClaim,
    SendDecision,
)
from lockstep.elastic.membership.decision import Poll, Verdict, completes, decide
from lockstep.elastic.membership.events import (
    AllPrepared,
    Broken,
    ClaimReceived,
    CoordinatorLost,
    DecisionReceived,
    Event,
    Formed,
    Leaving,
    MembersFound,
    Prepared,
    Probed,
    Unformed,
    WitnessAnswered,
)
from lockstep.elastic.membership.quorum import Outnumbered, Overtaken
from lockstep.elastic.membership.view import (
    NEVER,
    ONE_LANE,
    Attempt,
    Claim,
    Decision,
    LaneDeal,
    Liveness,
    Member,
    View,
)

ASKED_TO_LEAVE = "it was asked to leave"
GONE_ON = "the others have gone on without it"
RESUME = "Resume from the newest checkpoint if they are not"
TOO_FEW = (
    "too few workers reach one another: those who go on must be more than half, and each must reach all others. The "
    "others may be going on without this one"
)

Next = tuple["Membership", tuple[Action, ...]]


class MembershipStage(Enum):
    """What a worker is doing about its membership."""

    MEMBER = "in a generation"
    JOINING = "not a member yet, looking for one"
    SEEKING = "looking for the coordinator"
    CLAIMING = "awaiting the coordinator's decision"
    GATHERING = "gathering claims, as the coordinator"
    ASKING = "asking the witness, as the coordinator of one half"
    FORMING = "opening the wire of the new generation"
    OUT = "not part of the run any more"


@dataclass(frozen=True)
class Membership:
    """One worker's state. `step` is the step under way or next; `prepared`: this worker has done its part of it.

    `deal` is how the next generation's lanes are dealt out, if this worker decides it. `formed` is the generation that
    it was part of last, `attempts` are those that it has tried to form since. `known` are those who may be members: of
    the view, or of a generation that could not be formed. `dead`, `silent`, `alive` and `new` (by uid) are what was
    found out about them since the coordinator was looked for last, `doubted` those that were silent at any time since
    the generation broke; `claims` are those of all who are at this worker's endpoint and not answered yet.
    `has_witness`: two halves can ask which of them goes on; all members have it alike.
    """

    me: Member
    view: View
    stage: MembershipStage
    step: int = 0
    prepared: bool = False
    leaving: bool = False
    deal: LaneDeal = ONE_LANE
    formed: Attempt = NEVER
    attempts: tuple[Attempt, ...] = ()
    known: tuple[Member, ...] = ()
    dead: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    alive: frozenset[str] = frozenset()
    new: frozenset[str] = frozenset()
    doubted: frozenset[str] = frozenset()
    claims: tuple[Claim, ...] = ()
    host: Member | None = None
    verdict: Verdict | None = None
    decision: Decision | None = None
    has_witness: bool = False

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
                return replace(self, known=others)._seek_anew()
            case Probed(uid, health):
                return self._probed(uid, health)
            case WitnessAnswered(has_won, why):
                return self._witnessed(has_won, why)
            case ClaimReceived(claim):
                return self._called(claim)
            case DecisionReceived(decision):
                return self._follow(decision)
            case CoordinatorLost(is_silent):
                return self._look_again(is_silent)
            case Formed():
                return self._formed()
            case Unformed():
                return self._unformed()

    @property
    def claim(self) -> Claim:
        return Claim(
            self.me,
            self.view.generation,
            self.step,
            self.prepared,
            self.leaving,
            self.formed.id,
            self.attempts,
            tuple(sorted(self.silent)),
        )

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
        nothing: frozenset[str] = frozenset()
        unknown = replace(self, dead=nothing, silent=nothing, alive=nothing, new=nothing)
        return replace(unknown, decision=None, verdict=None)._seek()

    def _seek(self) -> Next:
        """Turns to the longest member that is alive, once all were probed. See Note [The coordinator]."""
        unprobed = self._unprobed()
        if unprobed:
            return replace(self, stage=MembershipStage.SEEKING), (Probe(unprobed),)
        return self._turn_to_longest()

    def _unprobed(self) -> tuple[Member, ...]:
        found = self.dead | self.silent | self.alive | self.new | {self.me.uid}
        return tuple(member for member in self.known if member.uid not in found)

    def _turn_to_longest(self) -> Next:
        """A newcomer must reach all members, or it would keep a generation from being formed; and its slot is free."""
        candidates = [member for member in self.known if member.uid in self.alive | {self.me.uid}]
        here = self._those(self.alive | self.new)
        taken = tuple(one for one in here if self.is_newcomer and one.slot == self.me.slot)
        if not candidates or taken or (self.is_newcomer and self.silent):
            return replace(self, stage=MembershipStage.JOINING), (FindMembers(self._those(self.silent), taken),)
        host = min(candidates, key=lambda member: member.seniority)
        if host.uid == self.me.uid:
            return replace(self, stage=MembershipStage.GATHERING, host=None)._settle()
        longer = tuple(one for one in self._those(self.silent | self.new) if one.seniority < host.seniority)
        claiming = replace(self, stage=MembershipStage.CLAIMING, host=host)
        return claiming, (SendClaim(host, self.claim, longer),)

    @property
    def is_newcomer(self) -> bool:
        return self.view.generation == 0

    def _probed(self, uid: str, health: Liveness) -> Next:
        waits = (MembershipStage.SEEKING, MembershipStage.CLAIMING, MembershipStage.GATHERING)
        if self.stage not in waits:
            return self, ()
        if health is Liveness.ELSEWHERE and not self.is_newcomer:
            return self._leave(self._why_left_behind())
        is_back = health is Liveness.ALIVE and uid in self.silent | self.new
        state = self._noting(uid, health)
        if self.stage is MembershipStage.SEEKING:
            return (state, ()) if state._unprobed() else state._turn_to_longest()
        if is_back and self._is_longer(uid):
            return self._seek_anew()
        if self.host is not None and uid == self.host.uid and health is Liveness.NEW:
            return state._turn_to_longest()  # see Note [Several newcomers]
        return state._settle() if self.stage is MembershipStage.GATHERING else (state, ())

    def _is_longer(self, uid: str) -> bool:
        """Whether this member should coordinate rather than the one that does. See Note [Several coordinators]."""
        present = self.me if self.host is None else self.host
        return any(member.uid == uid and member.seniority < present.seniority for member in self.known)

    def _noting(self, uid: str, health: Liveness) -> "Membership":
        left = {uid}
        return replace(
            self,
            dead=self.dead | left if health is Liveness.DEAD else self.dead,
            silent=self.silent | left if health is Liveness.UNREACHABLE else self.silent - left,
            alive=self.alive | left if health in (Liveness.ALIVE, Liveness.ELSEWHERE) else self.alive - left,
            new=self.new | left if health is Liveness.NEW else self.new - left,
            doubted=self.doubted | left if health is Liveness.UNREACHABLE else self.doubted,
        )

    def _look_again(self, is_silent: bool) -> Next:
        if self.is_newcomer:
            return replace(self, stage=MembershipStage.JOINING), (FindMembers(),)
        lost = {self.host.uid} if is_silent and self.host is not None else set()
        return replace(self, doubted=self.doubted | lost)._seek_anew()

    # -- deciding for all -----------------------------------------------------------------------------------

    def _called(self, claim: Claim) -> Next:
        caller = {claim.member.uid}
        others = tuple(known for known in self.claims if known.member.uid not in caller)
        # A member that calls is neither dead nor silent, whatever a probe had found before.
        health = Liveness.NEW if claim.is_newcomer else Liveness.ALIVE
        heard = replace(self, claims=(*others, claim), dead=self.dead - caller)._noting(claim.member.uid, health)
        if self.stage is MembershipStage.GATHERING:
            return heard._settle()
        is_found = self.stage is MembershipStage.SEEKING and not heard._unprobed()
        return heard._turn_to_longest() if is_found else (heard, ())

    def _settle(self) -> Next:
        """Decides once nobody is missing."""
        heard = {claim.member.uid for claim in (self.claim, *self.claims)}
        missing = [member for member in self.known if member.uid not in heard | self.dead | self.silent]
        if missing:
            return self, (GatherClaims(tuple(missing), self._those(self.silent - heard)),)
        lost, silent = self._those(self.dead - heard), self._those(self.silent - heard)
        poll = Poll((self.claim, *self.claims), lost, silent, self.formed, self.doubted)
        try:
            verdict = decide(poll, self.deal, self.me.uid)
        except Overtaken:
            return self._leave(self._why_left_behind())
        except Outnumbered:
            return self._give_up(silent, self._outnumbered(silent))
        return self._break_tie(verdict)

    def _break_tie(self, verdict: Verdict) -> Next:
        if not verdict.ties:
            return self._answer(verdict.decision)
        if self.has_witness:
            return replace(self, stage=MembershipStage.ASKING, verdict=verdict), (AskWitness(verdict.ties),)
        if all(tie.has_longest for tie in verdict.ties):
            return self._answer(verdict.decision)
        silent = self._those(self.silent)
        return self._give_up(silent, self._outnumbered(silent))

    def _witnessed(self, has_won: bool, why: str) -> Next:
        """One half has it. Without an answer the other one may have it."""
        assert self.verdict is not None
        if has_won:
            return replace(self, verdict=None)._answer(self.verdict.decision)
        silent = self._those(self.silent)
        return self._give_up(silent, f"{_workers(silent)} cannot be reached, and {why}. {RESUME}")

    def _answer(self, decision: Decision) -> Next:
        """Newcomers that could not be admitted this time are not answered: they wait on."""
        admitted = set(decision.newcomers)
        staying = tuple(claim for claim in self.claims if claim.is_newcomer and claim.member.uid not in admitted)
        answers = tuple(SendDecision(claim.member.uid, decision) for claim in self.claims if claim not in staying)
        return _after(answers, replace(self, claims=staying)._follow(decision))

    def _give_up(self, silent: tuple[Member, ...], reason: str) -> Next:
        """Nobody may go on with this coordinator. See Note [Several coordinators]."""
        none = Decision(View(self.view.generation, ()), self.step, lost=silent, decider=self.me.uid)
        members = [claim.member.uid for claim in self.claims if not claim.is_newcomer]
        answers = tuple(SendDecision(uid, none) for uid in members)
        return _after(answers, self._leave(reason))

    def _leave(self, reason: str) -> Next:
        said = ASKED_TO_LEAVE if self.leaving else reason
        return replace(self, stage=MembershipStage.OUT), (Leave(said),)

    def _those(self, uids: Iterable[str]) -> tuple[Member, ...]:
        return tuple(member for member in self.known if member.uid in set(uids))

    def _outnumbered(self, silent: tuple[Member, ...]) -> str:
        if not silent:
            return f"{TOO_FEW}. {RESUME}"
        return (
            f"{_workers(silent)} cannot be reached and may be going on without this one: of two halves only one may go "
            f"on. {RESUME}"
        )

    def _why_left_behind(self) -> str:
        silent = self._those(self.silent)
        return f"{GONE_ON}, as it does not reach {_workers(silent)}" if silent else GONE_ON

    # -- the new generation ---------------------------------------------------------------------------------

    def _follow(self, decision: Decision) -> Next:
        if self.me.uid in decision.view:
            return replace(self, stage=MembershipStage.FORMING, decision=decision), (Open(decision),)
        if decision.view.members or self.leaving:
            return replace(self, decision=decision)._leave(self._why_left_behind())
        return self._follow_nobody(decision)

    def _follow_nobody(self, decision: Decision) -> Next:
        """The coordinator ends: so does this worker, unless it reaches somebody that the coordinator does not."""
        if all(member.uid in self.silent for member in decision.lost):
            return self._leave(self._outnumbered(decision.lost))
        gone = {decision.decider}
        return replace(self, dead=self.dead | gone, alive=self.alive - gone)._seek()

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
            formed=decision.attempt,
            attempts=(),
            doubted=frozenset(),
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
        if self.is_newcomer:
            return replace(self, stage=MembershipStage.JOINING, decision=None), (CloseWire(), FindMembers())
        again = replace(
            self,
            view=replace(self.view, generation=decision.view.generation),
            known=(*(member for member in self.known if member.uid not in decision.view), *decision.view.members),
            attempts=(*self.attempts, decision.attempt),
        )
        return _first(CloseWire(), again._seek_anew())


def founded(me: Member, members: tuple[Member, ...]) -> Membership:
    """A member of the first generation."""
    view = View(1, members)
    return Membership(me, view, MembershipStage.MEMBER, formed=Attempt.of(view, members[0].uid))


def joining(me: Member) -> Next:
    """A newcomer: it finds the members and asks to be admitted."""
    return Membership(me, View(0, ()), MembershipStage.JOINING), (FindMembers(),)


def _first(action: Action, then: Next) -> Next:
    return then[0], (action, *then[1])


def _after(actions: tuple[Action, ...], then: Next) -> Next:
    return then[0], (*actions, *then[1])


def _workers(members: Sequence[Member]) -> str:
    return f"worker{'s' * (len(members) > 1)} " + ", ".join(str(member.slot) for member in members)
