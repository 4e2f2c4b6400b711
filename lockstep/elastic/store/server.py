"""Answers at a port for the values of one process: one thread for all connections.

# Note [Strangers at a port]
# Anybody who reaches the port can connect. A stranger gets a random number, and its connection is closed at its first
# wrong word, after GREETING_S, or when more than MOST_STRANGERS are there: it costs a descriptor and no memory. What it
# sends reaches nothing but a Session.
"""

import os
import selectors
import socket
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from lockstep.elastic.store.session import Intrusion, Secret, Session
from lockstep.elastic.store.values import KeyValues
from lockstep.wire.network import keepalive

GREETING_S = 5.0
MOST_STRANGERS = 128
READ_BYTES = 1 << 16
THREAD_NAME = "lockstep-store-"
CROWDED_S = 0.05


@dataclass(eq=False)
class _Connection:
    """A connection that was accepted, and what it waits for."""

    socket: socket.socket
    session: Session
    since_s: float
    awaited: Sequence[str] = ()
    until_s: float = 0.0
    requests: list[list[bytes]] = field(default_factory=list)


class StoreServer:
    """Serves `values` at the port where `listener` listens. One owner, who calls `close`."""

    def __init__(self, listener: socket.socket, values: KeyValues, secret: Secret) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener, self._values, self._secret = listener, values, secret
        self._connections: dict[int, _Connection] = {}
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closed = False
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        values.on_change = self._wake
        self._thread = threading.Thread(target=self._serve, name=f"{THREAD_NAME}{self.port}", daemon=True)
        self._thread.start()
        keepalive.close_when_forked(self)

    def close(self) -> None:
        """Nobody is answered any more, and the port is free."""
        keepalive.forget(self)
        self._is_closed = True
        self._wake()
        self._thread.join()

    def close_copies(self) -> None:
        """See Note [Left to another process] in wire/network/keepalive.py. One may just have been accepted."""
        for number in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(number).st_mode) and _local_port(number) == self.port:
                    keepalive.close_copy(number)

    def _wake(self) -> None:
        with suppress(OSError):  # it has ended meanwhile
            os.eventfd_write(self._wake_fd, 1)

    # -- the thread -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                for key, _ in self._selector.select(self._patience_s()):
                    self._handle(key.fd)
                self._look_after_all()
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection)
            self._selector.close()
            self._listener.close()
            os.close(self._wake_fd)

    def _patience_s(self) -> float | None:
        ends = [connection.until_s for connection in self._connections.values() if connection.awaited]
        strangers = [c.since_s + GREETING_S for c in self._connections.values() if not c.session.is_open]
        first_s = min([*ends, *strangers], default=None)
        return None if first_s is None else max(0.0, first_s - time.monotonic())

    def _handle(self, fd: int) -> None:
        if fd == self._wake_fd:
            os.eventfd_read(fd)
        elif fd == self._listener.fileno():
            self._accept()
        elif fd in self._connections:
            self._read(self._connections[fd])

    def _accept(self) -> None:
        try:
            taken, _ = self._listener.accept()
        except OSError:  # it has gone again, or this process has as many files as it may have
            self._keep_strangers(0)
            time.sleep(CROWDED_S)
            return
        taken.setblocking(False)
        taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keepalive.notice_silence(taken.fileno())
        connection = _Connection(taken, Session(self._secret, serves=True), time.monotonic())
        self._connections[taken.fileno()] = connection
        self._selector.register(taken, selectors.EVENT_READ)
        self._write(connection)
        self._keep_strangers(MOST_STRANGERS)

    def _keep_strangers(self, most: int) -> None:
        """Those who came last stay. See Note [Strangers at a port]."""
        strangers = [known for known in self._connections.values() if not known.session.is_open]
        for stranger in strangers[: max(0, len(strangers) - most)]:
            self._drop(stranger)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(READ_BYTES)
            if not data:
                self._drop(connection)
                return
            connection.requests += connection.session.receive(data)
            self._answer(connection)
        except BlockingIOError:
            self._write(connection)
        except (OSError, Intrusion, ValueError, IndexError):  # the last two: a request that no worker writes
            self._drop(connection)

    def _look_after_all(self) -> None:
        """Waits that are over, those who never greeted, and what could not be sent at once."""
        now_s = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.awaited:
                self._settle(connection, now_s)
            if not connection.session.is_open and now_s > connection.since_s + GREETING_S:
                self._drop(connection)

    def _settle(self, connection: _Connection, now_s: float) -> None:
        values = self._values.found(connection.awaited)
        if values is None and now_s < connection.until_s:
            return
        connection.awaited = ()
        connection.session.send(*([b"timeout"] if values is None else [b"ok", *values]))
        self._answer(connection)

    def _answer(self, connection: _Connection) -> None:
        """Answers requests in their order, up to one that has to wait."""
        while connection.requests and not connection.awaited:
            request = connection.requests.pop(0)
            if request[0] == b"wait":
                connection.until_s = time.monotonic() + int(request[1]) / 1000
                connection.awaited = [key.decode() for key in request[2:]]
                self._settle(connection, time.monotonic())
            else:
                connection.session.send(*self._perform(request))
        self._write(connection)

    def _perform(self, request: list[bytes]) -> list[bytes]:
        values, (name, *arguments) = self._values, request
        keys = [argument.decode() for argument in arguments[:1]] if name != b"check" else []
        match name:
            case b"set":
                values.set(keys[0], arguments[1])
                return [b"ok"]
            case b"add":
                return [b"ok", str(values.add(keys[0], int(arguments[1]))).encode()]
            case b"compare":
                return [b"ok", values.compare_set(keys[0], arguments[1], arguments[2])]
            case b"delete":
                return [b"ok", b"1" if values.delete(keys[0]) else b""]
            case b"check":
                return [b"ok", b"" if values.found([key.decode() for key in arguments]) is None else b"1"]
            case b"list":
                found = values.starting_with(keys[0])
                return [b"ok", *(part for key, value in found.items() for part in (key.encode(), value))]
        raise ValueError(f"no such request: {name!r}")

    def _write(self, connection: _Connection) -> None:
        outgoing = connection.session.outgoing
        try:
            while outgoing:
                del outgoing[: connection.socket.send(outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if outgoing else 0)
        self._selector.modify(connection.socket, events)

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.socket.fileno(), None) is not None:
            self._selector.unregister(connection.socket)
            connection.socket.close()


def _local_port(number: int) -> int | None:
    with socket.socket(fileno=os.dup(number)) as connection:
        name = connection.getsockname()
        return name[1] if connection.family in (socket.AF_INET, socket.AF_INET6) else None
