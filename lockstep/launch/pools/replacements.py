"""What may replace a lost worker: copies of workers, and spares.

For copies see Note [Replacement by a copy] in control.py. A spare is a warm process with a pipe through which it gets
the variables of the worker that it becomes.
"""

import ctypes
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from lockstep.launch.channels.control import ControlLine
from lockstep.launch.channels.status import StatusRow, Trait
from lockstep.launch.host.orphans import OrphanGuard
from lockstep.launch.host.processes import await_end
from lockstep.launch.pools.output import Log, Tee
from lockstep.launch.pools.process import WorkerProcess
from lockstep.settings.environments.lockstep_run import Bootstrap

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_KILL_WAIT_S = 1.0


@dataclass(frozen=True)
class WorkerSpec:
    """A worker to start: its place, its variables, its log."""

    boot: Bootstrap
    variables: Mapping[str, str]
    log: Log


@dataclass(frozen=True, eq=False)
class PendingCopy:
    """A requested copy, until its process is known. `of` is the worker to copy."""

    spec: WorkerSpec
    tee: Tee
    control: ControlLine
    of: WorkerProcess

    def close(self) -> None:
        self.tee.close()
        self.control.close()


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Inside, this process is a subreaper: the kernel gives it the orphans among its descendants as children."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def copied_slot(slot: int, rows: Mapping[int, StatusRow]) -> int | None:
    """The worker to copy into `slot`; None if a new process takes it.

    Many scripts give worker 0 objects that no other worker has. Where a script reads its rank before it trains, worker
    0 is no copy of another, and no other is a copy of worker 0.
    """
    able = {other: row for other, row in rows.items() if row.is_member and row.traits & Trait.MAY_BE_COPIED}
    if any(row.traits & Trait.READS_RANK for row in able.values()):
        able = {other: row for other, row in able.items() if row.rank > 0 and other > 0 and slot > 0}
    return max(able, default=None)


@dataclass(frozen=True)
class Spare:
    """A process that can become a worker, and the pipe to it."""

    process: WorkerProcess
    part_fd: int


class Spares:
    """Owns the spares of a launch.

    A spare that dies is no failure: `take` notices it, and takes the next one.
    """

    def __init__(self, guard: OrphanGuard, make: Callable[[int], WorkerProcess]) -> None:
        """`make` starts a process that reads its variables from the given pipe."""
        self._guard, self._make = guard, make
        self._waiting: list[Spare] = []

    def keep(self, number: int) -> None:
        """Starts or ends spares until `number` wait. One that cannot be started is left out."""
        self._end(self._waiting[number:])
        del self._waiting[number:]
        with suppress(OSError):
            while len(self._waiting) < number:
                self._waiting.append(self._start())

    def take(self, variables: Mapping[str, str]) -> WorkerProcess | None:
        """A live spare, which has been sent the variables of the worker that it becomes; None if there is none."""
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
