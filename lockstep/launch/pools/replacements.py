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
from functools import partial

from lockstep.launch.channels.control import ControlLine, CopyDeclined, CopyStarted
from lockstep.launch.channels.status import StatusRow, Trait
from lockstep.launch.host.orphans import OrphanGuard
from lockstep.launch.host.processes import await_end
from lockstep.launch.pools.local_workers import LocalWorkers
from lockstep.launch.pools.output import Log, Tee
from lockstep.launch.pools.process import KILL_WAIT_S, WorkerProcess
from lockstep.settings.environments.lockstep_run import Bootstrap

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
FOUNDER_END_S = 0.1
"""A process that ends closes its files a moment before it has ended."""
SPARE_END_S = 1.0


@dataclass(frozen=True)
class WorkerSpec:
    """A worker to start: its place, its variables, its log."""

    boot: Bootstrap
    variables: Mapping[str, str]
    log: Log


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


@dataclass(frozen=True, eq=False)
class PendingCopy:
    """A requested copy, until its process is known. `of` is the worker to copy."""

    spec: WorkerSpec
    tee: Tee
    control: ControlLine
    of: WorkerProcess
    is_founder: bool

    def close(self) -> None:
        self.tee.close()
        self.control.close()


class Copies:
    """Asks workers for copies of themselves, and adopts these. `workers` follow what it has adopted.

    Founders that the first worker forks are copies too: see Note [Loaded once] in load_once.py.
    """

    def __init__(
        self, workers: LocalWorkers, say: Callable[[str], None], start_without: Callable[[WorkerSpec], None]
    ) -> None:
        """`start_without` starts a worker of which no copy was made."""
        self._workers, self._say, self._start_without = workers, say, start_without
        self._pending: dict[int, PendingCopy] = {}
        self._founders: set[int] = set()
        """Slots whose founders were asked of the first worker."""
        self._loads_apart = False
        self.obstacles: dict[str, None] = {}
        """Each once, in the order in which they were reported."""

    def ask(self, spec: WorkerSpec, original: WorkerProcess, tee: Tee, *, is_founder: bool = False) -> bool:
        """Whether the request for a copy has reached the worker. The copy owns the tee, which is closed if not."""
        slot, control = spec.boot.slot, ControlLine()
        asked = original.control.ask_for_copy(slot, spec.variables, tee.writer(), control.worker_fd)
        tee.close_worker_end()
        control.close_worker_end()
        copy = PendingCopy(spec, tee, control, original, is_founder)
        if not asked:
            copy.close()
            return False
        self._pending[slot] = copy
        (self._founders.add if is_founder else self._founders.discard)(slot)
        self._workers.register(control, partial(self._answered, copy))
        return True

    def listen(self, worker: WorkerProcess) -> None:
        """From now on it is heard why the worker cannot be copied."""
        self._workers.register(worker.control, partial(self._declined, worker))

    def settle(self, slot: int) -> None:
        """Adopts the copy that was asked for in the slot, if there is one, or gives it up."""
        if slot in self._pending:
            copy = self._pending[slot]
            self._adopted(copy, copy.control.answer())

    def settle_all(self) -> None:
        """Kills the originals: once one is dead, its copy has reported itself or was never made."""
        copies = list(self._pending.values())
        for copy in copies:
            copy.of.send_to_group(signal.SIGKILL)
        for copy in copies:
            self._adopted(copy, copy.control.await_answer(KILL_WAIT_S))

    def _answered(self, copy: PendingCopy) -> None:
        """The copy has reported its process, or its end of the socket was closed because it was not made."""
        if self._pending.get(copy.spec.boot.slot) is not copy or self._adopted(copy, copy.control.answer()):
            return
        if not (copy.is_founder and await_end([copy.of.pid], FOUNDER_END_S)):
            self._start_without(copy.spec)  # else all start again, or none

    def _adopted(self, copy: PendingCopy, answer: CopyStarted | CopyDeclined | None) -> bool:
        """Whether the copy runs; it is followed now. It is pending no more."""
        slot = copy.spec.boot.slot
        self._workers.unregister(copy.control)
        self._pending.pop(slot, None)
        pid = answer.pid if isinstance(answer, CopyStarted) else None
        worker = None if pid is None else WorkerProcess.adopt(pid, copy.tee, copy.control, slot)
        if worker is None:
            copy.close()
            return False
        self._workers.follow(worker)
        self.listen(worker)
        return True

    def _declined(self, worker: WorkerProcess) -> None:
        """A worker has declined to be copied, or has ended."""
        answer = worker.control.answer()
        if not isinstance(answer, CopyDeclined):
            self._workers.unregister(worker.control)
        elif answer.slot in self._founders:
            if not self._loads_apart:
                self._loads_apart = True
                self._say(f"  each worker loads torch for itself: {answer.why}")
        elif answer.why not in self.obstacles:
            self.obstacles[answer.why] = None
            self._say(
                f"  worker {worker.slot} cannot be copied ({answer.why}): a new process takes the place of one lost"
            )


class Spares:
    """Owns the spares of a launch.

    A spare that dies is no failure: `take` notices it, and takes the next one.
    """

    def __init__(self, guard: OrphanGuard, make: Callable[[int], WorkerProcess]) -> None:
        """`make` starts a process that reads its variables from the given pipe."""
        self._guard, self._make = guard, make
        self._waiting: list[tuple[WorkerProcess, int]] = []
        """Each with the pipe to it."""

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
            process, part_fd = self._waiting.pop(0)
            try:
                os.write(part_fd, json.dumps(dict(variables)).encode())
            except BrokenPipeError:
                self._end([(process, part_fd)])
            else:
                os.close(part_fd)
                return process
        return None

    def close(self) -> None:
        self.keep(0)

    def _start(self) -> tuple[WorkerProcess, int]:
        reader, writer = os.pipe()
        try:
            process = self._make(reader)
        except OSError:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        self._guard.note(process.group)
        return process, writer

    def _end(self, spares: Sequence[tuple[WorkerProcess, int]]) -> None:
        for process, part_fd in spares:
            process.send_to_group(signal.SIGKILL)
            os.close(part_fd)
        await_end([process.pid for process, _ in spares], SPARE_END_S)
        for process, _ in spares:
            self._guard.clear(process.group)
            process.reap()
