"""One worker on this host, for a launcher on another one.

The process is followed as by a `LocalPool`, with a status page and pipes of its own. A thread does so, and keeps what
the launcher has to know until it asks (`news`). So a launcher elsewhere sees of its worker what the launcher of one
host does: the row of the status page, the output, the report and the exit status.

# Note [The parent is a thread]
# The kernel kills a worker when its parent dies, and takes the thread that started it for the parent. So the thread
# that starts a worker follows it until nothing of it is left.
"""

import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.errors import BadEnvironment
from lockstep.launch.channels.failure import Failure
from lockstep.launch.channels.status import StatusRow
from lockstep.launch.channels.traceback_lines import Frame
from lockstep.launch.host.processes import Activity, process_state
from lockstep.launch.job import Job
from lockstep.launch.pool import ExitStatus
from lockstep.launch.pools.local_workers import LocalWorkers
from lockstep.launch.pools.output import Tee
from lockstep.launch.pools.process import WorkerProcess

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

    def check(self) -> None:
        """Raises BadEnvironment where this host cannot carry it out."""
        host = socket.gethostname()
        if self.folder and not os.path.isdir(self.folder):
            raise BadEnvironment(
                f"{host} has no folder {self.folder}, where the launcher was started: share it between the hosts, or "
                "start the launcher there where each host has a copy of it"
            )
        path = Path(self.folder, self.job.program)
        if not self.job.module and not path.exists():
            raise BadEnvironment(f"{host} has no script {path}: share its folder between the hosts, or copy it to each")
        try:
            self.job.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"the run's folder {self.job.run_dir} cannot be made: {error.strerror}"
            raise BadEnvironment(why) from error


@dataclass(frozen=True)
class StartedWorker:
    """The process runs. `shares_folder`: it sees the run's folder of the launcher."""

    pid: int
    shares_folder: bool


@dataclass(frozen=True)
class WorkerNews:
    """How the worker stands now, and what the launcher has not heard yet (`output`, `notes`).

    Times are on this host's monotonic clock, which shows `clock_ns`.
    """

    row: StatusRow = field(default_factory=StatusRow)
    activity: Activity | None = None
    report: Failure | None = None
    status: ExitStatus | None = None
    ended_s: float = 0.0
    state: str = ""
    clock_ns: int = 0
    output: bytes = b""
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

    def end(self, report: Failure | None) -> None:
        """The report travels beside the output."""

    def take(self) -> bytes:
        with self._lock:
            chunks, self._chunks, self.num_bytes = self._chunks, [], 0
        return b"".join(chunks)


