"""A fault on purpose, as a value; `lockstep.run.faults` lets it happen. See Note [A fault on purpose] there."""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

FAULT = "LOCKSTEP_FAULT"
"""The variable that names the fault."""

MARK = "fault"
"""The file in a run's folder that says that it has happened."""


class FaultKind(StrEnum):
    """What happens. See Note [A fault on purpose] in run/faults.py."""

    KILL = "kill"
    REPLACE = "replace"
    STOP = "stop"


@dataclass(frozen=True)
class Fault:
    """What happens to the worker in `slot` in step `step`. See Note [A fault on purpose] in run/faults.py."""

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
    return (run_dir / MARK).exists()


def forget(run_dir: Path) -> None:
    """A fault may happen, once, in the folder of an earlier run."""
    (run_dir / MARK).unlink(missing_ok=True)
