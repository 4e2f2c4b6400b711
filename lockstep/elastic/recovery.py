"""Runs one worker's membership: performs its actions, and reports to it what came of them."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from lockstep.elastic.client import PROBES, EndpointClient, Standpoint, probe, probe_all
from lockstep.elastic.endpoint import Endpoint
from lockstep.elastic.membership import Claim, Decision, LaneDeal, Liveness, Member, Membership, MembershipStage
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
from lockstep.elastic.membership.events import (
    Broken,
    ClaimReceived,
    CoordinatorLost,
    DecisionReceived,
    Event,
    Formed,
    Leaving,
    MembersFound,
    Probed,
    Unformed,
    WitnessAnswered,
)
from lockstep.elastic.membership.machine import Next, joining
from lockstep.elastic.membership.quorum import Tie
from lockstep.elastic.opener import WireOpener
from lockstep.elastic.roster import Roster
from lockstep.elastic.store import Secret
from lockstep.errors import BadEnvironment, LockstepError, Misuse, PeerGone
from lockstep.wire import Wire

GATHER_S = 0.05
ANSWER_S = 1.0
MOST_ATTEMPTS = 3
"""How often the same members may fail in a row to form a generation, although each reaches the others' endpoints."""
MOST_ENTRIES = 2
"""The same for a newcomer: the others are to go on without it."""
REACH_S = 30.0
"""How long a newcomer that does not reach all members waits until it does, or until they go on without those."""
LOOK_S = 0.2
TAKEN_S = 8.0
"""How long a newcomer waits for a living member in its own slot to be gone."""


@dataclass
class MemberHangs(LockstepError):  # noqa: N818
    """Others were waited for in vain to form the next generation, although they live: `slots`, if they are known."""

    slots: list[int]
    waited_s: float

    def __str__(self) -> str:
        return f"it lives, but has not come to form the next generation for {self.waited_s:g} s"


class LeftOut(LockstepError):  # noqa: N818
    """This worker has no part in the run any more."""


_CLOSED = (
    "it reaches all members, but the connections for training could not be opened, several times in a row. Does a "
    "firewall drop the ports that the kernel picks? The last error"
)
_ANSWERS = (Liveness.ALIVE, Liveness.ELSEWHERE)

HandOver = Callable[[Decision, Wire], None]


def _nothing() -> None:
    """Nobody wants to know."""


def _nothing_to_hand_over(decision: Decision, wire: Wire) -> None:
    """Until a generation is formed."""


def _alive(members: tuple[Member, ...], secret: Secret) -> tuple[Member, ...]:
    """Those of them that live; raises if none does."""
    health = probe_all(members, secret)
    found = tuple(member for member in members if health[member.uid] is not Liveness.DEAD)
    if not found:
        raise LeftOut("nobody is left who could admit this worker")
    return found