class HostedWorker:
    """Owns the worker's process, page and pipes. Its methods may be called by any thread."""

    def __init__(self, order: WorkerOrder, inherited: Mapping[str, str]) -> None:
        """Returns when the process runs; raises BadEnvironment if it cannot be started."""
        self._order, self._inherited = order, inherited
        self._output, self._notes = OutputBuffer(), deque[str]()
        self._workers = LocalWorkers(order.job.run_dir, lambda: None, lambda _, note: self._notes.append(note))
        self._worker: WorkerProcess | None = None
        self._error: BadEnvironment | None = None
        self._now, self._is_over = WorkerNews(), False
        """Replaced by the thread alone, which announces by `_changed` what is new."""
        self._next_activity_s = 0.0
        self._changed = threading.Condition()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
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
        return StartedWorker(self._worker.pid, (self._order.job.run_dir / self._order.marker).exists())

    def news(self, within_s: float) -> WorkerNews:
        """How the worker stands: at once if there is output or it has failed or ended, else after `within_s`."""
        with self._changed:
            heard = self._endings()
            self._changed.wait_for(
                lambda: self._output.num_bytes or self._notes or self._is_over or heard != self._endings(), within_s
            )
        now = self._now  # before the output: what is written later belongs to further news
        output, notes = self._output.take(), tuple(self._notes.popleft() for _ in range(len(self._notes)))
        with suppress(OSError):
            self._wake.send(b".", socket.MSG_DONTWAIT)
        return replace(now, state=self._state(), clock_ns=time.monotonic_ns(), output=output, notes=notes)

    def send(self, signum: signal.Signals) -> None:
        """Sends the signal to the worker, unless it has ended."""
        if self._worker is not None and self._now.status is None:
            self._worker.send(signum)

    def end(self) -> None:
        """Kills the worker and all that it has started."""
        if self._worker is not None and self._now.status is None:
            self._worker.send_to_group(signal.SIGKILL)

    def end_and_join(self, within_s: float) -> WorkerNews:
        """The last news, when nothing of the worker is left, or after `within_s`."""
        self.end()
        self._thread.join(within_s)
        return self.news(0.0)

    def set_given_up(self, slot: int, is_given_up: bool) -> None:
        """Marks another worker's slot as empty for good, or no longer so."""
        page = self._workers.page
        with suppress(ValueError):  # the page is closed: the worker has ended
            (page.give_up if is_given_up else page.clear)(slot)

    def stack(self, within_s: float) -> Frame | None:
        """The innermost call in user code; None if the worker does not answer."""
        slot, until_s = self._order.slot, time.monotonic() + within_s
        query = self._workers.ask_stack(slot) if slot in self._workers.running else None
        frame = None
        while query is not None and frame is None and time.monotonic() < until_s and self._now.status is None:
            with self._changed:
                self._changed.wait(ANSWER_LOOK_S)  # nobody is notified when faulthandler has written
            frame = query.answer()
        return frame

    def _endings(self) -> tuple[object, ...]:
        return self._now.report, self._now.status, self._is_over

    def _state(self) -> str:
        process = None if self._worker is None or self._now.status is not None else process_state(self._worker.pid)
        return "X" if process is None else process.state

    # -- the thread: see Note [The parent is a thread] ------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._order.check()
            with self._workers:
                self._start()
                while self._workers.running:
                    self._look()
        except BadEnvironment as error:
            self._error = error
        finally:
            self._is_over = True
            self._notify()

    def _start(self) -> None:
        order, page = self._order, self._workers.page
        boot = replace(
            self._workers.boot(order.slot, order.endpoints, order.secret),
            address=order.address,
            local_rank=order.local_rank,
            local_size=order.local_size,
        )
        for slot in order.given_up:
            page.give_up(slot)
        variables = {
            **order.job.variables_of_all({**self._inherited, **order.variables}),
            **order.job.variables_of_one(boot, order.num_workers, *order.ports),
        }
        tee = Tee(lambda _: None, self._output)
        self._workers.register(self._woken, self._read_on)
        self._worker = self._workers.start(order.job.command(), variables, tee, order.slot, folder=order.folder or None)
        self._notify()

    def _look(self) -> None:
        assert self._worker is not None
        now = self._now
        for event in self._workers.wait(LOOK_S):
            now = replace(now, report=now.report or event.report, status=event.status, ended_s=event.time_s)
        if (now_s := time.monotonic()) >= self._next_activity_s and now.status is None:
            self._next_activity_s = now_s + ACTIVITY_S
            now = replace(now, activity=self._workers.activity(self._order.slot))
        self._now = replace(now, row=self._workers.page.row(self._order.slot))
        if self._output.num_bytes > MOST_OUTPUT_BYTES:
            self._workers.unregister(self._worker.tee)
        self._notify()

    def _read_on(self) -> None:
        """The launcher has fetched the output: what waits in the pipe is read again."""
        with suppress(BlockingIOError):
            self._woken.recv(1 << 12)
        for worker in self._workers.running.values():
            self._workers.read(worker)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


def moved(row: StatusRow, by_ns: int) -> StatusRow:
    """The row with its times on another host's clock."""
    return replace(
        row,
        since_ns=row.since_ns + by_ns,
        committed_ns=row.committed_ns and row.committed_ns + by_ns,
        patient_until_ns=row.patient_until_ns and row.patient_until_ns + by_ns,
    )
