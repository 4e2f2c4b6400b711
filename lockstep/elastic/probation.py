"""Newcomers are proven, or sent away. Pure.

# Note [Probation]
# A newcomer has run the script from the top, so its own variables may stand elsewhere than those of the others. It is
# admitted where a turn of the script begins, and carries no lanes at first: it takes part in the exchanges, gets the
# gradient, makes its own updates, and must be at the same place as the others in every step. When a whole turn is over,
# with an update in it, its state is compared too, and from then on it carries lanes. Nothing that it touched before has
# counted.

# Note [Misfits]
# Where workers disagree, those that run the script from its beginning are right: a newcomer that is of another mind
# leaves, also later, when a scheduler that nobody tracked has taken it elsewhere. No step was committed on which it
# disagreed. If the others disagree among themselves, the script is at fault, and all are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.elastic.membership import Member


@dataclass(frozen=True)
class Probation:
    """Who is on probation, by uid, and where the turn began in which the last of them was admitted."""

    uids: frozenset[str] = frozenset()
    turn: int = 0
    updates: int = 0

    def is_over(self, turn: int, updates: int) -> bool:
        """Whether a whole turn has gone by, with an update in it if the script ever makes one by an optimizer."""
        return turn > self.turn and (updates > self.updates or updates == 0)


def misfits(sides: Sequence[Sequence[int]], members: Sequence[Member]) -> list[int] | None:
    """The ranks that must leave, of workers that disagree; None if it is not for newcomers to leave.

    `sides` has those together that agree. See Note [Misfits].
    """
    longest = min(range(len(members)), key=lambda rank: members[rank].seniority)
    right = next((side for side in sides if longest in side), ())
    others = [rank for rank in range(len(members)) if rank not in right]
    return others if right and others and all(members[rank].fresh for rank in others) else None
