"""One worker as the launcher sees it: a process that leads a group of its own."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass


@dataclass
class WorkerProcess:
    """A started worker. It stays unreaped until `reap()`, so that its number cannot be used again."""

    rank: int
    popen: subprocess.Popen[bytes]
    pidfd: int
    exit_status: int | None = None
    """None while it runs; then its exit code, or minus the signal that killed it."""
    ended_s: float = 0.0

    @classmethod
    def start(
        cls,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        pass_fds: Collection[int],
    ) -> "WorkerProcess":
        popen = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=tuple(pass_fds),
            start_new_session=True,  # Ctrl-C reaches the launcher alone, and the group is ended as one
        )
        return cls(rank, popen, os.pidfd_open(popen.pid))

    @property
    def group(self) -> int:
        return self.popen.pid

    def note_end(self) -> None:
        """Keeps how the process ended, and leaves it unreaped."""
        ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        self.exit_status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self.ended_s = time.monotonic()

    def send(self, signum: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signum)

    def send_to_group(self, signum: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, signum)

    def reap(self) -> None:
        """Frees the process's number. A process that even SIGKILL did not end is left to the kernel."""
        self.popen.poll()
        os.close(self.pidfd)


def members(groups: Collection[int]) -> list[int]:
    """The processes that belong to the groups now, their leaders included."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _group(pid) in groups]


def await_end(pids: Collection[int], within_s: float) -> bool:
    """True once all processes have ended; False when `within_s` has passed first."""
    deadline = time.monotonic() + within_s
    with ExitStack() as opened:
        poll, waiting = select.poll(), set()
        for pid in pids:
            with suppress(ProcessLookupError):
                waiting.add(fd := os.pidfd_open(pid))
                opened.callback(os.close, fd)
                poll.register(fd, select.POLLIN)
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(left_s * 1000):
                poll.unregister(fd)
                waiting.remove(fd)
    return not waiting


def _group(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None
