"""torch's Store over the values of this process, and over those of another one.

# Note [Stores that torch holds]
# Parts of torch that are given a store (a PrefixStore, a process group) hold what is C++ of it, and do not keep its
# Python object alive. So a store keeps itself alive until it is closed.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store  # type: ignore[attr-defined]

from lockstep.elastic.store.session import Intrusion, Secret, Session
from lockstep.elastic.store.values import KeyValues
from lockstep.wire.network import keepalive

ANSWER_S = 60.0
"""How long a store may take to answer a question that it can answer at once."""

GRACE_S = 1.0
"""How much later than its limit the answer to a wait may come."""

RETRY_S = 0.05
READ_BYTES = 1 << 16

_open_stores: set[Store] = set()
"""See Note [Stores that torch holds]."""


class NotOfThisRun(DistNetworkError):  # type: ignore[misc]  # noqa: N818
    """Who listens there does not know the run's secret, or is no worker at all."""


class _HeldStore(Store):  # type: ignore[misc]
    """What both kinds have in common. Operations are atomic; `get` and `wait` raise DistStoreError when late."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        _open_stores.add(self)

    def close(self) -> None:
        _open_stores.discard(self)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def get(self, key: str) -> bytes:
        return self._await([key], self._timeout_s)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def _await(self, keys: Sequence[str], limit_s: float) -> list[bytes]:
        raise NotImplementedError


class LocalStore(_HeldStore):
    """The values of this process."""

    def __init__(self, values: KeyValues, timeout_s: float = ANSWER_S) -> None:
        super().__init__(timeout_s)
        self._values = values

    def set(self, key: str, value: str | bytes) -> None:
        self._values.set(key, _as_bytes(value))

    def add(self, key: str, amount: int) -> int:
        return self._values.add(key, amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._values.compare_set(key, _as_bytes(expected), _as_bytes(desired))

    def check(self, keys: Sequence[str]) -> bool:
        return self._values.found(keys) is not None

    def delete_key(self, key: str) -> bool:
        return self._values.delete(key)

    def _await(self, keys: Sequence[str], limit_s: float) -> list[bytes]:
        values = self._values.await_all(keys, limit_s)
        if values is None:
            raise DistStoreError(_late(keys, limit_s))
        return values


class RemoteStore(_HeldStore):
    """The values that a StoreServer keeps at `address`. One owner, who calls `close`.

    Raises NotOfThisRun if who listens there does not know `secret`, and DistNetworkError when the connection is lost,
    at the latest LINK_S after the other host has fallen silent.
    """

    def __init__(self, address: str, secret: Secret, connect_s: float, timeout_s: float = ANSWER_S) -> None:
        super().__init__(timeout_s)
        self.address = address
        self._lock = threading.Lock()
        self._session = Session(secret, serves=False)
        self._num_owed = 0
        """Answers that came too late: they are to be read before the next one."""
        self._answers: list[list[bytes]] = []
        try:
            self._socket = _connected(address, connect_s)
            keepalive.close_when_forked(self)
            self._greet(connect_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        keepalive.forget(self)
        with suppress(AttributeError):  # it was never connected
            self._socket.close()

    def close_copies(self) -> None:
        """See Note [Left to another process] in wire/network/keepalive.py."""
        self._socket.close()

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(b"set", key.encode(), _as_bytes(value))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(b"add", key.encode(), str(amount).encode())[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask(b"compare", key.encode(), _as_bytes(expected), _as_bytes(desired))[0]

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(b"check", *(key.encode() for key in keys))[0])

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(b"delete", key.encode())[0])

    def starting_with(self, prefix: str) -> dict[str, bytes]:
        found = self._ask(b"list", prefix.encode())
        return {key.decode(): value for key, value in zip(found[::2], found[1::2], strict=True)}

    def _await(self, keys: Sequence[str], limit_s: float) -> list[bytes]:
        limit_ms = str(max(1, round(limit_s * 1000))).encode()
        with self._lock:
            word, *values = self._exchange((b"wait", limit_ms, *(key.encode() for key in keys)), limit_s + GRACE_S)
        if word != b"ok":
            raise DistStoreError(_late(keys, limit_s))
        return values

    def _ask(self, *request: bytes) -> list[bytes]:
        with self._lock:
            return self._exchange(request, self._timeout_s)[1:]

    # -- the connection ---------------------------------------------------------------------------------------

    def _greet(self, limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        with self._explaining(limit_s, DistNetworkError, f"who listens at {self.address} is no worker of this run"):
            while not self._session.is_open:
                self._read(until_s)
                self._send(until_s)

    def _exchange(self, request: Sequence[bytes], limit_s: float) -> list[bytes]:
        until_s, answer = time.monotonic() + limit_s, list[bytes]()
        stranger = f"what came from {self.address} was not written by a worker of this run"
        with self._explaining(limit_s, DistStoreError, stranger):
            self._session.send(*request)
            self._send(until_s)
            self._num_owed += 1
            while self._num_owed > 0:
                while not self._answers:
                    self._read(until_s)
                answer = self._answers.pop(0)
                self._num_owed -= 1
        return answer

    @contextmanager
    def _explaining(self, limit_s: float, late: type[Exception], stranger: str) -> Iterator[None]:
        """Inside, what goes wrong becomes torch's own error: `late` when the time is up."""
        try:
            yield
        except TimeoutError as error:
            raise late(f"{self.address} does not answer within {limit_s:g} s") from error
        except Intrusion as error:
            raise NotOfThisRun(stranger) from error
        except OSError as error:
            if self._session.has_greeted and not self._session.is_open:
                raise NotOfThisRun(f"{self.address} does not accept the secret of this run") from error
            raise DistNetworkError(f"the connection to {self.address} is lost: {error}") from error

    def _read(self, until_s: float) -> None:
        data = self._within(until_s, lambda: self._socket.recv(READ_BYTES))
        if not data:
            raise ConnectionError("the other side has closed it")
        self._answers += self._session.receive(data)

    def _send(self, until_s: float) -> None:
        outgoing = self._session.outgoing
        while outgoing:
            del outgoing[: self._within(until_s, lambda: self._socket.send(outgoing))]

    def _within(self, until_s: float, operation: Callable[[], Any]) -> Any:
        self._socket.settimeout(max(0.001, until_s - time.monotonic()))
        return operation()


def _connected(address: str, limit_s: float) -> socket.socket:
    host, port = address.rsplit(":", 1)
    try:
        connection = socket.create_connection((host, int(port)), limit_s)
    except OSError as error:
        raise DistNetworkError(f"nobody is reached at {address}: {error}") from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keepalive.notice_silence(connection.fileno())
    return connection


def connect_patiently(address: str, secret: Secret, limit_s: float) -> RemoteStore:
    """A store whose owner may not have come yet: tries for `limit_s`."""
    until_s = time.monotonic() + limit_s
    while True:
        try:
            return RemoteStore(address, secret, max(0.01, min(keepalive.LINK_S, until_s - time.monotonic())), limit_s)
        except NotOfThisRun:
            raise
        except DistNetworkError:
            if time.monotonic() > until_s:
                raise
        time.sleep(RETRY_S)  # nobody can be waited for as long as nobody listens


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _late(keys: Sequence[str], limit_s: float) -> str:
    return f"nobody has written {', '.join(keys)} within {limit_s:g} s"
