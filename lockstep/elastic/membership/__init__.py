"""Who takes part, decided without talking to anybody: a state machine that answers `events` with `actions`.

`view` holds the values, `quorum` who may go on, `decision` what one worker decides for all, `machine` the states of one
worker. Nothing here touches a socket, a clock or a tensor: `lockstep.elastic` performs the actions.
"""

from lockstep.elastic.membership.decision import Poll, Verdict, decide
from lockstep.elastic.membership.machine import Membership, MembershipStage, founded, joining
from lockstep.elastic.membership.quorum import Outnumbered
from lockstep.elastic.membership.view import Claim, Decision, LaneDeal, Liveness, Member, View

__all__ = [
    "Claim",
    "Decision",
    "LaneDeal",
    "Liveness",
    "Member",
    "Membership",
    "MembershipStage",
    "Outnumbered",
    "Poll",
    "Verdict",
    "View",
    "decide",
    "founded",
    "joining",
]
