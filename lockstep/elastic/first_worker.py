"""Who is rank 0 while worker 0 is missing.

# Note [Worker 0]
# Many scripts give rank 0 something to hold when they begin (`writer = SummaryWriter() if run.rank == 0 else None`) and
# use it later under the same condition. A worker that became rank 0 in the middle would have none. So where a script
# asks for its rank before it trains, and worker 0 is lost, nobody is rank 0 until its replacement is there, which has
# run the script from the top as rank 0; the others wait for it where the next turn begins. Where nobody can come
# in its place, the first of those who are left is rank 0, and a note says what it may lack.
"""

import time
from collections.abc import Callable, Sequence

from lockstep.launch.channels.status import NoStatus, StatusWriter


class FirstWorker:
    """Whether the script needs worker 0 itself, and whether it is waited for. See Note [Worker 0]."""

    def __init__(self, status: StatusWriter | NoStatus, clock: Callable[[], float] = time.monotonic) -> None:
        self._status, self._clock = status, clock
        self.is_needed = False
        """Whether the script may have given worker 0 things that no other has."""
        self._until_s = float("inf")
        self._has_noted = False

    def is_awaited(self, slots: Sequence[int]) -> bool:
        """Whether worker 0 is missing among `slots`, and somebody may come in its place that the script needs."""
        may_come = self.is_needed and 0 not in slots and not self._status.is_given_up(0)
        return may_come and self._clock() < self._until_s

    def give_up(self) -> None:
        """Nobody has come in its place for too long."""
        self._until_s = self._clock()

    def succession(self, slots: Sequence[int], own_slot: int) -> str | None:
        """What to note, once, when the worker in `own_slot` becomes rank 0 for good."""
        if not self.is_needed or 0 in slots or self._has_noted or self.is_awaited(slots):
            return None
        self._has_noted = True
        return (
            f"worker {own_slot} is rank 0 from now on: worker 0 is lost, and nobody takes its place. What the script "
            "made on rank 0 before it trained (a writer, a file) is not here: make such things where they are used."
        )
