"""Copies of workers as the launcher sees them. See Note [Replacement by a copy] in control.py."""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from lockstep.launch.control import ControlLine
from lockstep.launch.output import Log, Tee
from lockstep.launch.status import StatusRow, Trait
from lockstep.settings.environments.lockstep_run import Bootstrap

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


@dataclass(frozen=True)
class WorkerSpec:
    """A worker that is to be started: its number, its variables, its log."""

    boot: Bootstrap
    variables: Mapping[str, str]
    log: Log


@dataclass(frozen=True, eq=False)
class PendingCopy:
    """A copy that a worker was asked for, until its process is known."""

    spec: WorkerSpec
    tee: Tee
    control: ControlLine

    def close(self) -> None:
        self.tee.close()
        self.control.close()


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Meanwhile processes whose parent ends fall to this one, if it has started the parent or one before it."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def copied_slot(slot: int, rows: Mapping[int, StatusRow]) -> int | None:
    """Which worker is asked for a copy of itself that takes the place `slot`; None if a new process is to take it.

    Worker 0 is special to many scripts: they give it things to hold that no other worker has. Where a script looks at
    its rank before it trains, worker 0 is no copy of another, and no other is a copy of worker 0.
    """
    able = {other: row for other, row in rows.items() if row.is_member and row.traits & Trait.MAY_BE_COPIED}
    if any(row.traits & Trait.READS_RANK for row in able.values()):
        able = {other: row for other, row in able.items() if row.rank > 0 and other > 0 and slot > 0}
    return max(able, default=None)
