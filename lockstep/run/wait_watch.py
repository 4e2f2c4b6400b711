"""Reports the workers that keep this one waiting, where no launcher watches.

# Note [Waits that nobody watches]
# Under `lockstep run` the launcher sees who waits for whom (supervision/hangs.py). Started by hand, or by Slurm, MPI or
# torchrun, a worker that hangs would be waited for in silence until timeout_s. So every worker has a thread that
# looks once a second whether its worker waits, and for whom, and says so when that lasts unusually long. To say it
# once, only worker 0 does; if worker 0 is waited for, the first of the others.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from lockstep.events import Wait
from lockstep.launch.channels.status import Collective, NoStatus, Phase
from lockstep.wire import Wire
from lockstep.world import World

LOOK_S = 1.0
LONG_S = 10.0
"""A wait that is reported lasts so long, and twice as long as any before that has ended."""


@dataclass(frozen=True)
class LookedAtWait:
    """Where a worker is, since when, and whether it waits for others there."""

    phase: int
    step: int
    call: int
    since_s: float

    @property
    def is_one(self) -> bool:
        return self.phase in (Phase.REDUCING, Phase.RECOVERING, Phase.AWAITING)

    def where(self) -> str:
        if self.phase == Phase.AWAITING:
            return f"at {Wait[Collective(self.call).name]}"
        return "to form the next generation" if self.phase == Phase.RECOVERING else f"in step {self.step}"


@dataclass(frozen=True)
class LongestWait:
    """How long waits have lasted, and how long the one under way must last to be reported."""

    longest_s: float = 0.0
    reported_s: float = 0.0

    @property
    def limit_s(self) -> float:
        return max(LONG_S, 2 * self.longest_s, 2 * self.reported_s)


class WaitWatch(NoStatus):
    """What a worker without a launcher writes to. See Note [Waits that nobody watches]."""

    def __init__(self, world: World, say: Callable[[str], None] | None = None, look_s: float | None = None) -> None:
        self._world, self._say, self._look_s = world, say or _print, LOOK_S if look_s is None else look_s
        self._present_wire: Callable[[], Wire | None] = lambda: None
        self._timeout_s = 0.0
        self._wait = LookedAtWait(Phase.STARTING, 0, 0, time.monotonic())
        self._patience = LongestWait()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="lockstep-waiting", daemon=True)
        self._thread.start()

    def watch(self, wire: Callable[[], Wire], timeout_s: float) -> None:
        """From now on it is known who is waited for: `wire` gives that of the present generation."""
        self._present_wire, self._timeout_s = wire, timeout_s

    def enter(self, phase: int, step: int, a: int = 0, b: int = 0) -> None:
        now_s, before = time.monotonic(), self._wait
        if (phase, step, a) == (before.phase, before.step, before.call):
            return  # another bucket of the same wait
        if before.is_one:
            self._patience = LongestWait(max(self._patience.longest_s, now_s - before.since_s))
        self._wait = LookedAtWait(phase, step, a, now_s)

    @contextmanager
    def awaiting(self, call: Collective) -> Iterator[None]:
        before = self._wait
        self.enter(Phase.AWAITING, before.step, call)
        yield
        self.enter(before.phase, before.step, before.call)

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _look_on(self) -> None:
        while not self._over.wait(self._look_s):
            self._look(time.monotonic())

    def _look(self, now_s: float) -> None:
        wait, patience = self._wait, self._patience
        waited_s = now_s - wait.since_s
        if not wait.is_one or waited_s < patience.limit_s:
            return
        self._patience = replace(patience, reported_s=waited_s)
        wire = self._present_wire()
        awaited = [] if wire is None else wire.awaited()
        world = self._world if wire is None else wire.world
        if _reports(world, awaited):
            self._say(report_of(wait, waited_s, awaited, world.size, self._timeout_s))


def report_of(wait: LookedAtWait, waited_s: float, awaited: list[int], size: int, timeout_s: float) -> str:
    """The line on a long wait."""
    is_known = len(awaited) == 1 or 0 < len(awaited) < size - 1
    who = f"worker {', '.join(map(str, awaited))}" if is_known else "other workers"
    limit = f"; after {timeout_s:g} s without a word this worker ends" if timeout_s else ""
    return f"! waiting for {who} {wait.where()} for {waited_s:.0f} s{limit}"


def _reports(world: World, awaited: list[int]) -> bool:
    """Where nobody knows who is waited for, worker 1 does too: it may be worker 0."""
    others = [rank for rank in range(world.size) if rank not in awaited]
    first = min(others, default=world.rank) if 0 in awaited else 1
    return world.rank == 0 or (world.rank == first and (0 in awaited or not awaited))


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
