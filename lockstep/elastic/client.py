"""A visit at another worker's door.

# Note [Doors that fall silent]
# Once connected, the kernel gives the connection up when the other host is silent (Note [A link that is silent] in
# wire/network/keepalive.py). Before that, a TCPStore waits without limit for the first word of its server, which may be
# that of a worker that is stopped, or whose link is lost at that moment. So the connection is cut when it takes too
# long.

# Note [Doors that close]
# A worker may die between a knock and a call. Refused, a TCPStore tries again until its limit, more than once, and
# cannot be told not to: seconds in which all others wait. So it connects on a thread of its own, which is left to
# its limit when the door refuses meanwhile.
"""

import errno
import json
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store, TCPStore  # type: ignore[attr-defined]

from lockstep.elastic.endpoint import ANSWER_S
from lockstep.elastic.membership.view import Claim, Decision, Health, Member, claim_to_json
from lockstep.wire.network.keepalive import LINK_S, Sockets, notice_silence, open_sockets

KNOCK_S = 1.0
KNOCKS = 3
"""How often a door that does not even refuse is knocked at before its host counts as unreachable."""
MOST_AT_ONCE = 64
REFUSED_S = 0.05
"""How often it is looked whether a door that has not let us in refuses."""
CUT_S = 0.1
"""How much longer than its own limit a store may take to connect: cut off earlier, it would try again."""


class Guest:
    """Stands at the door of a worker that is alive. Raises RuntimeError when that worker dies."""

    def __init__(self, door: str, timeout_s: float = ANSWER_S) -> None:
        self.store: Store = _connect(door, min(timeout_s, LINK_S))
        self.store.set_timeout(timedelta(seconds=timeout_s))

    def uid(self) -> str:
        return self.store.get("uid").decode()

    def charter(self) -> dict[str, Any] | None:
        """What the worker tells newcomers; None if it is not a member itself."""
        return dict(json.loads(self.store.get("charter"))) if self.store.check(["charter"]) else None

    def call(self, claim: Claim) -> int:
        """Leaves a claim; gives the number under which it is answered."""
        number = int(self.store.add("calls", 1)) - 1
        self.store.set(f"call/{number}", claim_to_json(claim))
        return number

    def answer(self, number: int, limit_s: float) -> Decision | None:
        """What was decided; None if nothing was within `limit_s`."""
        try:
            self.store.wait([f"answer/{number}"], timedelta(seconds=limit_s))
        except DistStoreError:
            return None
        decision = Decision.from_json(self.store.get(f"answer/{number}").decode())
        self.store.set(f"heard/{number}", "")
        return decision


def _connect(door: str, limit_s: float) -> Store:
    """See Note [Doors that fall silent]."""
    host, port = door.rsplit(":", 1)
    before = open_sockets()
    with _cut_off_after(limit_s, int(port), before):
        client = partial(TCPStore, host, int(port), None, False, timedelta(seconds=limit_s), wait_for_workers=False)
        store = _unless_refused(door, client)
    for number in _connections_to(int(port), before):
        notice_silence(number)
    return store


def _unless_refused(door: str, connect: Callable[[], Store]) -> Store:
    """What `connect` gives or raises; DistNetworkError as soon as the door refuses. See Note [Doors that close]."""
    connected: Future[Store] = Future()
    threading.Thread(target=_tell_of, args=(connect, connected), name="lockstep-guest", daemon=True).start()
    while True:
        with suppress(TimeoutError):
            return connected.result(REFUSED_S)
        if not connected.done() and _knock(door) is Health.DEAD:
            raise DistNetworkError(f"nobody is at the door {door} any more")


def _tell_of(connect: Callable[[], Store], connected: "Future[Store]") -> None:
    try:
        connected.set_result(connect())
    except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the connection
        connected.set_exception(error)


@contextmanager
def _cut_off_after(limit_s: float, port: int, before: Sockets) -> Iterator[None]:
    """Connections to `port` that are made inside end after `limit_s`, unless the inside is left earlier."""
    timer = threading.Timer(limit_s + CUT_S, _cut_off, (port, before))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _cut_off(port: int, before: Sockets) -> None:
    for number in _connections_to(port, before):
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _connections_to(port: int, before: Sockets) -> list[int]:
    """The connections of this process to such a port that were not there before."""
    return [number for number, _ in open_sockets() - before if _peer_port(number) == port]


def _peer_port(number: int) -> int | None:
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        port: int = connection.getpeername()[1]
        return port
    return None


def knock(member: Member, *, any_uid: bool = False) -> Health:
    """Whether a worker is alive: its kernel refuses the connection as soon as its process has ended."""
    for _ in range(KNOCKS):
        health = _knock(member.door)
        if health is not Health.UNREACHABLE:
            break
    if any_uid or health is not Health.ALIVE:
        return health
    return _health_of(member)


def knock_all(members: Collection[Member]) -> dict[str, Health]:
    """Whether each worker is alive, by uid. Takes no longer for a host full of workers than for one of them."""
    with ThreadPoolExecutor(max_workers=MOST_AT_ONCE) as pool:
        return dict(zip((member.uid for member in members), pool.map(knock, members), strict=True))


def _knock(door: str) -> Health:
    host, port = door.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), KNOCK_S).close()
    except ConnectionRefusedError:
        return Health.DEAD
    except OSError as error:
        return Health.DEAD if error.errno == errno.ECONNRESET else Health.UNREACHABLE
    return Health.ALIVE


def _health_of(member: Member) -> Health:
    """DEAD too if the port has gone over to another process. One that is too busy to say counts as the one it was."""
    try:
        return Health.ALIVE if Guest(member.door, KNOCK_S).uid() == member.uid else Health.DEAD
    except (RuntimeError, OSError):
        return Health.DEAD if _knock(member.door) is Health.DEAD else Health.ALIVE
