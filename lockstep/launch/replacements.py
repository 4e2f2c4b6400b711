"""What may take a lost worker's place, as the launcher sees it: copies of workers, and spares.

For copies see Note [Replacement by a copy] in control.py. A spare is a warm process with a pipe through which it gets
its part.
"""

import ctypes
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from lockstep.launch.control import ControlLine
from lockstep.launch.orphans import OrphanGuard
from lockstep.launch.output import Log, Tee
from lockstep.launch.process import WorkerProcess, await_end
from lockstep.launch.status import StatusRow, Trait
from lockstep.settings.environments.lockstep_run import Bootstrap

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_KILL_WAIT_S = 1.0


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


@dataclass(frozen=True)
class Spare:
    """A process that will be a worker, and the pipe to it."""

    process: WorkerProcess
    part_fd: int


class Spares:
    """Owns the spares of a launch.

    A spare that dies is no failure. It is missed when a worker is needed, and the next one is taken.
    """

    def __init__(self, guard: OrphanGuard, make: Callable[[int], WorkerProcess]) -> None:
        """`make` starts a process that reads its part from the given pipe."""
        self._guard, self._make = guard, make
        self._waiting: list[Spare] = []

    def keep(self, number: int) -> None:
        """So many spares are waiting, not more. One that cannot be started is done without."""
        self._end(self._waiting[number:])
        del self._waiting[number:]
        with suppress(OSError):
            while len(self._waiting) < number:
                self._waiting.append(self._start())

    def take(self, variables: Mapping[str, str]) -> WorkerProcess | None:
        """A living spare that has got the variables of the worker it becomes; None if there is none."""
        while self._waiting:
            spare = self._waiting.pop(0)
            try:
                os.write(spare.part_fd, json.dumps(dict(variables)).encode())
            except BrokenPipeError:
                self._end([spare])
            else:
                os.close(spare.part_fd)
                return spare.process
        return None

    def close(self) -> None:
        """No spare is left."""
        self.keep(0)

    def _start(self) -> Spare:
        reader, writer = os.pipe()
        try:
            process = self._make(reader)
        except OSError:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        self._guard.note(process.group)
        return Spare(process, writer)

    def _end(self, spares: Sequence[Spare]) -> None:
        for spare in spares:
            spare.process.send_to_group(signal.SIGKILL)
            os.close(spare.part_fd)
        await_end([spare.process.pid for spare in spares], _KILL_WAIT_S)
        for spare in spares:
            self._guard.clear(spare.process.group)
            spare.process.reap()
