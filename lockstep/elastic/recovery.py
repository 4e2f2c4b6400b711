"""Runs one worker's membership: performs its actions, and tells it what came of them."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from lockstep.elastic.client import Guest, knock, knock_all
from lockstep.elastic.endpoint import Door
from lockstep.elastic.membership import Claim, Decision, Health, Member, Membership, Stage
from lockstep.elastic.membership.machine import (
    Action,
    Answer,
    Answered,
    Broken,
    Call,
    Called,
    CloseWire,
    Commit,
    Event,
    FindMembers,
    Formed,
    HostLost,
    Knock,
    Known,
    Leave,
    Leaving,
    Listen,
    Next,
    Open,
    Probed,
    Redo,
    Unformed,
    joining,
)
from lockstep.elastic.opener import Opener
from lockstep.errors import BadEnvironment, LockstepError, PeerGone
from lockstep.wire import Wire

LISTEN_S = 0.05
ANSWER_S = 1.0
MOST_ATTEMPTS = 100
"""How many generations in a row may fail to form: every worker can die once, but a lasting fault is not chance."""


@dataclass
class Hangs(LockstepError):  # noqa: N818
    """Others were waited for in vain to form the next generation, although they live: `slots`, if they are known."""

    slots: list[int]
    waited_s: float

    def __str__(self) -> str:
        return f"it lives, but has not come to form the next generation for {self.waited_s:g} s"


class LeftOut(LockstepError):  # noqa: N818
    """This worker has no part in the run any more."""


_of_originals: list[Door] = []
"""The doors of workers that this process is a copy of: to end one would be to wait for its threads."""


HandOver = Callable[[Decision, Wire], None]


def _nothing() -> None:
    """Nobody wants to know."""


def _nothing_to_hand_over(decision: Decision, wire: Wire) -> None:
    """Until a generation is formed."""


def _alive(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """Those of them that live; raises if none does."""
    health = knock_all(members)
    found = tuple(member for member in members if health[member.uid] is not Health.DEAD)
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
    door: Door
    opener: Opener
    wire: Wire
    """That of the present generation."""
    terms: Mapping[str, Any]
    find_members: Callable[[], tuple[Member, ...]]
    on_call: Callable[[], None] = _nothing
    decision: Decision | None = None
    _doors: set[str] = field(default_factory=set)
    """The doors to which this worker has gone: connections may be open for as long as it lives."""
    _hand_over: HandOver = _nothing_to_hand_over
    _limit_s: float = math.inf
    _began_s: float = 0.0
    _attempts: int = 0
    _admits: bool = False
    _newcomers: dict[int, Claim] = field(default_factory=dict)
    _todo: deque[Action] = field(default_factory=deque)
    _found: dict[str, Health] = field(default_factory=dict)

    def reform(self, hand_over: HandOver, *, admit: bool = False, limit_s: float = math.inf) -> Commit | Redo:
        """Collective. Forms the next generation of all who are left; says what becomes of the step under way.

        `hand_over` is called when its wire is open: it gives newcomers the state, or takes it. With `admit`, a
        newcomer that waits at the door is admitted. Afterwards `wire` is that of the new generation, and `decision`
        says what has changed. Hangs if one that lives has not come after `limit_s`.
        """
        self._admits, self._hand_over = admit, hand_over
        self._limit_s, self._began_s = limit_s, time.monotonic()
        claims = self._heard()  # a copy has called: all members may be there at once
        if admit:
            claims += [claim for claim in self._newcomers.values() if claim not in claims]
        for claim in claims:
            self.tell(Called(claim))
        return self._pursue(self.membership.on(Broken()))

    def join(self, hand_over: HandOver) -> Redo:
        """A newcomer asks until it is a member and has the state, by `hand_over`."""
        self._limit_s, self._hand_over = math.inf, hand_over
        outcome = self._pursue(joining(self.door.member))
        assert isinstance(outcome, Redo)
        return outcome

    def begin_anew(self, slot: int, on_call: Callable[[], None]) -> None:
        """This process is a copy, as the worker in `slot`: it has a door of its own, and is no member yet.

        `on_call` is called when it has asked to be admitted, by the members that the original knew.
        """
        known = self.membership.view.members
        _of_originals.append(self.door)
        self.door = Door(slot)
        self.on_call = on_call
        self.find_members = lambda: _alive(known)
        self._newcomers = {}

    def publish(self) -> None:
        """Newcomers that ask at this worker's door learn the terms, and who the members are."""
        members = [vars(member) for member in self.membership.view.members]
        self.door.tell({**self.terms, "members": members})

    def tell(self, event: Event) -> None:
        """Notes an event that asks for nothing but to be noted."""
        self.membership, _ = self.membership.on(event)

    def leave(self) -> None:
        """This worker will be left out of the next generation."""
        self.tell(Leaving())

    @property
    def ports(self) -> set[int]:
        """Those of this worker's own door, and of the doors of others, to which connections may be open."""
        doors = self._doors | {member.door for member in (self.door.member, *self.membership.view.members)}
        return {int(door.rsplit(":", 1)[1]) for door in doors}

    @property
    def hosts(self) -> bool:
        """Whether all meet at this worker's door, newcomers too."""
        return self.membership.keeps_door

    def hears(self) -> bool:
        """Whether somebody at this worker's door waits for another generation. 15 us if nobody has come."""
        for claim in self._heard():
            self.tell(Called(claim))
        taken = {member.slot for member in self.membership.view.members}
        strays = any(not claim.is_newcomer for claim in self.membership.claims)
        return strays or any(slot not in taken for slot in self._newcomers)

    def _heard(self) -> list[Claim]:
        """The new claims at the door; those of newcomers are kept until some may be admitted.

        One that was given no state, in a generation that the others have formed, comes again as a newcomer. It is
        missed, so it is heard at once: see Note [Until all have met] in machine.py.
        """
        if not self.door.has_call():
            return []
        claims = self.door.calls()
        newcomers = {claim.member.slot: claim for claim in claims if claim.is_fresh}
        self._newcomers |= newcomers
        missed = {member.uid for member in (*self.membership.known, *self.membership.view.members)}
        return [claim for claim in claims if self._admits or not claim.is_fresh or claim.member.uid in missed]

    def close(self) -> None:
        self.door.close()

    # -- performing -----------------------------------------------------------------------------------------

    def _pursue(self, following: Next) -> Commit | Redo:
        self._attempts = 0
        self._found = {}
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
            case Knock(member):
                return [Probed(member.uid, self._knock(member))]
            case Call(host, claim):
                return [self._call(host, claim)]
            case Listen(missing):
                return self._listen(missing)
            case Answer(uid, decision):
                self.door.answer(uid, decision)
                self._newcomers = {s: claim for s, claim in self._newcomers.items() if claim.member.uid != uid}
            case Open(decision):
                return [self._open(decision)]
            case FindMembers():
                return [Known(self.find_members())]
            case Leave(reason):
                self.door.linger()
                raise LeftOut(f"worker {self.door.member.slot} leaves the run: {reason}")
        return []

    def _knock(self, member: Member) -> Health:
        """Knocks at all doors at once, since the others' may be next. What was found at a door is told once."""
        if member.uid not in self._found:
            self._found = knock_all({member, *self.membership.known} - {self.membership.me})
        return self._found.pop(member.uid)

    def _call(self, host: Member, claim: Claim) -> Event:
        try:
            self._doors.add(host.door)
            guest = Guest(host.door)
            number = guest.call(claim)
            self.on_call()
            while (decision := guest.answer(number, ANSWER_S)) is None:
                if knock(host) is not Health.ALIVE:
                    return HostLost()
                self._refuse_to_wait_on([])
        except DistError:
            return HostLost()
        return Answered(decision)

    def _listen(self, missing: Sequence[Member]) -> Sequence[Event]:
        """Claims first; then whether the missing are dead; then waits a moment. Listens on if there is no news."""
        if self._todo or self.membership.stage is not Stage.GATHERING:
            return []  # an earlier event has asked for more since
        news: list[Event] = [Called(claim) for claim in self._heard()]
        if not news:
            found = knock_all(missing)
            news = [Probed(uid, health) for uid, health in found.items() if health is not Health.ALIVE]
        if not news:
            self._refuse_to_wait_on([member.slot for member in missing])
            self.door.await_call(LISTEN_S)
            self._todo.append(Listen(tuple(missing)))
        return news

    def _refuse_to_wait_on(self, slots: list[int]) -> None:
        if time.monotonic() - self._began_s > self._limit_s:
            raise Hangs(slots, self._limit_s)

    def _open(self, decision: Decision) -> Event:
        self._attempts += 1
        try:
            wire = self.opener.form(decision.view, self.door.member.uid, self._store(decision))
        except (PeerGone, BadEnvironment, DistError):
            if self._attempts >= MOST_ATTEMPTS:
                raise
            return Unformed()
        self.wire = wire
        try:
            self._hand_over(decision, wire)
        except (PeerGone, DistError):
            return Unformed()
        self.decision = decision
        return Formed()

    def _store(self, decision: Decision) -> Store:
        if decision.host.uid == self.door.member.uid:
            return self.door.store
        self._doors.add(decision.host.door)
        return Guest(decision.host.door).store
