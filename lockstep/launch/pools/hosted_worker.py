"""One worker on this host, for a launcher on another one.

The process is the same as that of `LocalPool`: a group of its own, a status page, a pipe for output, one for notices. A
thread follows it, and keeps what the launcher has to know until it asks (`news`). So a launcher elsewhere sees of
its worker what the launcher of one host does: the row of the status page, the output, the report and the exit status.

# Note [The parent is a thread]
# The kernel kills a worker when its parent dies, and takes the thread that started it for the parent. So the thread
# that starts a worker follows it until nothing of it is left.
"""

import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.errors import BadEnvironment
from lockstep.launch.channels.failure import Failure, NoticePipe, clear_report, read_report
from lockstep.launch.channels.stacks import STACK_SIGNAL, StackFile
from lockstep.launch.channels.status import StatusPage, StatusRow
from lockstep.launch.channels.traceback_lines import Frame
from lockstep.launch.host.memory import MemoryKills
from lockstep.launch.host.orphans import OrphanGuard
from lockstep.launch.host.processes import Activity, activity, await_end, members, process_state, survives_signal
from lockstep.launch.job import Job
from lockstep.launch.pool import ExitStatus
from lockstep.launch.pools.output import Tee
from lockstep.launch.pools.process import KILL_WAIT_S, STRAY_GRACE_S, WorkerProcess
from lockstep.settings.environments.lockstep_run import Bootstrap

LOOK_S = 0.25
ACTIVITY_S = 1.0
ANSWER_LOOK_S = 0.02
MOST_OUTPUT_BYTES = 1 << 23
"""The worker waits, by its pipe, while so much output was not fetched."""


@dataclass(frozen=True)
class WorkerOrder:
    """A worker to start. `folder` is where the launcher stands; `marker` names a file in the run's folder there."""

    job: Job
    slot: int
    num_workers: int
    address: str
    ports: tuple[int, int]
    """Where worker 0 listens, and a free port for a process group of the script's own."""
    local_rank: int
    local_size: int
    endpoints: tuple[str, ...] = ()
    secret: str = field(default="", repr=False)
    variables: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    marker: str = ""
    given_up: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StartedWorker:
    """The process runs. `shares_folder`: it sees the run's folder of the launcher."""

    pid: int
    shares_folder: bool


@dataclass(frozen=True)
class WorkerNews:
    """What the launcher has not heard yet (`output`), and how the worker stands now.

    Times are on this host's monotonic clock, which shows `clock_ns`.
    """

    output: bytes
    row: StatusRow
    state: str
    activity: Activity | None
    report: Failure | None
    status: ExitStatus | None
    ended_s: float
    clock_ns: int
    is_last: bool
    """Nothing of the worker is left, and all its output is passed on."""
    notes: tuple[str, ...] = ()
    """What holds for this worker alone."""


class OutputBuffer:
    """A worker's output until it is fetched. See `OutputSink`."""

    def __init__(self) -> None:
        self._lock, self._chunks, self.num_bytes = threading.Lock(), list[bytes](), 0

    def write(self, output: bytes) -> None:
        with self._lock:
            self._chunks.append(output)
            self.num_bytes += len(output)

    def take(self) -> bytes:
        with self._lock:
            chunks, self._chunks, self.num_bytes = self._chunks, [], 0
        return b"".join(chunks)


