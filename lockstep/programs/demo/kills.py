"""Which workers the demo kills, and when: a plan, and a killer that carries it out."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lockstep.launch.pool import WorkerPool

MOST_KILLS = 6
STEPS_PER_KILL = 12
"""In a short run fewer are killed: so many steps are the least between two."""

GOES_ON = "going on in"
"""Part of the line by which a run reports that the remaining workers go on."""


@dataclass(frozen=True)
class LivingWorker:
    """A member that lives, in the `step` that is under way."""

    slot: int
    pid: int
    step: int


@dataclass(frozen=True)
class KillRecord:
    """One kill. `pause_s` is the time until the next step that was committed without the victim; None until then."""

    victim: LivingWorker
    pause_s: float | None = None


@dataclass(frozen=True)
class KillPlan:
    """When to kill which worker, if it lives; it follows from the seed."""

    steps: int
    num_workers: int
    seed: int

    @property
    def num_kills(self) -> int:
        return min(MOST_KILLS, self.steps // STEPS_PER_KILL)

    def due(self, number: int) -> int:
        """After so many steps comes kill `number`, from 1. All are spread evenly over the run, its ends left out."""
        return self.steps * number // (self.num_kills + 1)

    def order(self, number: int) -> list[int]:
        """All slots, the one to kill first; within `num_workers` kills each slot's turn comes once, worker 0's too."""
        turn, place = divmod(number - 1, self.num_workers)
        slots = list(range(self.num_workers))
        random.Random(f"kills/{self.seed}/{turn}").shuffle(slots)
        return slots[place:] + slots[:place]


def living_members(pool: WorkerPool) -> list[LivingWorker]:
    """The members of the newest generation that live, by slot."""
    rows = {slot: pool.row(slot) for slot in sorted(pool.running) if pool.state(slot) not in ("Z", "X")}
    newest = max((row.generation for row in rows.values()), default=0)
    return [
        LivingWorker(slot, row.pid, row.step)
        for slot, row in rows.items()
        if row.generation == newest > 0 and not row.is_ending
    ]


def choose(plan: KillPlan, number: int, members: Sequence[LivingWorker]) -> LivingWorker | None:
    """The victim of kill `number`; None while only one member lives, for then the run would have to start again."""
    if len(members) < 2:
        return None
    order = plan.order(number)
    return min(members, key=lambda member: order.index(member.slot))


class Killer:
    """Follows a run by its output, kills by the plan, and records each kill in `kills`.

    `members` returns the live ones, `kill` kills the worker of a slot, `say` shows a line. The next one is killed only
    after the run has gone on from the kill before, so each pause is that of one kill.
    """

    def __init__(
        self,
        plan: KillPlan,
        members: Callable[[], Sequence[LivingWorker]],
        kill: Callable[[int], None],
        clock: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self.kills: list[KillRecord] = []
        self._plan, self._members, self._kill, self._clock, self._say = plan, members, kill, clock, say
        self._killed_s = 0.0
        self._goes_on = True

    def read_line(self, line: str) -> None:
        """The run has written a line of its own."""
        self._goes_on = self._goes_on or GOES_ON in line

    def stepped(self, step: int) -> None:
        """The run has reported that so many steps are done."""
        if not self._goes_on:
            return
        if self.kills and self.kills[-1].pause_s is None:
            pause_s = self._clock() - self._killed_s
            self.kills[-1] = replace(self.kills[-1], pause_s=pause_s)
            self._say(f"  the next step was done {pause_s:.2f} s after the kill")
        if len(self.kills) < self._plan.num_kills and self._plan.due(len(self.kills) + 1) <= step < self._plan.steps:
            self._strike(len(self.kills) + 1)

    def _strike(self, number: int) -> None:
        victim = choose(self._plan, number, self._members())
        if victim is None:
            return
        self._say(
            f"kill {number} of {self._plan.num_kills}: worker {victim.slot} (pid {victim.pid}) at step {victim.step}"
        )
        self.kills.append(KillRecord(victim))
        self._goes_on = False
        self._killed_s = self._clock()
        self._kill(victim.slot)
