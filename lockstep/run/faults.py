"""Faults on purpose, in logical time: how `lockstep verify` shows whether a script bears what may happen to its run.

# Note [A fault on purpose]
# LOCKSTEP_FAULT names it: "kill 2 at 7" kills worker 2 where step 7 begins, "replace 2 at 7" does the same in a run
# whose workers are not copied. "stop 0 at 7" has worker 0 ask the launcher to stop the run, as SIGTERM does, when step
# 7 is committed: all have begun it then, so all learn of it in step 8, and end before step 9.
# It happens once in a run folder, also if all workers start again. Training may be over before a replacement has come,
# which takes seconds: so one of those who are left holds the step until the replacement is near.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.events import Copied, Event, GenerationFormed, StepBegins, StepCommitted

if TYPE_CHECKING:
    from lockstep.run.run import Run

FAULT = "LOCKSTEP_FAULT"
"""The variable that names the fault."""

REPLACED_WITHIN_S = 600.0
"""How long a replacement is waited for: it runs the user's script from the top."""

STOPPED_WITHIN_S = 5.0
_LOOK_S = 0.005
_MARK = "fault"


class FaultKind(StrEnum):
    """What happens. See Note [A fault on purpose]."""

    KILL = "kill"
    REPLACE = "replace"
    STOP = "stop"


@dataclass(frozen=True)
class Fault:
    """What happens to the worker in `slot` in step `step`. See Note [A fault on purpose]."""

    kind: FaultKind
    slot: int
    step: int

    def __str__(self) -> str:
        return f"{self.kind} {self.slot} at {self.step}"


def parse_fault(text: str) -> Fault:
    """The fault that `str(fault)` names."""
    found = re.fullmatch(rf"({'|'.join(FaultKind)}) (\d{{1,9}}) at (\d{{1,9}})", text.strip(), re.ASCII)
    if found is None:
        raise ValueError(f'{text[:60]!r} is no fault: it looks like "kill 2 at 7", a worker and a step')
    return Fault(FaultKind(found[1]), int(found[2]), int(found[3]))


def has_happened(run_dir: Path) -> bool:
    return (run_dir / _MARK).exists()


def forget(run_dir: Path) -> None:
    """A fault may happen, once, in the folder of an earlier run."""
    (run_dir / _MARK).unlink(missing_ok=True)


class FaultWatch:
    """A subscriber that lets the fault happen, in the worker that it is for. See Note [A fault on purpose]."""

    def __init__(self, fault: Fault, run: "Run", slot: int, run_dir: Path) -> None:
        self._fault, self._run, self._slot, self._run_dir = fault, run, slot, run_dir

    def __call__(self, event: Event) -> None:
        fault = self._fault
        match event:
            case Copied(slot):
                self._slot = slot
            case StepBegins(step) if fault.kind is not FaultKind.STOP and self._is_due(step):
                os.kill(os.getpid(), signal.SIGKILL)
            case StepCommitted(step) if fault.kind is FaultKind.STOP and self._is_due(step):
                os.kill(os.getppid(), signal.SIGTERM)
                _await(lambda: self._run.signals.terminate, STOPPED_WITHIN_S)
            case GenerationFormed(fault.step, slots=slots, lost=lost) if fault.slot in lost and fault.slot not in slots:
                self._await_replacement()

    def _await_replacement(self) -> None:
        """The worker that is asked for a copy waits to be asked; without copies, the host waits for a call."""
        continuity, copier = self._run.continuity, self._run.continuity.copier
        recovery = continuity.recovery
        assert recovery is not None
        may_be_copied = self._fault.kind is FaultKind.KILL and copier is not None
        if not (self._slot == max(continuity.slots) if may_be_copied else recovery.hosts):
            return

        def is_near() -> bool:
            is_asked = may_be_copied and copier is not None and (copier.is_asked() or copier.has_declined)
            is_called = recovery.hosts and recovery.hears()
            return is_asked or is_called or continuity.is_given_up(self._fault.slot)

        with self._run.patience(minutes=REPLACED_WITHIN_S / 60):
            _await(is_near, REPLACED_WITHIN_S)
        continuity.look_at_door()

    def _is_due(self, step: int) -> bool:
        """Whether the fault is for this worker and step, and has not happened yet."""
        if (self._slot, step) != (self._fault.slot, self._fault.step):
            return False
        try:
            os.close(os.open(self._run_dir / _MARK, os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return False
        return True


def _await(reached: Callable[[], bool], within_s: float) -> None:
    """Returns when it is reached, or after `within_s`."""
    until_s = time.monotonic() + within_s
    while not reached() and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
