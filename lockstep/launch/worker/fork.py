"""The fork that makes one worker out of another, and what the new one does to become a process of its own.

# Note [Two forks]
# The new process must be a child of the launcher, which alone can learn how it ended. So it is forked by a process in
# between that ends at once: the kernel then gives the orphan to the launcher, which has asked for such (a subreaper).
"""

import os
import sys
import time
import warnings

from lockstep.errors import LockstepError
from lockstep.launch.channels.control import CopyRequest
from lockstep.launch.worker import identity
from lockstep.settings.environment import take_environment


class CannotFork(LockstepError):  # noqa: N818
    """The system refused another process, a limit on their number, say. Only this one is there."""


def fork_for_launcher(request: CopyRequest) -> tuple[int, int]:
    """In the original, which lets the request's files go: the new process, and the end of a pipe that is readable when
    the new one closes its own.

    In the new process, which has a session of its own: 0, and the other end of that pipe. Raises CannotFork where there
    may be no more processes. See Note [Two forks].
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads, which were looked at
        try:
            between = os.fork()
        except OSError as error:
            os.close(reader)
            os.close(writer)
            raise CannotFork(str(error.strerror)) from error
        if between == 0 and _fork_in_between(writer) == 0:
            os.close(reader)
            return 0, writer
    os.close(writer)
    os.waitpid(between, 0)
    pid = int.from_bytes(os.read(reader, 8), "little")
    if pid == 0:
        os.close(reader)
        raise CannotFork("there may be no more processes")
    request.close()
    return pid, reader


def _fork_in_between(writer: int) -> int:
    """Returns 0, in the new process alone. The process in between ends here, whatever happens: it is nobody."""
    between = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os._exit(1)
    if pid:
        os.write(writer, pid.to_bytes(8, "little"))
        os._exit(0)
    os.setsid()
    while os.getppid() == between:  # it ends at its next instruction
        time.sleep(0.0005)
    return 0


def take_part(request: CopyRequest, *, is_copy: bool) -> None:
    """This process is the worker of the request from now on, with its output and variables."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            os.dup2(request.output_fd, stream.fileno())
    os.close(request.output_fd)
    take_environment(request.variables)
    identity.settle(is_copy=is_copy)
