"""The workers of one launch, from their start until nothing of them is left."""

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from types import TracebackType

from lockstep.errors import BadEnvironment
from lockstep.run.environments.lockstep_run import Bootstrap
from lockstep.run.environments.place import LOOPBACK
from lockstep.run.launching.failure import read_report
from lockstep.run.launching.guard import Guard
from lockstep.run.launching.job import Job
from lockstep.run.launching.output import Tee, clear_earlier, open_log, write_all
from lockstep.run.launching.process import WorkerProcess, await_end, members
from lockstep.run.launching.signals import Signals

# Children of an ended worker get this long to end by themselves: Python's resource tracker needs a moment to
# remove the shared memory that its process left.
STRAY_GRACE_S = 0.3
KILL_WAIT_S = 5.0


class Crew:
    """Owns the workers of one launch: starts them, follows them, and clears them away.

    What happened is read from `workers` (see `WorkerProcess.exit_status`), `reported` (the ranks that wrote
    a report of their failure and are on their way out) and `interrupts` (the signals that came to us).
    """

    def __init__(self, job: Job, inherited: Mapping[str, str], show: Callable[[bytes], None]) -> None:
        self._job, self._inherited, self._show = job, inherited, show
        self.workers: list[WorkerProcess] = []
        self.reported: set[int] = set()
        self.interrupts: list[signal.Signals] = []

    @property
    def running(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers if worker.exit_status is None]

    @property
    def failed(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers if worker.exit_status or worker.rank in self.reported]

    def until(self, reached: Callable[[], object], within_s: float | None = None) -> bool:
        """Follows the workers until `reached()` is true; False when `within_s` has passed first."""
        deadline = None if within_s is None else time.monotonic() + within_s
        while not reached():
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            for key, _ in self._selector.select(left_s):
                key.data()
        return True

    def __enter__(self) -> "Crew":
        with ExitStack() as owned:
            self._signals = owned.enter_context(Signals())
            self._guard = owned.enter_context(Guard())
            self._selector = owned.enter_context(selectors.DefaultSelector())
            clear_earlier(self._job.run_dir)
            self._open_output(owned)
            owned.callback(self._clear_away)
            self._selector.register(self._signals, selectors.EVENT_READ, self._interrupted)
            self._start_all()
            self._owned = owned.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owned.close()

    def _open_output(self, owned: ExitStack) -> None:
        self._logs = []
        for rank in range(self._job.num_workers):
            self._logs.append(open_log(self._job.run_dir, rank))
            owned.callback(os.close, self._logs[rank])
        self._screen = owned.enter_context(closing(Tee(self._logs[0], self._show)))
        self._selector.register(self._screen, selectors.EVENT_READ, self._pump)
        self._notices, self._notice_fd = os.pipe()
        owned.callback(os.close, self._notices)
        self._selector.register(self._notices, selectors.EVENT_READ, self._noticed)

    def _start_all(self) -> None:
        try:
            with socket.create_server((LOOPBACK, 0), backlog=max(128, self._job.num_workers)) as listener:
                free_port = _free_port()
                for rank in range(self._job.num_workers):
                    self._start(rank, listener, free_port)
        finally:
            os.close(self._notice_fd)
            os.close(self._screen.writer)

    def _start(self, rank: int, listener: socket.socket, free_port: int) -> None:
        """Worker 0 alone inherits the listening socket, and alone writes to the screen."""
        handed_down = [self._notice_fd, *([listener.fileno()] if rank == 0 else [])]
        boot = Bootstrap(
            rank=rank,
            parent_pid=os.getpid(),
            run_dir=self._job.run_dir.absolute(),
            notice_fd=self._notice_fd,
            listen_fd=listener.fileno() if rank == 0 else None,
        )
        variables = self._job.variables(self._inherited, boot, listener.getsockname()[1], free_port)
        output = self._screen.writer if rank == 0 else self._logs[rank]
        try:
            worker = WorkerProcess.start(rank, self._job.command(), variables, output, handed_down)
        except OSError as error:
            raise BadEnvironment(f"worker {rank} cannot be started: {error.strerror}") from error
        self._guard.note(worker.group)
        self.workers.append(worker)
        self._selector.register(worker.pidfd, selectors.EVENT_READ, partial(self._ended, worker))

    def _ended(self, worker: WorkerProcess) -> None:
        self._selector.unregister(worker.pidfd)
        worker.note_end()
        worker.send_to_group(signal.SIGTERM)
        if worker.rank == 0:
            self._screen.drain()

    def _pump(self) -> None:
        if not self._screen.pump():
            self._selector.unregister(self._screen)

    def _noticed(self) -> None:
        """Workers write their rank here when their report lies in the folder."""
        words = os.read(self._notices, 4096).split()
        self.reported.update(map(int, words))
        if not words:
            self._selector.unregister(self._notices)

    def _interrupted(self) -> None:
        self.interrupts += self._signals.take()

    def _clear_away(self) -> None:
        """Afterwards no process of any worker's group is left, and every log is whole."""
        ended = {worker.group for worker in self.workers if worker.exit_status is not None}
        await_end(set(members(ended)) - ended, STRAY_GRACE_S)
        everyone = members({worker.group for worker in self.workers})
        for worker in self.workers:
            worker.send_to_group(signal.SIGKILL)
        await_end(everyone, KILL_WAIT_S)
        for worker in self.workers:
            self._guard.clear(worker.group)
            worker.reap()
        self._screen.drain()
        for worker in self.workers:
            self._log_traceback(worker)

    def _log_traceback(self, worker: WorkerProcess) -> None:
        """The traceback goes to the log alone: worker 0's stderr is the screen, where it is told in short."""
        report = read_report(self._job.run_dir, worker.rank)
        if report is not None:
            write_all(self._logs[worker.rank], report.traceback.encode())


def _free_port() -> int:
    """A port that nobody uses now."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
