"""The fork that makes a copy of this process, and what the copy does to become a process of its own.

# Note [Left to the original]
# Stores of torch have threads that the copy does not have, and ending one would wait for them for ever. So the copy
# keeps all that it found, lets go of their sockets, and leaves without taking Python apart.

# Note [A pool without threads]
# torch keeps a pool of threads, which a fork leaves behind. It notices at the next operator of a thread that has
# computed nothing yet, and makes another pool then, without a lock: of two such threads at once, one fails with
# "Invalid thread pool!". So the copy has its pool made while it has one thread.
"""

import gc
import multiprocessing.process
import os
import select
import signal
import stat
from _io import _IOBase  # io.IOBase is an abstract base class, which takes ten times as long to ask
from contextlib import suppress
from dataclasses import dataclass

import torch

from lockstep.chance import Generators
from lockstep.elastic.copies.obstacles import access_mode
from lockstep.launch.channels.control import CopyRequest
from lockstep.launch.worker.fork import fork_for_launcher, take_part
from lockstep.wire.network.keepalive import close_copy

READY_S = 10.0
"""How long the original waits for the copy to be at a member's endpoint."""


@dataclass(frozen=True)
class ForkedCopy:
    """What the original knows of its copy."""

    pid: int
    slot: int
    _ready: int

    def await_claim(self) -> None:
        """Returns when the copy has asked to be admitted, or has ended."""
        poll = select.poll()
        poll.register(self._ready, select.POLLIN)
        poll.poll(READY_S * 1000)
        os.close(self._ready)

    def end(self) -> None:
        """It was not admitted where it was made, so its state is an old one."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def fork(request: CopyRequest) -> ForkedCopy | int:
    """In the original: its copy. In the copy: the file to write to when it has asked to be admitted.

    The copy has its own session, output and variables.
    """
    _flush_all()
    generators = Generators.now()
    pid, pipe = fork_for_launcher(request)
    if pid == 0:
        generators.restore()  # Python's seeds itself anew in a process that is forked
        _settle(request)
        return pipe
    return ForkedCopy(pid, request.slot, pipe)


def _settle(request: CopyRequest) -> None:
    torch.set_num_threads(torch.get_num_threads())  # see Note [A pool without threads]
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]  # they are the original's
    _let_connections_go(request.control_fd)
    _reopen_what_is_read()
    take_part(request, is_copy=True)


def _flush_all() -> None:
    """What stands in buffers would be written twice. All objects are looked at: 0.1 s for half a million."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # by which the script has hidden objects from those who look
    for thing in gc.get_objects():
        if issubclass(type(thing), _IOBase):
            with suppress(OSError, ValueError):
                if not thing.closed and thing.writable():
                    thing.flush()
    if is_frozen:
        gc.freeze()


def _let_connections_go(control_fd: int) -> None:
    """See Note [Left to the original]."""
    for fd in _fds():
        if fd != control_fd:
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    close_copy(fd)


def _reopen_what_is_read() -> None:
    """Files that are only read: the copy has a place in them of its own."""
    for fd in _fds():
        with suppress(OSError):
            if stat.S_ISREG(os.fstat(fd).st_mode) and access_mode(fd) == os.O_RDONLY:
                inheritable, place = os.get_inheritable(fd), os.lseek(fd, 0, os.SEEK_CUR)
                again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
                os.lseek(again, place, os.SEEK_SET)
                os.dup2(again, fd, inheritable)
                os.close(again)


def _fds() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]