class HostedWorker:
    """Owns the worker's process, page and pipes. Its methods may be called by any thread."""

    def __init__(self, order: WorkerOrder, inherited: Mapping[str, str]) -> None:
        """Returns when the process runs; raises BadEnvironment if it cannot be started."""
        self._order, self._inherited = order, inherited
        self._run_dir = order.job.run_dir
        self._output = OutputBuffer()
        self._changed = threading.Condition()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._worker: WorkerProcess | None = None
        self._error: BadEnvironment | None = None
        self._report: Failure | None = None
        self._notes = deque[str]()
        self._status: ExitStatus | None = None
        self._row, self._is_over = StatusRow(), False
        self._activity: Activity | None = None
        self._next_activity_s = 0.0
        self._is_ended = False
        self._thread = threading.Thread(target=self._run, name="lockstep-worker", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._worker is not None or self._error is not None)
        if self._error is not None:
            raise self._error

    # -- for the launcher ----------------------------------------------------------------------------------------

    @property
    def started(self) -> StartedWorker:
        assert self._worker is not None
        return StartedWorker(self._worker.pid, (self._run_dir / self._order.marker).exists())

    def news(self, within_s: float) -> WorkerNews:
        """How the worker stands: at once if there is output or it has failed or ended, else after `within_s`."""
        with self._changed:
            heard = (self._report, self._status, self._is_over)
            self._changed.wait_for(
                lambda: (
                    self._output.num_bytes
                    or self._notes
                    or heard != (self._report, self._status, self._is_over)
                    or self._is_over
                ),
                within_s,
            )
        # Whether this is the last is read before the output: what is written later belongs to further news.
        is_over, status = self._is_over, self._status
        output = self._output.take()
        self._wake_thread()
        return WorkerNews(
            output,
            self._row,
            self._state(),
            self._activity,
            self._report,
            status,
            0.0 if self._worker is None else self._worker.ended_s,
            time.monotonic_ns(),
            is_over,
            tuple(self._notes.popleft() for _ in range(len(self._notes))),
        )

    def send(self, signum: signal.Signals) -> None:
        """Sends the signal to the worker, unless it has ended."""
        if self._worker is not None and self._status is None:
            self._worker.send(signum)

    def end(self) -> None:
        """Kills the worker and all that it has started."""
        if self._worker is not None and self._status is None:
            self._worker.send_to_group(signal.SIGKILL)

    def join(self, within_s: float) -> None:
        """Returns when nothing of the worker is left, or after `within_s`."""
        self._thread.join(within_s)

    def give_up(self, slot: int) -> None:
        """Marks another worker's slot as empty for good."""
        with suppress(ValueError):  # the page is closed: the worker has ended
            self._page.give_up(slot)

    def restore(self, slot: int) -> None:
        """Another worker may come into the slot again."""
        with suppress(ValueError):
            self._page.clear(slot)

    def stack(self, within_s: float) -> Frame | None:
        """The innermost call in user code; None if the worker does not answer."""
        if self._worker is None or not survives_signal(self._worker.pid, STACK_SIGNAL):
            return None
        query = StackFile.of(self._run_dir, self._order.slot)
        self.send(STACK_SIGNAL)
        until_s = time.monotonic() + within_s
        while (frame := query.answer()) is None and time.monotonic() < until_s and self._status is None:
            with self._changed:
                self._changed.wait(ANSWER_LOOK_S)  # nobody is notified when faulthandler has written
        return frame

    # -- the thread: see Note [The parent is a thread] ------------------------------------------------------------

    def _run(self) -> None:
        try:
            with ExitStack() as owned:
                self._start(owned)
                while not self._is_ended:
                    self._look()
                self._clear_away()
        except BadEnvironment as error:
            self._error = error
        finally:
            self._is_over = True
            self._notify()

    def _start(self, owned: ExitStack) -> None:
        order = self._order
        _stand_in(order.folder)
        _check_program(order)
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadEnvironment(f"the run's folder {self._run_dir} cannot be made: {error.strerror}") from error
        clear_report(self._run_dir, order.slot)
        self._guard = owned.enter_context(OrphanGuard())
        self._selector = owned.enter_context(selectors.DefaultSelector())
        self._page = owned.enter_context(StatusPage())
        for slot in order.given_up:
            self._page.give_up(slot)
        self._notices = owned.enter_context(closing(NoticePipe()))
        self._memory_kills = MemoryKills()
        worker = self._start_process(self._notices.worker_fd)
        self._guard.note(worker.group)
        self._selector.register(worker.pidfd, selectors.EVENT_READ, self._see_end)
        self._selector.register(worker.tee, selectors.EVENT_READ, self._pump)
        self._selector.register(self._notices, selectors.EVENT_READ, self._noticed)
        self._selector.register(self._woken, selectors.EVENT_READ, self._go_on_reading)
        self._worker = worker
        self._notify()

    def _start_process(self, notice_fd: int) -> WorkerProcess:
        order = self._order
        boot = Bootstrap(
            slot=order.slot,
            parent_pid=os.getpid(),
            run_dir=self._run_dir,
            notice_fd=notice_fd,
            listen_fd=None,
            status_fd=self._page.fd,
            endpoints=order.endpoints,
            secret=order.secret,
            address=order.address,
            local_rank=order.local_rank,
            local_size=order.local_size,
        )
        variables = {
            **order.job.variables_of_all({**self._inherited, **order.variables}),
            **order.job.variables_of_one(boot, order.num_workers, *order.ports),
        }
        tee = Tee(lambda _: None, self._output)
        try:
            return WorkerProcess.start(
                order.job.command(), variables, tee, [notice_fd, self._page.fd], order.slot, order.folder or None
            )
        except OSError as error:
            raise BadEnvironment(f"worker {order.slot} cannot be started: {error.strerror}") from error

    def _look(self) -> None:
        for key, _ in self._selector.select(LOOK_S):
            key.data()
        assert self._worker is not None
        self._row = self._page.row(self._order.slot)
        now_s = time.monotonic()
        self._memory_kills.recent(now_s)
        if now_s >= self._next_activity_s:
            self._next_activity_s = now_s + ACTIVITY_S
            self._activity = activity(members({self._worker.group}))

    def _pump(self) -> None:
        assert self._worker is not None
        if not self._worker.tee.pump() or self._output.num_bytes > MOST_OUTPUT_BYTES:
            self._selector.unregister(self._worker.tee)
        self._notify()

    def _go_on_reading(self) -> None:
        """The launcher has fetched the output: what waits in the pipe is read again."""
        assert self._worker is not None
        with suppress(BlockingIOError):
            self._woken.recv(1 << 12)
        if self._worker.tee not in self._selector.get_map() and not self._is_ended:
            self._selector.register(self._worker.tee, selectors.EVENT_READ, self._pump)

    def _noticed(self) -> None:
        """See Note [Notices] in failure.py."""
        for notice in self._notices.read():
            if notice.note:
                self._notes.append(notice.note)
                self._notify()
            else:
                self._take_report(notice.worker_id, notice.report)

    def _take_report(self, worker_id: str, report: Failure | None = None) -> None:
        report = report or read_report(self._run_dir, self._order.slot)
        if report is not None and report.worker_id == worker_id:
            self._report = report
            self._notify()

    def _see_end(self) -> None:
        worker = self._worker
        assert worker is not None
        self._selector.unregister(worker.pidfd)
        worker.note_end()
        worker.tee.drain()
        self._row = self._page.row(self._order.slot)
        if self._report is None:
            self._take_report(worker.id)
        self._status = ExitStatus.of(worker.exit_status or 0, lambda: self._memory_kills.recent(time.monotonic()))
        self._is_ended = True
        worker.send_to_group(signal.SIGTERM)
        self._notify()

    def _clear_away(self) -> None:
        """Ends what the worker left behind, after STRAY_GRACE_S to end by itself."""
        worker = self._worker
        assert worker is not None
        await_end(set(members({worker.group})) - {worker.pid}, STRAY_GRACE_S)
        strays = set(members({worker.group})) - {worker.pid}
        worker.send_to_group(signal.SIGKILL)
        await_end(strays, KILL_WAIT_S)
        worker.reap_children()
        worker.tee.drain()
        self._guard.clear(worker.group)
        worker.reap()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wake_thread(self) -> None:
        with suppress(OSError):
            self._wake.send(b".", socket.MSG_DONTWAIT)

    def _state(self) -> str:
        process = None if self._worker is None or self._status is not None else process_state(self._worker.pid)
        return "X" if process is None else process.state


def moved(row: StatusRow, by_ns: int) -> StatusRow:
    """The row with its times on another host's clock."""
    return replace(
        row,
        since_ns=row.since_ns + by_ns,
        committed_ns=row.committed_ns and row.committed_ns + by_ns,
        patient_until_ns=row.patient_until_ns and row.patient_until_ns + by_ns,
    )


def _stand_in(folder: str) -> None:
    if folder and not os.path.isdir(folder):
        raise BadEnvironment(
            f"{socket.gethostname()} has no folder {folder}, where the launcher was started: share it between the "
            "hosts, or start the launcher there where each host has a copy of it"
        )


def _check_program(order: WorkerOrder) -> None:
    path = Path(order.folder, order.job.program)
    if not order.job.module and not path.exists():
        raise BadEnvironment(
            f"{socket.gethostname()} has no script {path}: share its folder between the hosts, or copy it to each"
        )
