"""Writes what events say of this worker to its row of the launcher's status page."""

import os
import statistics
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from lockstep.events import (
    Closed,
    Events,
    JoinBegan,
    LaneBegan,
    RecoveryBegan,
    StepBegan,
    StepCommitted,
    Wait,
    WaitBegan,
    WaitEnded,
)
from lockstep.launch.channels.status import Collective, NoStatus, Phase, StatusWriter

REMEMBERED = 31
MEMORY_S = 1.0
"""So often the memory that this worker uses is written."""
LEARN_EVERY = 8
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class StatusReport:
    """A reader of events. `data_ns` gives the time spent so far on waiting for loaders.

    It has a method for each kind, since several come in every step.
    """

    def __init__(self, status: StatusWriter | NoStatus, data_ns: Callable[[], int]) -> None:
        self._status, self._data_ns = status, data_ns
        self._pace, self._measured_s = Pace(), float("-inf")
        self._wait = ExitStack()

    def read(self, events: Events) -> None:
        """From now on, what `events` say is written."""
        for reader, kind in (
            (self._step_began, StepBegan),
            (self._lane_began, LaneBegan),
            (self._wait_began, WaitBegan),
            (self._wait_ended, WaitEnded),
            (self._step_committed, StepCommitted),
            (lambda event: self._enter(Phase.RECOVERING, event.step), RecoveryBegan),
            (lambda event: self._enter(Phase.JOINING, event.step), JoinBegan),
            (lambda event: self._enter(Phase.ENDED, event.step), Closed),
        ):
            events.subscribe(reader, kind)

    def _step_began(self, event: Any) -> None:
        self._pace.begins(event.time_s)

    def _lane_began(self, event: Any) -> None:
        if event.trains:
            self._enter(Phase.COMPUTING, event.step)

    def _wait_began(self, event: Any) -> None:
        if event.wait is Wait.STEP:
            self._enter(Phase.REDUCING, event.step, event.bucket, event.num_buckets)
        else:
            self._wait.close()  # one that failed is over: the worker is again where it was before it
            self._wait.enter_context(self._status.awaiting(Collective[event.wait.name]))

    def _wait_ended(self, event: Any) -> None:
        if event.wait is Wait.STEP:
            self._enter(Phase.OUTSIDE, event.step + 1)
        else:
            self._wait.close()

    def _step_committed(self, event: Any) -> None:
        self._pace.ends(event.time_s)
        self._status.committed(event.step, self._pace.usual_ns, self._data_ns())
        self._enter(Phase.OUTSIDE, event.step + 1)
        if event.time_s - self._measured_s >= MEMORY_S:
            self._measured_s = event.time_s
            self._status.uses(memory_bytes(), gpu_bytes())

    def _enter(self, phase: Phase, step: int, a: int = 0, b: int = 0) -> None:
        """The worker is in `phase`. A wait that failed before leads nowhere back any more."""
        self._wait.pop_all()
        self._status.enter(phase, step, a, b)


def memory_bytes() -> int:
    """The resident memory of this process; 0 where the kernel does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def gpu_bytes() -> int:
    """What torch holds of this worker's GPU; 0 if it uses none."""
    return torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0


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