@dataclass
class Recovery:
    """One worker's hold on its membership.

    `terms` are what newcomers must know before they can ask to be admitted. `find_members` is asked by a worker that is
    none yet.
    """

    membership: Membership
    endpoint: Endpoint
    opener: WireOpener
    wire: Wire
    """That of the present generation."""
    terms: Mapping[str, Any]
    find_members: Callable[[], tuple[Member, ...]]
    roster: Roster | None = None
    """Where workers on other hosts find the members."""
    on_claim: Callable[[], None] = _nothing
    decision: Decision | None = None
    _addresses: set[str] = field(default_factory=set)
    """The endpoints to which this worker has connected: connections may be open for as long as it lives."""
    _host_client: EndpointClient | None = None
    """At whose endpoint the present generation has opened its wire."""
    _hand_over: HandOver = _nothing_to_hand_over
    _limit_s: float = math.inf
    _began_s: float = 0.0
    _attempts: int = 0
    _attempted: frozenset[str] = frozenset()
    _admits: bool = False
    _newcomers: dict[int, Claim] = field(default_factory=dict)
    _todo: deque[Action] = field(default_factory=deque)
    _refused_since_s: float | None = None

    def deal_by(self, deal: LaneDeal) -> None:
        """The next generation's lanes are dealt out so, if this worker coordinates."""
        self.membership = replace(self.membership, deal=deal)

    def reform(self, hand_over: HandOver, *, admit: bool = False, limit_s: float = math.inf) -> Commit | Redo:
        """Collective. Forms the next generation of all who are left; says what becomes of the step under way.

        `hand_over` is called when its wire is open: it gives newcomers the state, or takes it. With `admit`, a
        newcomer that has asked is admitted. Afterwards `wire` is that of the new generation, and `decision`
        says what has changed. MemberHangs if one that lives has not come after `limit_s`.
        """
        self._admits, self._hand_over = admit, hand_over
        self._limit_s, self._began_s = limit_s, time.monotonic()
        claims = self._new_claims()  # a copy has sent its claim: all members may be there at once
        if admit:
            claims += [claim for claim in self._newcomers.values() if claim not in claims]
        self.membership = replace(self.membership, has_witness=self.has_witness)
        for claim in claims:
            self.record(ClaimReceived(claim))
        return self._pursue(self.membership.on(Broken()))

    def join(self, hand_over: HandOver) -> Redo:
        """A newcomer asks until it is a member and has the state, by `hand_over`."""
        self._limit_s, self._hand_over = math.inf, hand_over
        self._refused_since_s = None
        outcome = self._pursue(joining(self.endpoint.member))
        assert isinstance(outcome, Redo)
        return outcome

    def restart_as(self, slot: int, on_claim: Callable[[], None]) -> None:
        """This process is a copy, as the worker in `slot`: it has an endpoint of its own, and is no member yet.

        `on_claim` is called when it has asked to be admitted, by the members that the original knew.
        """
        known, secret = self.membership.view.members, self.endpoint.secret
        self.endpoint = Endpoint(slot, secret=secret)
        self.on_claim = on_claim
        self.find_members = lambda: _alive(known, secret)
        self._newcomers = {}

    def publish(self) -> None:
        """Newcomers that ask at this worker's endpoint learn the terms, and who the members are."""
        members = [vars(member) for member in self.membership.view.members]
        self.endpoint.publish({**self.terms, "members": members}, self.membership.formed)
        if self.roster is not None and self.is_coordinator:
            view = self.membership.view
            self.roster.publish(view.generation, [member.address for member in view.members])
        elif self.roster is not None:
            self.roster.rest()

    def record(self, event: Event) -> None:
        """Notes an event that asks for nothing but to be noted."""
        self.membership, _ = self.membership.on(event)

    def leave(self) -> None:
        """This worker will be left out of the next generation."""
        self.record(Leaving())

    @property
    def has_witness(self) -> bool:
        """Whether two halves can ask which of them goes on: where all have a roster that can be written to."""
        return self.roster is not None and self.roster.is_witness

    @property
    def ports(self) -> set[int]:
        """Those of this worker's own endpoint, and of others', to which connections may be open."""
        addresses = self._addresses | {
            member.address for member in (self.endpoint.member, *self.membership.view.members)
        }
        return {int(address.rsplit(":", 1)[1]) for address in addresses}

    @property
    def is_coordinator(self) -> bool:
        """Whether claims go to this worker, newcomers' too."""
        return self.membership.is_coordinator

    def has_claims(self) -> bool:
        """Whether a claim asks for another generation. 15 us if none has come."""
        for claim in self._new_claims():
            self.record(ClaimReceived(claim))
        return self.membership.asks_for_change(self._newcomers.values())

    def _new_claims(self) -> list[Claim]:
        """The new claims; those of newcomers are kept until some may be admitted.

        One that was given no state, in a generation that the others have formed, comes again as a newcomer. It is
        missed, so its claim counts at once: see Note [Until all have met] in machine.py.
        """
        if not self.endpoint.has_claim():
            return []
        claims = self.endpoint.claims()
        newcomers = {claim.member.slot: claim for claim in claims if claim.is_fresh}
        self._newcomers |= newcomers
        missed = {member.uid for member in (*self.membership.known, *self.membership.view.members)}
        return [claim for claim in claims if self._admits or not claim.is_fresh or claim.member.uid in missed]

    def refuse_superseded(self) -> None:
        """Raises if another training was founded in the roster, where this one could not be reached."""
        if self.roster is not None and self.roster.superseded_by:
            raise Misuse(
                f"another training was founded in the roster {self.roster.name}, from where this one could not be "
                "reached: this one ends, so that there is one"
            )

    def end(self) -> None:
        """All members have come to the end of the script: nobody who comes later has anything to do."""
        if self.roster is not None and self.membership.stage is MembershipStage.MEMBER:
            self.roster.end(f"it ended after step {self.membership.step}")

    def close(self) -> None:
        if self._host_client is not None:
            self._host_client.close()
        self.endpoint.close()

    # -- performing -----------------------------------------------------------------------------------------

    def _pursue(self, following: Next) -> Commit | Redo:
        self._attempts, self._attempted = 0, frozenset()
        self.membership, actions = following
        self._todo = deque(actions)
        while True:
            action = self._todo.popleft()
            if isinstance(action, Commit | Redo):
                return action
            for event in self._perform(action):
                self.membership, more = self.membership.on(event)
                self._todo.extend(more)

    def _perform(self, action: Action) -> Sequence[Event]:
        match action:
            case CloseWire():
                self.wire.close()
            case Probe(members):
                return self._probe(members)
            case SendClaim(host, claim, silent):
                return [self._send_claim(host, claim, silent)]
            case GatherClaims(missing, silent):
                return self._gather(missing, silent)
            case AskWitness(ties):
                return [self._ask_witness(ties)]
            case SendDecision(uid, decision):
                self.endpoint.send_decision(uid, decision)
                self._newcomers = {s: claim for s, claim in self._newcomers.items() if claim.member.uid != uid}
            case Open(decision):
                return [self._open(decision)]
            case FindMembers(silent, taken):
                self._refuse_to_search_on(silent, taken)
                return [MembersFound(self.find_members())]
            case Leave(reason):
                self.endpoint.linger()
                raise LeftOut(f"worker {self.endpoint.member.slot} leaves the run: {reason}")
        return []

    @property
    def _standpoint(self) -> Standpoint:
        return Standpoint(self.membership.me.uid, self.membership.formed.id.generation)

    def _probe(self, members: Sequence[Member], tries: int = PROBES) -> list[Event]:
        """All at once."""
        found = probe_all(members, self.endpoint.secret, self._standpoint, tries=tries)
        return [Probed(uid, health) for uid, health in found.items()]

    def _send_claim(self, host: Member, claim: Claim, silent: Sequence[Member]) -> Event:
        try:
            self._addresses.add(host.address)
            with EndpointClient(host.address, self.endpoint.secret) as client:
                number = client.send_claim(claim)
                self.on_claim()
                while (decision := client.await_decision(number, ANSWER_S)) is None:
                    if (news := self._news_while_waiting(host, silent)) is not None:
                        return news
                    self._refuse_to_wait_on([])
        except DistError:
            return CoordinatorLost(probe(host, self.endpoint.secret) is Liveness.UNREACHABLE)
        return DecisionReceived(decision)

    def _news_while_waiting(self, host: Member, silent: Sequence[Member]) -> Event | None:
        """What makes it useless to wait on for the coordinator's decision."""
        health = probe(host, self.endpoint.secret, self._standpoint)
        if health is Liveness.NEW or (health is Liveness.ELSEWHERE and not self.membership.is_newcomer):
            return Probed(host.uid, health)
        if health not in _ANSWERS:
            return CoordinatorLost(health is Liveness.UNREACHABLE)
        found = probe_all(silent, self.endpoint.secret, self._standpoint, tries=1)
        return next((Probed(uid, one) for uid, one in found.items() if one in _ANSWERS), None)

    def _gather(self, missing: Sequence[Member], silent: Sequence[Member]) -> Sequence[Event]:
        """Claims first; then whether the missing are dead; then waits a moment. Listens on if there is no news."""
        if self._todo or self.membership.stage is not MembershipStage.GATHERING:
            return []  # an earlier event has asked for more since
        news: list[Event] = [ClaimReceived(claim) for claim in self._new_claims()]
        if not news:
            found = probe_all(missing, self.endpoint.secret, self._standpoint)
            usual = {uid: Liveness.NEW if uid in self.membership.new else Liveness.ALIVE for uid in found}
            news = [Probed(uid, health) for uid, health in found.items() if health is not usual[uid]]
        if not news:
            found = probe_all(silent, self.endpoint.secret, self._standpoint, tries=1)
            news = [Probed(uid, health) for uid, health in found.items() if health is not Liveness.UNREACHABLE]
        if not news:
            self._refuse_to_wait_on([member.slot for member in missing])
            self.endpoint.await_claim(GATHER_S)
            self._todo.append(GatherClaims(tuple(missing), tuple(silent)))
        return news

    def _ask_witness(self, ties: Sequence[Tie]) -> Event:
        """See Note [Witness] in roster/roster.py."""
        assert self.roster is not None
        try:
            has_won = all(self.roster.wins(str(tie.id), tie.here) for tie in ties)
        except OSError as error:
            return WitnessAnswered(False, f"the witness {self.roster.name} cannot be asked which half goes on: {error}")
        return WitnessAnswered(has_won, "" if has_won else f"they were first to ask the witness {self.roster.name}")

    def _refuse_to_search_on(self, silent: Sequence[Member], taken: Sequence[Member]) -> None:
        """A newcomer that could not be admitted for too long, because of these members, gives up."""
        now_s, slot = time.monotonic(), self.endpoint.member.slot
        if not silent and not taken:
            self._refused_since_s = None
            return
        self._refused_since_s = now_s if self._refused_since_s is None else self._refused_since_s
        waited_s = now_s - self._refused_since_s
        if taken and waited_s > TAKEN_S:
            raise BadEnvironment(
                f"there is a worker {slot} already, at {taken[0].address}, and it lives. Give this one another number "
                "(LOCKSTEP_SLOT), or, if it belongs to another run, another roster (LOCKSTEP_ROSTER)"
            )
        if silent and waited_s > REACH_S:
            workers = ", ".join(f"{member.slot} ({member.address})" for member in silent)
            raise LeftOut(
                f"worker {slot} cannot join: it does not reach worker {workers}, and who takes part must reach all "
                "others. Is a port closed by a firewall, or a link broken?"
            )
        time.sleep(LOOK_S)  # there is nobody to wait for: these members may be gone, or answer, at any moment

    def _refuse_to_wait_on(self, slots: list[int]) -> None:
        if time.monotonic() - self._began_s > self._limit_s:
            raise MemberHangs(slots, self._limit_s)

    def _open(self, decision: Decision) -> Event:
        attempted = frozenset(member.uid for member in decision.view.members)
        self._attempts = self._attempts + 1 if attempted == self._attempted else 1
        self._attempted = attempted
        try:
            wire = self.opener.form(decision.view, self._standpoint, self._store(decision), self.endpoint.secret)
        except (PeerGone, BadEnvironment, DistError) as error:
            self._refuse_to_try_on(decision, error)
            return Unformed()
        self.wire = wire
        try:
            self._hand_over(decision, wire)
        except (PeerGone, DistError):
            return Unformed()
        self.decision = decision
        return Formed()

    def _refuse_to_try_on(self, decision: Decision, error: Exception) -> None:
        """The same members have failed to connect too often: the latest of them leaves, then the one before, and so on.

        If all left at once, nobody would be there who has the state.
        """
        slot, uids = self.endpoint.member.slot, decision.attempt.uids
        if self.membership.is_newcomer and self._attempts >= MOST_ENTRIES:
            raise LeftOut(f"worker {slot} cannot join: {_CLOSED}: {error}") from error
        later = len(uids) - 1 - uids.index(self.endpoint.member.uid)
        if self._attempts >= MOST_ATTEMPTS + later:
            raise LeftOut(f"worker {slot} leaves the run: {_CLOSED}: {error}") from error

    def _store(self, decision: Decision) -> Store:
        """That of the new generation. The one before was of use until its wire was closed."""
        if self._host_client is not None:
            self._host_client.close()
            self._host_client = None
        if decision.host.uid == self.endpoint.member.uid:
            return self.endpoint.store
        self._addresses.add(decision.host.address)
        self._host_client = EndpointClient(decision.host.address, self.endpoint.secret)
        return self._host_client.store
