"""Sockets between the workers of one host: they carry open files, and break at once when a peer dies.

# Note [Who has died]
# When a worker dies, for any reason, the kernel closes its sockets, and its peers see that the connection hung up.
# A worker that leaves because it noticed a death closes its sockets too. So that the others do not take it for the one
# that died, it first writes the rank that it accuses in a page that all share, and they name that one. A worker that a
# peer accuses accuses none itself: otherwise it would be up to chance which of the two the others name.
"""

import errno
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.errors import SILENT, BadEnvironment, PeerGone
from lockstep.wire.network import keepalive
from lockstep.wire.network.deadline import Deadline, do_nothing
from lockstep.wire.shared.segments import allocate, allow_many_files, mapped
from lockstep.wire.shared.semaphores import LOOK_S
from lockstep.world import World

MESSAGE_BYTES = 64 * 1024
SECRET_BYTES = 32
ENDED = "its process has ended or closed the connection"
MAX_FILES = 250
"""How many open files one message takes; the kernel's own limit is 253."""

_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL | select.POLLRDHUP


class Neighbours:
    """A connection to every other member on this host. Its owner calls `close`."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket], accused: torch.Tensor, timeout_s: float) -> None:
        self.rank = rank
        self.sockets = sockets
        self.timeout_s = timeout_s
        self.closed = False
        self._accused = accused
        keepalive.close_when_forked(self)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of all workers on this host, this one too, in order."""
        return tuple(sorted((self.rank, *self.sockets)))

    def receive(self, peer: int) -> tuple[bytes, list[int]]:
        """Waits for the next message of a peer; the caller closes the files that come with it."""
        try:
            message, files, _, _ = socket.recv_fds(self.sockets[peer], MESSAGE_BYTES, MAX_FILES)
        except OSError as error:
            raise self.blame(peer, _reason(error)) from error
        if not message:
            raise self.blame(peer, ENDED)
        return message, files

    def try_send(self, peer: int, message: bytes, files: list[int]) -> bool:
        """Sends a message, and open files, to a peer; False if too many files of this user are in transit.

        Blocks only if the peer has many unread messages.
        """
        try:
            socket.send_fds(self.sockets[peer], [message], files)
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                return False
            raise self.blame(peer, _reason(error)) from error
        return True

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(sorted(self.sockets))

    def gone(self) -> list[int]:
        """The peers whose connection has hung up by now."""
        return self.await_gone(0)

    def await_gone(self, limit_s: float) -> list[int]:
        """The same as soon as there are any, or after `limit_s`."""
        return self._poll(select.POLLRDHUP, _GONE, limit_s)

    def with_mail(self) -> list[int]:
        """The peers that have sent something and are still there."""
        return [] if self.closed else self._poll(select.POLLIN | select.POLLRDHUP, select.POLLIN, 0, without=_GONE)

    def wait_for_mail(self, limit_s: float) -> None:
        """Returns when a peer has sent something, or after `limit_s`."""
        self._poll(select.POLLIN, select.POLLIN, limit_s)

    def _poll(self, events: int, matching: int, limit_s: float, without: int = 0) -> list[int]:
        poll = select.poll()
        peers = {}
        for peer, connection in self.sockets.items():
            if (descriptor := connection.fileno()) < 0:
                return sorted(self.sockets)
            peers[descriptor] = peer
            poll.register(descriptor, events)
        ready = poll.poll(limit_s * 1000)
        return sorted(peers[descriptor] for descriptor, seen in ready if seen & matching and not seen & without)

    def blame(self, peer: int, cause: str) -> PeerGone:
        """The error for a peer that is gone; accuses the lost worker on the page. See Note [Who has died]."""
        if self.closed:
            return PeerGone(peer, "the connection was closed here")
        lost = peer
        for _ in self.sockets:
            accused = self._accused_by(lost)
            if accused == self.rank:
                return PeerGone(lost, cause)
            if accused is None or accused == lost:
                break
            lost = accused
        self.accuse(lost)
        return PeerGone(lost, cause)

    def accusers(self) -> list[int]:
        """The peers that leave, or have left, because of a worker that they accuse."""
        return [peer for peer in self.peers if self._accused_by(peer) is not None]

    def accuse(self, rank: int) -> None:
        """This worker is about to leave because of worker `rank`, on this host or another."""
        self._accused[self.rank] = rank + 1

    def _accused_by(self, rank: int) -> int | None:
        accused = int(self._accused[rank])
        return None if accused == 0 else accused - 1

    def close(self) -> None:
        self.closed = True
        keepalive.forget(self)
        for connection in self.sockets.values():
            _shut(connection)

    def close_copies(self) -> None:
        """See Note [Left to another process] in keepalive.py."""
        self.closed = True
        for connection in self.sockets.values():
            connection.close()


