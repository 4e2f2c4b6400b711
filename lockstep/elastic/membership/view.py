"""The values of membership: a worker as the others know it, a generation, what a worker claims, what is decided."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from lockstep.lanes import Assignment


@dataclass(frozen=True)
class Member:
    """A worker for its whole life. `slot` is its name for people, `address` that of its endpoint.

    `since` is the generation that admitted it; 0 for founders, and for a newcomer as long as it is not admitted. One
    that is `fresh` has run the script from the top while the others trained: its own variables began anew.
    """

    uid: str
    slot: int
    address: str
    since: int = 0
    fresh: bool = False

    @property
    def seniority(self) -> tuple[int, int]:
        """Smaller for longer members. See Note [The longest member coordinates] in machine.py."""
        return self.since, self.slot


@dataclass(frozen=True)
class View:
    """The members of one generation, in order of their slots: a member's place is its rank."""

    generation: int
    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        slots = [member.slot for member in self.members]
        assert slots == sorted(set(slots)), f"members must stand in order of their slots, not {slots}"

    def __contains__(self, uid: str) -> bool:
        return any(member.uid == uid for member in self.members)

    def rank_of(self, uid: str) -> int:
        return next(rank for rank, member in enumerate(self.members) if member.uid == uid)


@dataclass(frozen=True, order=True)
class GenerationId:
    """Which decision a generation comes from: its number, and the uid of the worker that decided it.

    Numbers alone can be given twice, by workers that do not reach each other.
    """

    generation: int
    decider: str

    def __str__(self) -> str:
        return f"{self.generation}-{self.decider}"


@dataclass(frozen=True)
class Attempt:
    """A generation that was decided, whether it was formed by all, by some or by nobody.

    `uids` are its members, the longest first.
    """

    id: GenerationId
    uids: tuple[str, ...]

    @classmethod
    def of(cls, view: View, decider: str) -> "Attempt":
        ordered = sorted(view.members, key=lambda member: member.seniority)
        return cls(GenerationId(view.generation, decider), tuple(member.uid for member in ordered))


NEVER = Attempt(GenerationId(0, ""), ())
"""The generation of a worker that was never part of one."""


@dataclass(frozen=True)
class LaneDeal:
    """How lanes are dealt out, known alike to all members: their number, and those of each slot if given by hand."""

    num_lanes: int = 1
    by_hand: tuple[tuple[int, ...], ...] | None = None

    def assignment(self, members: Sequence[Member]) -> Assignment:
        """The lanes of each member, by rank."""
        return Assignment.dealt(self.num_lanes, [member.slot for member in members], self.by_hand)


ONE_LANE = LaneDeal()
"""Where nobody has said how lanes are dealt out."""


@dataclass(frozen=True)
class Claim:
    """What a worker says of itself to the coordinator, when a new generation is formed.

    It has applied or may apply all steps before `step`. `prepared`: it has done its part of `step`, and has the whole
    gradient if anybody has gone past that step. `generation` is the last number that it has heard of; 0 for a newcomer,
    who has no state yet. `formed` is the generation that it was part of last, `attempts` are those that it has tried to
    form since, and `silent` are the members (by uid) that it does not reach.
    """

    member: Member
    generation: int
    step: int
    prepared: bool = False
    leaving: bool = False
    formed: GenerationId = NEVER.id
    attempts: tuple[Attempt, ...] = ()
    silent: tuple[str, ...] = ()

    @property
    def is_newcomer(self) -> bool:
        return self.generation == 0

    @property
    def is_fresh(self) -> bool:
        """Whether it is a newcomer that must be given the state; a copy of a member has it."""
        return self.is_newcomer and self.member.fresh


@dataclass(frozen=True)
class Decision:
    """The next generation, the same value for everyone in it, and for everyone left out.

    `assignment` has the lanes of each member, by rank; None if nobody stays. The step to compute is `step`: a worker
    that claimed the one before has its gradient and completes it first. `newcomers` (by uid) are given the state by a
    member that has it. `lost` did not answer, `left` wanted to leave or could not be kept. One without members says
    that nobody may go on with the `decider`, who does not reach `lost`: see Note [Who may go on] in quorum.py.
    """

    view: View
    step: int
    assignment: Assignment | None = None
    newcomers: tuple[str, ...] = ()
    lost: tuple[Member, ...] = ()
    left: tuple[Member, ...] = ()
    decider: str = ""

    @property
    def attempt(self) -> Attempt:
        return Attempt.of(self.view, self.decider)

    @property
    def host(self) -> Member:
        """At whose endpoint the generation opens its wire: the first member that is not new."""
        return next(member for member in self.view.members if member.uid not in self.newcomers)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Decision":
        fields = json.loads(text)
        view = View(fields["view"]["generation"], _members(fields["view"]["members"]))
        dealt = fields["assignment"]
        lanes = None if dealt is None else Assignment.explicit(dealt["lanes_of"])
        lost, left = _members(fields["lost"]), _members(fields["left"])
        return cls(view, fields["step"], lanes, tuple(fields["newcomers"]), lost, left, fields["decider"])


class Liveness(Enum):
    """What a probe finds: the worker's kernel says that it is gone, it is there, or nothing answers.

    ELSEWHERE: it is there, in a later generation than the one who asks, and without it. NEW: it is there, and was never
    part of a generation, as far as its endpoint tells.
    """

    DEAD = "dead"
    ALIVE = "alive"
    UNREACHABLE = "unreachable"
    ELSEWHERE = "elsewhere"
    NEW = "new"


def claim_to_json(claim: Claim) -> str:
    return json.dumps(asdict(claim))


def claim_from_json(text: str) -> Claim:
    fields = json.loads(text)
    attempts = tuple(Attempt(GenerationId(**one["id"]), tuple(one["uids"])) for one in fields["attempts"])
    parts = {"member": Member(**fields["member"]), "formed": GenerationId(**fields["formed"])}
    return Claim(**{**fields, **parts, "attempts": attempts, "silent": tuple(fields["silent"])})


def _members(fields: list[dict[str, object]]) -> tuple[Member, ...]:
    return tuple(Member(**member) for member in fields)  # type: ignore[arg-type]
