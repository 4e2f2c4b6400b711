"""How a worker reaches the endpoint of another one.

# Note [Endpoints that fall silent]
# Once connected, the kernel gives the connection up when the other host is silent (Note [A link that is silent] in
# wire/network/keepalive.py). Before that, a TCPStore waits without limit for the first word of its server, which may be
# that of a worker that is stopped, or whose link is lost at that moment. So the connection is cut when it takes too
# long.

# Note [Endpoints that close]
# A worker may die between a probe and a claim. Refused, a TCPStore tries again until its limit, more than once, and
# cannot be told not to: seconds in which all others wait. So it connects on a thread of its own, which is left to
# its limit when the endpoint refuses meanwhile.
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
from lockstep.elastic.membership.view import Claim, Decision, Liveness, Member, claim_to_json
from lockstep.wire.network.keepalive import LINK_S, Sockets, notice_silence, open_sockets

PROBE_S = 1.0
PROBES = 3
"""How often an endpoint that does not even refuse is probed before its host counts as unreachable."""
MOST_AT_ONCE = 64
REFUSED_S = 0.05
"""How often an endpoint that has not accepted a connection is probed meanwhile."""
CUT_S = 0.1
"""How much longer than its own limit a store may take to connect: cut off earlier, it would try again."""


class EndpointClient:
    """A connection to the endpoint of a worker that is alive. Raises RuntimeError when that worker dies."""

    def __init__(self, address: str, timeout_s: float = ANSWER_S) -> None:
        self.store: Store = _connect(address, min(timeout_s, LINK_S))
        self.store.set_timeout(timedelta(seconds=timeout_s))

    def uid(self) -> str:
        return self.store.get("uid").decode()

    def terms(self) -> dict[str, Any] | None:
        """What newcomers must know; None if the worker is not a member itself."""
        return dict(json.loads(self.store.get("terms"))) if self.store.check(["terms"]) else None

    def send_claim(self, claim: Claim) -> int:
        """Sends a claim; gives the number under which the decision will stand."""
        number = int(self.store.add("calls", 1)) - 1
        self.store.set(f"call/{number}", claim_to_json(claim))
        return number

    def await_decision(self, number: int, limit_s: float) -> Decision | None:
        """What was decided; None if nothing was within `limit_s`."""
        try:
            self.store.wait([f"answer/{number}"], timedelta(seconds=limit_s))
        except DistStoreError:
            return None
        decision = Decision.from_json(self.store.get(f"answer/{number}").decode())
        self.store.set(f"heard/{number}", "")
        return decision


def _connect(address: str, limit_s: float) -> Store:
    """See Note [Endpoints that fall silent]."""
    host, port = address.rsplit(":", 1)
    before = open_sockets()
    with _cut_off_after(limit_s, int(port), before):
        client = partial(TCPStore, host, int(port), None, False, timedelta(seconds=limit_s), wait_for_workers=False)
        store = _unless_refused(address, client)
    for number in _connections_to(int(port), before):
        notice_silence(number)
    return store


def _unless_refused(address: str, connect: Callable[[], Store]) -> Store:
    """What `connect` gives or raises; DistNetworkError as soon as the endpoint refuses.

    See Note [Endpoints that close].
    """
    connected: Future[Store] = Future()
    threading.Thread(target=_connect_into, args=(connect, connected), name="lockstep-client", daemon=True).start()
    while True:
        with suppress(TimeoutError):
            return connected.result(REFUSED_S)
        if not connected.done() and _probe(address) is Liveness.DEAD:
            raise DistNetworkError(f"nobody listens at {address} any more")


def _connect_into(connect: Callable[[], Store], connected: "Future[Store]") -> None:
    try:
        connected.set_result(connect())
    except BaseException as error:  # noqa: BLE001 - raised where the connection is awaited
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


def probe(member: Member, *, any_uid: bool = False) -> Liveness:
    """Whether a worker is alive: its kernel refuses the connection as soon as its process has ended."""
    for _ in range(PROBES):
        health = _probe(member.address)
        if health is not Liveness.UNREACHABLE:
            break
    if any_uid or health is not Liveness.ALIVE:
        return health
    return _liveness_of(member)


def probe_all(members: Collection[Member]) -> dict[str, Liveness]:
    """Whether each worker is alive, by uid. Takes no longer for a host full of workers than for one of them."""
    with ThreadPoolExecutor(max_workers=MOST_AT_ONCE) as pool:
        return dict(zip((member.uid for member in members), pool.map(probe, members), strict=True))


def _probe(address: str) -> Liveness:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), PROBE_S).close()
    except ConnectionRefusedError:
        return Liveness.DEAD
    except OSError as error:
        return Liveness.DEAD if error.errno == errno.ECONNRESET else Liveness.UNREACHABLE
    return Liveness.ALIVE


def _liveness_of(member: Member) -> Liveness:
    """DEAD too if the port has gone over to another process. One that is too busy to say counts as the one it was."""
    try:
        return Liveness.ALIVE if EndpointClient(member.address, PROBE_S).uid() == member.uid else Liveness.DEAD
    except (RuntimeError, OSError):
        return Liveness.DEAD if _probe(member.address) is Liveness.DEAD else Liveness.ALIVE
