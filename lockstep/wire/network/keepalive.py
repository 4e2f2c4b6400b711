"""Connections that notice when nothing comes back, and connections that are left to another process.

# Note [A link that is silent]
# When a host or the link to it vanishes, nothing tells a waiting socket: it would wait for timeout_s, or for ever. So
# the kernel is asked to knock at the other side when a connection has been quiet for a second, and to give it up when
# nothing has come back for LINK_S. A worker that is merely busy, or stopped, has a kernel that answers.

# Note [Left to another process]
# A forked process has copies of all connections, and must let go of them: as long as one copy is open, the other side
# does not learn that this side has died. The objects that own them go on counting their numbers as theirs, and close
# them when they end. A number that was closed before may be that of another file by then: the wrong one would be
# closed. So the number stays taken, by a file that is nothing.
"""

import os
import socket
import stat
from contextlib import suppress

LINK_S = 5
"""See Note [A link that is silent]."""

Sockets = set[tuple[int, int]]
"""Numbers, which may be used again, each with what tells it apart."""


def open_sockets() -> Sockets:
    """The TCP sockets of this process. torch does not tell its own: they are the ones that appear while it connects."""
    found = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # another thread has closed it since
            status = os.fstat(number)
            if stat.S_ISSOCK(status.st_mode) and _is_tcp(number):
                found.add((number, status.st_ino))
    return found


def _is_tcp(number: int) -> bool:
    with socket.socket(fileno=os.dup(number)) as connection:
        return connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM


def let_go(number: int) -> None:
    """Ends this process's hold on a connection. See Note [Left to another process]."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def notice_silence(number: int) -> None:
    """See Note [A link that is silent]. The settings belong to the connection, not to the descriptor."""
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:  # one that listens has no other side
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LINK_S - 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LINK_S * 1000)
