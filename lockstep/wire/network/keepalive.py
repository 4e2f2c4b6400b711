"""Connections that notice when nothing comes back, and connections that are left to another process.

# Note [A link that is silent]
# When a host or the link to it vanishes, a waiting socket learns nothing: it would wait for timeout_s, or for ever. So
# the kernel probes the other side when a connection has been quiet for a second, and gives it up when nothing has come
# back for LINK_S. A worker that is merely busy, or stopped, has a kernel that answers.

# Note [Left to another process]
# A process that a worker forks (a DataLoader's) has copies of all its connections, and must let go of them: as long as
# one copy is open, the other side does not learn that the worker has died. The objects that own them go on counting
# their numbers as theirs, and close them when they end. A number that was closed before may be that of another file by
# then: the wrong one would be closed. So the number stays taken, by the null device.
"""

import os
import socket
import stat
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet

LINK_S = 5
"""See Note [A link that is silent]."""

Sockets = set[tuple[int, int]]
"""Numbers, which may be used again, each with the inode that identifies it."""


def open_sockets() -> Sockets:
    """The TCP sockets of this process. torch does not name its own: they are the ones that appear while it connects."""
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


def notice_silence(number: int) -> None:
    """See Note [A link that is silent]. The settings belong to the connection, not to the descriptor."""
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:  # one that listens has no other side
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LINK_S - 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LINK_S * 1000)


# -- forked processes: see Note [Left to another process] ----------------------------------------------------------


class ConnectionOwner(Protocol):
    """An object that owns connections of this process."""

    def let_go(self) -> None:
        """Called in a process that was forked: its copies of the connections are closed; the worker's go on."""


_owners: WeakSet[ConnectionOwner] = WeakSet()


def let_go_when_forked(owner: ConnectionOwner) -> None:
    """Every process that is forked from now on calls `owner.let_go`, until `forget`."""
    _owners.add(owner)


def forget(owner: ConnectionOwner) -> None:
    _owners.discard(owner)


def let_go(number: int) -> None:
    """Ends this process's hold on a connection."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def _let_go_of_all() -> None:
    for owner in _owners:
        owner.let_go()
    _owners.clear()


os.register_at_fork(after_in_child=_let_go_of_all)
