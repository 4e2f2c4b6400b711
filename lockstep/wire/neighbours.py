"""Sockets between the workers of one host: short messages in order, open files, and word at once when a peer dies.

# Note [Sockets as signals]
# Workers share memory, and tell each other through Unix sockets when it may be read. A message is a system call on both
# sides, which orders memory on every processor; a waiting worker sleeps in the kernel; and when a worker dies, the
# kernel closes its sockets, so that its peers wake up and know who it was. A shared memory segment is an open file
# without a name (memfd) that travels over the socket: there is nothing to unlink, and no crash leaves one behind.
# A process that a worker forks (a DataLoader's) would hold the sockets open after its death: it closes its copies.
"""

import os
import secrets
import select
import socket
import struct
import weakref
from contextlib import suppress
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.errors import BadEnvironment, PeerGone
from lockstep.world import World

MESSAGE_BYTES = 64 * 1024
MAX_FILES = 250
"""How many open files one message takes; the kernel's own limit is 253."""


@dataclass(eq=False)
class Neighbours:
    """A connection to every other worker on this host. One thread at a time; one owner, who calls `close`."""

    sockets: dict[int, socket.socket]
    timeout_s: float

    def __post_init__(self) -> None:
        _open.add(self)

    def send(self, peer: int, message: bytes, files: list[int] | None = None) -> None:
        """Hands a message, and open files, to a peer; blocks only if the peer has many unread ones."""
        try:
            socket.send_fds(self.sockets[peer], [message], files or [])
        except OSError as error:
            raise PeerGone(peer, _reason(error)) from error

    def receive(self, peer: int) -> tuple[bytes, list[int]]:
        """Waits for the next message of a peer; the files that come with it are the caller's to close."""
        try:
            message, files, _, _ = socket.recv_fds(self.sockets[peer], MESSAGE_BYTES, MAX_FILES)
        except OSError as error:
            raise PeerGone(peer, _reason(error)) from error
        if not message:
            raise PeerGone(peer, "its process has ended or closed the connection")
        return message, files

    def receive_all(self) -> dict[int, tuple[bytes, list[int]]]:
        """The next message of every peer. Whoever dies is noticed at once, whomever else is still waited for."""
        waiting = {connection.fileno(): peer for peer, connection in self.sockets.items()}
        poll = select.poll()
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        heard: dict[int, tuple[bytes, list[int]]] = {}
        while waiting:
            ready = poll.poll(self.timeout_s * 1000)
            if not ready:
                raise PeerGone(min(waiting.values()), f"it has been silent for {self.timeout_s:g} s")
            for descriptor, _ in ready:
                peer = waiting.pop(descriptor)
                poll.unregister(descriptor)
                heard[peer] = self.receive(peer)
        return heard

    def close(self) -> None:
        _open.discard(self)
        for connection in self.sockets.values():
            _shut(connection)


_open: "weakref.WeakSet[Neighbours]" = weakref.WeakSet()


def _close_in_forked_process() -> None:
    """See Note [Sockets as signals]. Closes this process's copies; the connections go on in the worker."""
    for neighbours in _open:
        for connection in neighbours.sockets.values():
            connection.close()


os.register_at_fork(after_in_child=_close_in_forked_process)


def connect(world: World, store: Store, timeout_s: float) -> Neighbours:
    """Collective. Connects every pair of workers on this host; nobody else can join.

    The lower rank of a pair listens, at an address of the abstract namespace (no file) that it tells in the store. A
    process of another user, or one that does not know the store's secret, is turned away.
    """
    name = f"\0lockstep-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen(world.size)
        listener.settimeout(timeout_s)
        store.set(f"neighbour/{world.rank}", name)
        connections = {peer: _call(peer, world.rank, store, timeout_s) for peer in range(world.rank)}
        try:
            while len(connections) < world.size - 1:
                peer, connection = _answer(listener)
                connections[peer] = connection
        except TimeoutError as error:
            missing = sorted(set(world.peers) - set(connections))
            raise BadEnvironment(f"workers {missing} did not connect within {timeout_s:g} s") from error
    for connection in connections.values():
        connection.settimeout(timeout_s)
    return Neighbours(connections, timeout_s)


def _call(peer: int, rank: int, store: Store, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(timeout_s)
    connection.connect(bytes(store.get(f"neighbour/{peer}")))
    connection.send(struct.pack("i", rank))
    return connection


def _answer(listener: socket.socket) -> tuple[int, socket.socket]:
    """The next worker that calls."""
    while True:
        connection, _ = listener.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid():
            connection.settimeout(listener.gettimeout())
            return struct.unpack("i", connection.recv(4))[0], connection
        connection.close()


def _shut(connection: socket.socket) -> None:
    """Wakes a thread that waits on the socket, then closes it."""
    with suppress(OSError):  # the peer was faster
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "it has been silent for longer than timeout_s"
    return error.strerror or str(error)
