"""A roster in a store that somebody keeps: `lockstep roster`."""

import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import DistError  # type: ignore[attr-defined]

from lockstep.elastic.store import NotOfThisRun, RemoteStore, Secret, StoreServer
from lockstep.elastic.store.values import KeyValues
from lockstep.errors import BadEnvironment
from lockstep.settings.environments.roster import ROSTER

PREFIX = "roster/"
ANSWER_S = 5.0

Answer = TypeVar("Answer")


class StoreHome:
    """The entries of a store at `address`. Connects anew where the connection was lost."""

    is_private = False
    is_written = True
    endpoint_port = 0

    def __init__(self, address: str, secret: bytes) -> None:
        self._address, self._secret = address, Secret(secret)
        self._lock = threading.Lock()
        if not address.rpartition(":")[2].isdigit():
            raise BadEnvironment(f"{ROSTER}=tcp://{address} cannot be used: it looks like tcp://host:port")
        try:
            self._store = self._connected()
        except NotOfThisRun as error:
            raise BadEnvironment(
                f"the roster tcp://{address} does not accept this run's secret: set LOCKSTEP_SECRET, or "
                "LOCKSTEP_SECRET_FILE, to that of `lockstep roster`"
            ) from error
        except DistError as error:
            raise BadEnvironment(
                f"the roster tcp://{address} cannot be reached: {error}. Start it with `lockstep roster`"
            ) from error

    def __str__(self) -> str:
        return f"tcp://{self._address}"

    def entries(self) -> dict[str, str]:
        found = self._do(lambda store: store.starting_with(PREFIX))
        return {key.removeprefix(PREFIX): value.decode() for key, value in found.items()}

    def put(self, key: str, text: str) -> None:
        self._do(lambda store: store.set(PREFIX + key, text))

    def put_first(self, key: str, text: str) -> str:
        return self._do(lambda store: store.compare_set(PREFIX + key, "", text)).decode()

    def close(self) -> None:
        self._store.close()

    def _connected(self) -> RemoteStore:
        return RemoteStore(self._address, self._secret, ANSWER_S, ANSWER_S)

    def _do(self, operation: Callable[[RemoteStore], Answer]) -> Answer:
        """Once more over a new connection if the old one is lost; OSError if that fails too."""
        with self._lock:
            try:
                return operation(self._store)
            except DistError:
                self._store.close()
            try:
                self._store = self._connected()
                return operation(self._store)
            except DistError as error:
                raise OSError(f"the roster {self} does not answer: {error}") from error


class RosterServer:
    """Keeps rosters in memory for those who know the secret. One owner, who calls `close`."""

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self._server = StoreServer(socket.create_server((host, port), backlog=128), KeyValues(), Secret(secret))
        self.port = self._server.port

    def close(self) -> None:
        self._server.close()
