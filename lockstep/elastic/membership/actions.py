"""What a worker does about its membership, as the machine asks; `lockstep.elastic.recovery` performs it."""

from dataclasses import dataclass

from lockstep.elastic.membership.quorum import Tie
from lockstep.elastic.membership.view import Claim, Decision, Member


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
    """Find out which of these members are alive; report each by Probed."""

    members: tuple[Member, ...]


@dataclass(frozen=True)
class SendClaim:
    """Send the claim to the coordinator; report by DecisionReceived, or CoordinatorLost.

    Meanwhile probe the coordinator, and the longer members in `silent`, some of which may be new; report by Probed when
    it is ELSEWHERE or NEW, or one of these is alive.
    """

    host: Member
    claim: Claim
    silent: tuple[Member, ...] = ()


@dataclass(frozen=True)
class GatherClaims:
    """Wait for claims at this worker's endpoint; probe the members that are missing, and those that are silent."""

    missing: tuple[Member, ...]
    silent: tuple[Member, ...] = ()


@dataclass(frozen=True)
class AskWitness:
    """Ask the witness whether this worker's half is the first to ask, for each tie; report by WitnessAnswered."""

    ties: tuple[Tie, ...]


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
    """Find out who the members are now; report by MembersFound.

    `silent` are those that were not reached before, `taken` the one that has this worker's slot and lives: as long as
    there are any, this worker cannot be admitted.
    """

    silent: tuple[Member, ...] = ()
    taken: tuple[Member, ...] = ()


@dataclass(frozen=True)
class Leave:
    """This worker has no part in the run any more."""

    reason: str


Action = (
    CloseWire
    | Commit
    | Redo
    | Probe
    | SendClaim
    | GatherClaims
    | AskWitness
    | SendDecision
    | Open
    | FindMembers
    | Leave
)
