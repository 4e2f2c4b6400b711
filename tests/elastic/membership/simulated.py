"""One simulated worker: where it is in a step, what it has sent and heard, whose claims wait at its endpoint."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lockstep.elastic.membership import Claim, Decision, Membership
from lockstep.elastic.membership.view import Attempt, GenerationId

Moment = tuple[GenerationId, int]
"""A generation, and a step in it."""


class Phase(Enum):
    """Where a worker's own code is."""

    OUTSIDE = "between steps, all updates applied"
    REDUCING = "has sent its lanes, awaits those of the others"
    WAITING = "has added its slice, awaits that all have"
    UPDATING = "the step is committed, the update not applied yet"
    RECOVERING = "not in a generation"


@dataclass(frozen=True)
class Gradient:
    """What a step's gradient was added up from: (lane, generation in which it was computed), one for each addition."""

    step: int
    parts: tuple[tuple[int, GenerationId], ...]

    @property
    def lanes(self) -> list[int]:
        return sorted(lane for lane, _ in self.parts)


@dataclass(frozen=True)
class Message:
    """Of a step's exchange: a worker's lanes (`lanes`), or that it has added its slice (None)."""

    generation: GenerationId
    step: int
    lanes: tuple[int, ...] | None
    asks_for_change: bool = False


@dataclass(frozen=True)
class Send:
    """Something still to be sent."""

    to: str
    message: Message


@dataclass
class Worker:
    """One process: its machine, its part in the step, its endpoint."""

    machine: Membership
    todo: deque[Any] = field(default_factory=deque)
    alive: bool = True
    phase: Phase = Phase.RECOVERING
    wire: GenerationId | None = None  # the generation whose wire is open, or being opened, here
    gradient: Gradient | None = None
    applied: list[int] | None = None  # None: it was not given the state yet
    committed: dict[int, Gradient] = field(default_factory=dict)
    published: Attempt | None = None  # what its endpoint tells of the generation that it is part of
    lanes_of: dict[Moment, dict[str, Message]] = field(default_factory=lambda: defaultdict(dict))
    prepared: dict[Moment, set[str]] = field(default_factory=lambda: defaultdict(set))
    slices: dict[Moment, set[str]] = field(default_factory=lambda: defaultdict(set))  # whose stand in its sum
    change_agreed: bool = False
    inbox: list[Claim] = field(default_factory=list)  # claims not read yet
    post: list[tuple[int, Claim]] = field(default_factory=list)  # claims on their way here
    serials: dict[str, int] = field(default_factory=dict)  # the latest claim of each that has come here
    answers: dict[str, tuple[int, Decision]] = field(default_factory=dict)
    call: tuple[str, int] | None = None
    failed: bool = False  # whether the claim could not be sent
    knocks: set[str] = field(default_factory=set)
    told_alive: set[str] = field(default_factory=set)
    longer: set[str] = field(default_factory=set)  # silent members that should coordinate, if they come back
    misses: bool = False  # a newcomer: whether it did not reach all members
    opening: Decision | None = None
    why_left: str | None = None

    @property
    def uid(self) -> str:
        return self.machine.me.uid

    @property
    def is_there(self) -> bool:
        return self.alive and self.why_left is None

    @property
    def has_state(self) -> bool:
        return self.machine.view.generation > 0

    @property
    def moment(self) -> "Moment":
        return self.machine.formed.id, self.machine.step
