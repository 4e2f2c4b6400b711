"""One simulated worker: where it is in a step, what it has sent and heard, whose claims wait at its endpoint."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lockstep.elastic.membership import Claim, Decision, Membership


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
    parts: tuple[tuple[int, int], ...]

    @property
    def lanes(self) -> list[int]:
        return sorted(lane for lane, _ in self.parts)


@dataclass(frozen=True)
class Message:
    """Of a step's exchange: a worker's lanes (`lanes`), or that it has added its slice (None)."""

    generation: int
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
    wire: int | None = None  # the generation whose wire is open, or being opened, here
    gradient: Gradient | None = None
    applied: list[int] | None = None  # None: it was not given the state yet
    committed: dict[int, Gradient] = field(default_factory=dict)
    lanes_of: dict[tuple[int, int], dict[str, Message]] = field(default_factory=lambda: defaultdict(dict))
    prepared: dict[tuple[int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    slices: dict[tuple[int, int], set[str]] = field(default_factory=lambda: defaultdict(set))  # whose stand in its sum
    change_agreed: bool = False
    inbox: list[Claim] = field(default_factory=list)  # claims not read yet
    serials: dict[str, int] = field(default_factory=dict)  # the latest claim of each that has come here
    answers: dict[str, tuple[int, Decision]] = field(default_factory=dict)
    call: tuple[str, int] | None = None
    knocks: set[str] = field(default_factory=set)
    told_alive: set[str] = field(default_factory=set)
    finding: bool = False
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
    def moment(self) -> tuple[int, int]:
        return self.machine.view.generation, self.machine.step
