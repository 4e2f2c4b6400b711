"""What happens to a worker's membership: see `Membership.on` in machine.py."""

from dataclasses import dataclass

from lockstep.elastic.membership.view import Claim, Decision, Liveness, Member


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
class WitnessAnswered:
    """Whether this worker's half was the first to ask the witness; `why` if the witness could not be asked."""

    has_won: bool
    why: str = ""


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
    """The coordinator does not answer any more; `is_silent`: nor does its host, so that it may live."""

    is_silent: bool = False


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
    | WitnessAnswered
    | ClaimReceived
    | DecisionReceived
    | CoordinatorLost
    | Formed
    | Unformed
)
