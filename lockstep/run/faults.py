"""Faults on purpose, in logical time: how `lockstep verify` shows whether a script bears what may happen to its run.

# Note [A fault on purpose]
# LOCKSTEP_FAULT names it: "kill 2 at 7" kills worker 2 where step 7 begins, "replace 2 at 7" does the same in a run
# whose workers are not copied. "stop 0 at 7" has worker 0 ask the launcher to stop the run, as SIGTERM does, when step
# 7 is committed: all have begun it then, so all learn of it in step 8, and end before step 9.
# It happens once in a run folder, also if all workers start again. Training may be over before a replacement has come,
# which takes seconds: so one of those who are left holds the step until the replacement is near.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from lockstep.elastic.guard import Guard
from lockstep.events import Copied, Event, GenerationFormed, StepBegan, StepCommitted
from lockstep.launch.channels.status import NoStatus, StatusWriter
from lockstep.settings.faults import MARK, Fault, FaultKind

REPLACED_WITHIN_S = 600.0
"""How long a replacement is waited for: it runs the user's script from the top."""

STOPPED_WITHIN_S = 5.0
_LOOK_S = 0.005


class FaultWatch:
    """A subscriber that lets the fault happen, in the worker that it is for. See Note [A fault on purpose]."""

    def __init__(self, fault: Fault, guard: Guard, status: StatusWriter | NoStatus, slot: int, run_dir: Path) -> None:
        self._fault, self._guard, self._status, self._slot, self._run_dir = fault, guard, status, slot, run_dir

    def __call__(self, event: Event) -> None:
        fault = self._fault
        match event:
            case Copied(slot):
                self._slot = slot
            case StepBegan(step=step) if fault.kind is not FaultKind.STOP and self._is_due(step):
                os.kill(os.getpid(), signal.SIGKILL)
            case StepCommitted(step=step) if fault.kind is FaultKind.STOP and self._is_due(step):
                os.kill(os.getppid(), signal.SIGTERM)
                _await(lambda: self._guard.signals.terminate, STOPPED_WITHIN_S)
            case GenerationFormed(step=fault.step) if fault.slot in event.lost and fault.slot not in event.slots:
                self._await_replacement()

    def _await_replacement(self) -> None:
        """The worker that is asked for a copy waits to be asked; without copies, the host waits for a call."""
        guard, copier = self._guard, self._guard.formation.copier
        recovery = guard.recovery
        assert recovery is not None
        may_be_copied = self._fault.kind is FaultKind.KILL and copier is not None
        if not (self._slot == max(guard.generation.slots) if may_be_copied else recovery.is_coordinator):
            return

        def is_near() -> bool:
            is_asked = may_be_copied and copier is not None and (copier.is_asked() or copier.has_declined)
            is_called = recovery.is_coordinator and recovery.has_claims()
            return is_asked or is_called or self._status.is_given_up(self._fault.slot)

        with self._status.patient(REPLACED_WITHIN_S):
            _await(is_near, REPLACED_WITHIN_S)
        guard.look_for_newcomers()

    def _is_due(self, step: int) -> bool:
        """Whether the fault is for this worker and step, and has not happened yet."""
        if (self._slot, step) != (self._fault.slot, self._fault.step):
            return False
        try:
            os.close(os.open(self._run_dir / MARK, os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return False
        return True


def _await(reached: Callable[[], bool], within_s: float) -> None:
    """Returns when it is reached, or after `within_s`."""
    until_s = time.monotonic() + within_s
    while not reached() and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
