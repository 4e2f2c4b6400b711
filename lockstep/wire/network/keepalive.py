"""Connections that notice a silent link, and connections that are left to another process.

# Note [A link that is silent]
# When a host or the link to it vanishes, a waiting socket does not notice: it would wait for timeout_s, or for ever. So
# the kernel probes the other side when a connection has been quiet for a second, and closes it when no answer has come
# for LINK_S. A worker that is merely busy, or stopped, has a kernel that answers.

# Note [Left to another process]
# A process that a worker forks (a DataLoader's) has copies of all its connections, and must close them: as long as one
# copy is open, the other side does not notice that the worker has died. The objects that own the descriptors close them
# when they end. A descriptor that was closed before may by then belong to another file, which would be closed instead.
# So the descriptor is replaced by the null device.
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
    sockets = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # another thread has closed it since
            status = os.fstat(number)
            if stat.S_ISSOCK(status.st_mode) and _is_tcp(number):
                sockets.add((number, status.st_ino))
    return sockets


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

    def close_copies(self) -> None:
        """Called in a forked process: closes its copies of the connections; the worker's stay open."""


_owners: WeakSet[ConnectionOwner] = WeakSet()


def close_when_forked(owner: ConnectionOwner) -> None:
    """Every process that is forked from now on calls `owner.close_copies`, until `forget`."""
    _owners.add(owner)


def forget(owner: ConnectionOwner) -> None:
    _owners.discard(owner)


def close_copy(number: int) -> None:
    """Closes this process's copy of a connection."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def _close_all_copies() -> None:
    for owner in _owners:
        owner.close_copies()
    _owners.clear()


os.register_at_fork(after_in_child=_close_all_copies)