def connect(
    world: World, members: Collection[int], store: Store, timeout_s: float, watch: Callable[[], None] = do_nothing
) -> Neighbours:
    """Collective. Connects every pair of `members`, the ranks of workers on this host; no other process can join.

    The lower rank of a pair listens, at an address of the abstract namespace (no file) that it writes into the store,
    with a secret. Any process on the host can see the address; one of another user, or without the secret, is refused.
    While it waits it calls `watch`, which raises PeerGone if a worker is lost.
    """
    allow_many_files()
    sockets: dict[int, socket.socket] = {}
    try:
        deadline = Deadline(timeout_s, watch)
        _connect_all(world.rank, sorted(set(members) - {world.rank}), store, deadline, sockets)
        return Neighbours(world.rank, sockets, _shared_page(world.rank, sockets, world.size), timeout_s)
    except (OSError, RuntimeError, PeerGone) as error:  # the store's own errors are RuntimeErrors
        for connection in sockets.values():
            connection.close()
        missing = sorted(set(members) - {world.rank, *sockets})
        who = f"workers {missing} did not connect" if missing else "a worker left while all were connecting"
        raise BadEnvironment(f"{who} within {timeout_s:g} s, as worker {world.rank} sees it: {error}") from error


def _connect_all(
    rank: int, peers: Sequence[int], store: Store, deadline: Deadline, connections: dict[int, socket.socket]
) -> None:
    name, secret = f"\0lockstep-{secrets.token_hex(16)}", secrets.token_hex(SECRET_BYTES // 2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen(max(1, len(peers)))
        listener.setblocking(False)
        store.set(f"neighbour/{rank}", secret + name)
        for peer in peers:
            if peer < rank:
                connections[peer] = _call(peer, rank, store, deadline)
        while len(connections) < len(peers):
            deadline.until(lambda: select.select([listener], [], [], LOOK_S)[0])
            answered = _answer(listener, secret.encode(), deadline.timeout_s)
            connections.update(answered)


def _shared_page(rank: int, sockets: dict[int, socket.socket], num_ranks: int) -> torch.Tensor:
    """The page of accusations, one number per rank, made by the lowest rank and sent when all are connected.

    After that no worker needs the store any more.
    """
    num_bytes = 4 * num_ranks
    if rank < min(sockets, default=rank + 1):
        file = allocate(num_bytes)
        for peer, connection in sockets.items():
            if not connection.recv(MESSAGE_BYTES):
                raise PeerGone(peer, ENDED)
        for connection in sockets.values():
            socket.send_fds(connection, [b"page"], [file])
    else:
        sockets[min(sockets)].send(b"connected to all")
        _, files, _, _ = socket.recv_fds(sockets[min(sockets)], MESSAGE_BYTES, 1)
        if not files:
            raise PeerGone(min(sockets), ENDED)
        (file,) = files
    page = mapped(file, num_bytes).view(torch.int32)
    os.close(file)
    return page


def _call(peer: int, rank: int, store: Store, deadline: Deadline) -> socket.socket:
    deadline.await_key(store, f"neighbour/{peer}")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(deadline.timeout_s)
    entry = bytes(store.get(f"neighbour/{peer}"))
    secret, name = entry[:SECRET_BYTES], entry[SECRET_BYTES:]
    connection.connect(name)
    connection.send(secret + struct.pack("i", rank))
    return connection


def _answer(listener: socket.socket, secret: bytes, timeout_s: float) -> dict[int, socket.socket]:
    """The connection of the next worker, by rank; none if it does not know the secret."""
    connection, _ = listener.accept()
    connection.settimeout(timeout_s)
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user == os.getuid():
        greeting = connection.recv(SECRET_BYTES + 4)
        if len(greeting) == SECRET_BYTES + 4 and secrets.compare_digest(greeting[:SECRET_BYTES], secret):
            return {struct.unpack("i", greeting[SECRET_BYTES:])[0]: connection}
    connection.close()
    return {}


def _shut(connection: socket.socket) -> None:
    """Wakes a thread that waits on the socket, then closes it."""
    with suppress(OSError):  # the peer was faster
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"{SILENT} longer than timeout_s"
    if isinstance(error, ConnectionError):
        return ENDED
    return error.strerror or str(error)
