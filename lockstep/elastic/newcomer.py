"""What newcomers are given, where in the script they stand when they take part, and how they are proven or sent away.

See Note [Newcomers] in formation.py.

# Note [Probation]
# A newcomer has run the script from the top, so its own variables may stand elsewhere than those of the others. It is
# admitted where a turn of the script begins, and carries lanes like any other: a script may read after the lanes what
# they have left (`loss.item()`). But until a whole turn is over, with an update in it, and in the step after it, the
# place, the batch and all state are compared before a step counts: where the newcomer's differ, it leaves, and its
# lanes are computed again by the others. Nothing that it touched has counted then.

# Note [Misfits]
# Where workers disagree, those that run the script from its beginning are right: a newcomer that is of another mind
# leaves, also later, when a scheduler that nobody tracked has taken it elsewhere. No step was committed on which it
# disagreed. If the others disagree among themselves, the script is at fault, and all are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.chance import Generators
from lockstep.data import GlobalBatch
from lockstep.determinism.hardware import compared, refuse_difference
from lockstep.elastic.membership import Member
from lockstep.state.run_state import GRADIENT, RunState, check_fits
from lockstep.state.snapshot import Snapshot


class Handoff:
    """Both sides of it: what a member gives, and what a newcomer takes."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._given: Generators | None = None

    @property
    def is_on_its_way(self) -> bool:
        """Whether this worker was given the state, and its script has not come to its first batch yet."""
        return self._given is not None

    def arrive(self) -> None:
        """What a newcomer's script drew on the way to its first batch does not count."""
        if self._given is not None:
            self._given.restore()
            self._given = None

    def state(self, batch: GlobalBatch | None, turns: int) -> Snapshot:
        """The state before the step under way, whose `batch` is to be handed out again by the newcomer's loader."""
        snapshot = self._run.capture()
        snapshot.state["epoch"] = self._run.progress.epoch
        # What the newcomer does next is compared with what the members do: it needs no rhythm from before.
        snapshot.state["script"] |= {"turns": turns, "rhythm": []}
        if batch is not None and batch.loader is not None and batch.position is not None:
            snapshot.state["loaders"][str(batch.loader)] = [batch.position.epoch, batch.position.step]
            snapshot.state["drawn"][str(batch.loader)] = batch.drawn
        gradients = self._run.models.gradients()
        snapshot.tensors.update({f"{GRADIENT}{name}": gradient for name, gradient in gradients.items()})
        return snapshot

    def take(self, snapshot: Snapshot, rank: int) -> None:
        """This worker, a newcomer, stands where the members do."""
        check_fits(self._run.models, snapshot, Path("of the run under way"))
        refuse_difference(snapshot.state["hardware"], compared(self._run.device), rank)
        self._run.install(snapshot)
        self._run.places.joined()
        self._given = Generators.now()


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
