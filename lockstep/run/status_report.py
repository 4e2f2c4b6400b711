"""Writes what events say of this worker to its row of the launcher's status page."""

import statistics
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

from lockstep.events import (
    Closed,
    Event,
    JoinBegan,
    LaneBegan,
    RecoveryBegan,
    StepBegan,
    StepCommitted,
    Wait,
    WaitBegan,
    WaitEnded,
)
from lockstep.launch.status import Collective, NoStatus, Phase, StatusWriter

READ = (StepBegan, LaneBegan, WaitBegan, WaitEnded, StepCommitted, RecoveryBegan, JoinBegan, Closed)
"""The events that it reads."""

REMEMBERED = 31
LEARN_EVERY = 8

_CALLS = {
    Wait.START: Collective.START,
    Wait.REPLICATE: Collective.REPLICATE,
    Wait.RESUME: Collective.RESUME,
    Wait.CHECKPOINTS: Collective.CHECKPOINTS,
    Wait.TOTAL: Collective.TOTAL,
    Wait.STATISTICS: Collective.STATISTICS,
    Wait.END: Collective.END,
}


class StatusReport:
    """A reader of events. `data_ns` gives the time spent so far on waiting for loaders."""

    def __init__(self, status: StatusWriter | NoStatus, data_ns: Callable[[], int]) -> None:
        self._status, self._data_ns = status, data_ns
        self._pace = Pace()
        self._wait = ExitStack()

    def __call__(self, event: Event) -> None:
        step = event.step
        match event:
            case StepBegan():
                self._pace.begins(event.time_s)
            case LaneBegan(trains=True):
                self._status.enter(Phase.COMPUTING, step)
            case WaitBegan(Wait.STEP, bucket, num_buckets):
                self._status.enter(Phase.REDUCING, step, bucket, num_buckets)
            case WaitBegan(wait):
                self._wait.enter_context(self._status.awaiting(_CALLS[wait]))
            case WaitEnded(Wait.STEP):
                self._status.enter(Phase.OUTSIDE, step + 1)
            case WaitEnded():
                self._wait.close()
            case StepCommitted():
                self._pace.ends(event.time_s)
                self._status.committed(step, self._pace.usual_ns, self._data_ns())
                self._status.enter(Phase.OUTSIDE, step + 1)
            case RecoveryBegan():
                self._status.enter(Phase.RECOVERING, step)
            case JoinBegan():
                self._status.enter(Phase.JOINING, step)
            case Closed():
                self._status.enter(Phase.ENDED, step)


class Pace:
    """The median time of the last steps; 0 before the first few are over."""

    def __init__(self) -> None:
        self.usual_ns = 0
        self._began_s: float | None = None
        self._taken_s: deque[float] = deque(maxlen=REMEMBERED)
        self._count = 0

    def begins(self, now_s: float) -> None:
        self._began_s = now_s

    def ends(self, now_s: float) -> None:
        if self._began_s is None:
            return
        self._taken_s.append(now_s - self._began_s)
        self._began_s = None
        self._count += 1
        if self._count % LEARN_EVERY == 0:
            self.usual_ns = int(statistics.median(self._taken_s) * 1e9)
