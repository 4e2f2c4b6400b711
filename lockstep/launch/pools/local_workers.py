"""Workers that are processes of this host, followed from their start until nothing of them is left."""

import os
import selectors
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import BadEnvironment
from lockstep.launch.channels.failure import Failure, NoticePipe, clear_report, read_report
from lockstep.launch.channels.stacks import STACK_SIGNAL, StackFile
from lockstep.launch.channels.status import StatusPage
from lockstep.launch.host.orphans import OrphanGuard
from lockstep.launch.host.processes import Activity, activity, await_end, members, process_state, survives_signal
from lockstep.launch.host.resources import MemoryKills
from lockstep.launch.pool import ExitStatus, WorkerEvent
from lockstep.launch.pools.output import Tee
from lockstep.launch.pools.process import KILL_WAIT_S, WorkerProcess
from lockstep.settings.environments.lockstep_run import Bootstrap

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

MEMORY_LOOK_S = 0.25
STRAY_GRACE_S = 0.3
"""How long children of an ended worker get to end by themselves: Python's resource tracker needs a moment to remove the
shared memory that its process left."""


class LocalWorkers:
    """Owns the workers' processes, the status page and the pipe of their notices. For one thread.

    `before_reading` is called before output of a worker is passed on, and `noted` with each note of a worker.
    """

    def __init__(
        self, run_dir: Path, before_reading: Callable[[], None], noted: Callable[[WorkerProcess, str], None]
    ) -> None:
        self._run_dir, self._before_reading, self._noted = run_dir, before_reading, noted
        self.running: dict[int, WorkerProcess] = {}
        self.past: list[WorkerProcess] = []
        """Workers that have ended, until nothing of them is left."""
        self._reports: dict[str, Failure] = {}
        self._reported: list[WorkerProcess] = []
        self._ended: list[WorkerProcess] = []
        self._memory_kills = MemoryKills()
        self._next_memory_look_s = 0.0

    def __enter__(self) -> "LocalWorkers":
        with ExitStack() as owned:
            self.guard = owned.enter_context(OrphanGuard())
            self._selector = owned.enter_context(selectors.DefaultSelector())
            self.page = owned.enter_context(StatusPage())
            self._notices = owned.enter_context(closing(NoticePipe()))
            self.register(self._notices, self._read_notices)
            owned.callback(self.end_all)
            self._owned = owned.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._owned.close()

    # -- starting ----------------------------------------------------------------------------------------------

    @property
    def inherited_fds(self) -> list[int]:
        """The files that every worker inherits."""
        return [self._notices.worker_fd, self.page.fd]

    def boot(self, slot: int, endpoints: tuple[str, ...], secret: str) -> Bootstrap:
        """What a new worker in the slot has to know, when nothing is left of an earlier one there."""
        if (dismissed := self.running.get(slot)) is not None:
            dismissed.send_to_group(signal.SIGKILL)
            await_end([dismissed.pid], KILL_WAIT_S)
            self._retire(dismissed)
        self.page.clear(slot)
        clear_report(self._run_dir, slot)
        return Bootstrap(
            slot=slot,
            parent_pid=os.getpid(),
            run_dir=self._run_dir.absolute(),
            notice_fd=self._notices.worker_fd,
            listen_fd=None,
            status_fd=self.page.fd,
            endpoints=endpoints,
            secret=secret,
        )

    def start(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        tee: Tee,
        slot: int,
        more_fds: Collection[int] = (),
        folder: str | None = None,
    ) -> WorkerProcess:
        """Starts a worker in the slot, and follows it."""
        try:
            worker = WorkerProcess.start(command, variables, tee, [*self.inherited_fds, *more_fds], slot, folder)
        except OSError as error:
            raise BadEnvironment(f"worker {slot} cannot be started: {error.strerror}") from error
        self.follow(worker)
        return worker

    def follow(self, worker: WorkerProcess) -> None:
        self.guard.note(worker.group)
        self.running[worker.slot] = worker
        self.register(worker.pidfd, partial(self._see_end, worker))
        self.read(worker)

    # -- following ---------------------------------------------------------------------------------------------

    def register(self, file: "FileDescriptorLike", readable: Callable[[], None]) -> None:
        """From now on `wait` calls `readable` while there is something to read in the file."""
        if file not in self._selector.get_map():
            self._selector.register(file, selectors.EVENT_READ, readable)

    def unregister(self, file: "FileDescriptorLike") -> None:
        if file in self._selector.get_map():
            self._selector.unregister(file)

    def read(self, worker: WorkerProcess) -> None:
        """From now on the worker's output is passed on."""
        self.register(worker.tee, partial(self._pump, worker))

    def wait(self, within_s: float) -> list[WorkerEvent]:
        """See `WorkerPool.wait`."""
        for key, _ in self._selector.select(max(0.0, within_s)):
            key.data()
        self._sweep()
        if (now_s := time.monotonic()) >= self._next_memory_look_s:
            self._next_memory_look_s = now_s + MEMORY_LOOK_S
            self._memory_kills.recent(now_s)
        reported, ended, self._reported, self._ended = self._reported, self._ended, [], []
        return [
            *(WorkerEvent(worker.slot, worker.id, self._report(worker)) for worker in reported),
            *(self._exit_of(worker) for worker in ended),
        ]

    def _exit_of(self, worker: WorkerProcess) -> WorkerEvent:
        status = ExitStatus.of(worker.exit_status or 0, lambda: self._memory_kills.recent(time.monotonic()))
        return WorkerEvent(worker.slot, worker.id, self._report(worker), status, worker.ended_s)

    def _report(self, worker: WorkerProcess) -> Failure | None:
        report = self._reports.get(worker.id) or read_report(self._run_dir, worker.slot)
        return report if report is not None and report.worker_id == worker.id else None

    def _read_notices(self) -> None:
        """See Note [Notices] in failure.py."""
        by_id = {worker.id: worker for worker in (*self.past, *self.running.values())}
        for notice in self._notices.read():
            if notice.report is not None:
                self._reports[notice.worker_id] = notice.report
            worker = by_id.get(notice.worker_id)
            if worker is not None and notice.note:
                self._noted(worker, notice.note)
            elif worker is not None and worker.exit_status is None:
                self._reported.append(worker)

    def _pump(self, worker: WorkerProcess) -> None:
        self._before_reading()
        if not worker.tee.pump():
            self.unregister(worker.tee)

    def _see_end(self, worker: WorkerProcess) -> None:
        self._retire(worker)
        worker.send_to_group(signal.SIGTERM)
        self._ended.append(worker)

    def _retire(self, worker: WorkerProcess) -> None:
        """Moves an ended worker to `past`, after all its output is passed on."""
        self.unregister(worker.pidfd)
        self.unregister(worker.control)
        worker.note_end()
        self._before_reading()
        worker.tee.end(self._report(worker))
        del self.running[worker.slot]
        self.past.append(worker)

    # -- what is known of a running worker ---------------------------------------------------------------------

    def state(self, slot: int) -> str:
        process = process_state(self.running[slot].pid)
        return "X" if process is None else process.state

    def activity(self, slot: int) -> Activity:
        return activity(members({self.running[slot].group}))

    def ask_stack(self, slot: int) -> StackFile | None:
        """A process without its handler yet would die of the signal, so it gets none."""
        worker = self.running[slot]
        if not survives_signal(worker.pid, STACK_SIGNAL):
            return None
        query = StackFile.of(self._run_dir, slot)
        worker.send(STACK_SIGNAL)
        return query

    # -- ending ------------------------------------------------------------------------------------------------

    def end_all(self) -> None:
        """Kills all workers, after the children of those that have ended got STRAY_GRACE_S to end by themselves."""
        ended = {worker.group for worker in self.past}
        await_end(set(members(ended)) - ended, STRAY_GRACE_S)
        everyone = [*self.past, *self.running.values()]
        pids = members({worker.group for worker in everyone})
        for worker in everyone:
            worker.send_to_group(signal.SIGKILL)
        await_end(pids, KILL_WAIT_S)
        for worker in everyone:
            worker.reap_children()
        for worker in list(self.running.values()):
            self._retire(worker)
        for worker in everyone:
            self._clear_away(worker)
        self._ended, self._reported = [], []

    def _sweep(self) -> None:
        """Kills what ended workers left behind, after STRAY_GRACE_S to end by itself."""
        due_s = time.monotonic() - STRAY_GRACE_S
        for worker in [worker for worker in self.past if worker.ended_s <= due_s]:
            worker.send_to_group(signal.SIGKILL)
            worker.reap_children()
            if set(members({worker.group})) <= {worker.pid}:
                self._clear_away(worker)

    def _clear_away(self, worker: WorkerProcess) -> None:
        self.past.remove(worker)
        worker.tee.drain()
        self.unregister(worker.tee)
        self.guard.clear(worker.group)
        worker.reap()
