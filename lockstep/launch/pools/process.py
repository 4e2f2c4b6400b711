"""One worker as the launcher sees it: a process that leads a group of its own."""

import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from lockstep.launch.channels.control import ControlLine
from lockstep.launch.channels.failure import id_of_process
from lockstep.launch.host.processes import members
from lockstep.launch.pools.output import Log, Tee
from lockstep.settings.environments.lockstep_run import CONTROL_FD

NO_SLOT = -1
KILL_WAIT_S = 5.0


@dataclass(eq=False)
class WorkerProcess:
    """A started worker. It stays unreaped until `reap()`, so that its number cannot be used again."""

    process: "subprocess.Popen[bytes] | Adopted"
    pidfd: int
    tee: Tee
    control: ControlLine
    slot: int
    """The number under which it was launched; a spare has none (NO_SLOT)."""
    exit_status: int | None = None
    """None while it runs; then its exit code, or minus the signal that killed it."""
    ended_s: float = 0.0

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        tee: Tee,
        pass_fds: Collection[int],
        slot: int = NO_SLOT,
        folder: str | None = None,
    ) -> "WorkerProcess":
        """Starts a worker, which owns the tee from now on. If it cannot be started, both are closed.

        It stands in `folder`, or where this process does, and Ctrl-C waits until it runs its program.
        """
        control = ControlLine()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Python starts in peace; worker.py unblocks
        try:
            popen = subprocess.Popen(
                command,
                cwd=folder,
                env={**environment, CONTROL_FD: str(control.worker_fd)},
                stdin=subprocess.DEVNULL,
                stdout=tee.writer(),
                stderr=tee.writer(),
                pass_fds=(*pass_fds, control.worker_fd),
                start_new_session=True,  # Ctrl-C reaches the launcher alone, and the group is ended as one
            )
        except OSError:
            tee.close()
            control.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            tee.close_worker_end()
            control.close_worker_end()
        return cls(popen, os.pidfd_open(popen.pid), tee, control, slot)

    @classmethod
    def adopt(cls, pid: int, tee: Tee, control: ControlLine, slot: int) -> "WorkerProcess | None":
        """A worker that another one has forked, and that is now a child of this process; None if it has ended."""
        try:
            return cls(Adopted(pid), os.pidfd_open(pid), tee, control, slot)
        except ProcessLookupError:
            return None

    def as_worker(self, slot: int, log: Log) -> "WorkerProcess":
        """This spare as the worker in `slot`. The log gets its earlier output too."""
        self.tee.log = log
        return replace(self, slot=slot)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def id(self) -> str:
        return id_of_process(self.pid)

    @property
    def group(self) -> int:
        return self.pid

    def note_end(self) -> None:
        """Records how the process ended, and leaves it unreaped. One that even SIGKILL did not end counts as killed."""
        ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is None:
            self.exit_status = -signal.SIGKILL
        else:
            self.exit_status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self.ended_s = time.monotonic()

    def send(self, signum: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signum)

    def send_to_group(self, signum: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, signum)

    def reap_children(self) -> None:
        """Reaps the ended processes of its group that are children of this process."""
        for pid in set(members({self.group})) - {self.pid}:
            Adopted(pid).poll()

    def reap(self) -> None:
        """Reaps the process and closes its files. A process that even SIGKILL did not end is left to the kernel."""
        self.process.poll()
        os.close(self.pidfd)
        self.tee.close()
        self.control.close()


@dataclass(frozen=True)
class Adopted:
    """A child that another process has started."""

    pid: int

    def poll(self) -> object:
        """Reaps it if it has ended."""
        with suppress(ChildProcessError):
            return os.waitpid(self.pid, os.WNOHANG)
        return None
