"""How a worker reaches the endpoint of another one."""

import errno
import json
import socket
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import DistStoreError  # type: ignore[attr-defined]

from lockstep.elastic.membership.view import Claim, Decision, Liveness, Member, claim_to_json
from lockstep.elastic.store import NotOfThisRun, RemoteStore, Secret
from lockstep.elastic.store.stores import ANSWER_S
from lockstep.wire.network.keepalive import LINK_S

PROBE_S = 1.0
PROBES = 3
"""How often an endpoint that does not even refuse is probed before its host counts as unreachable."""
MOST_AT_ONCE = 64


@dataclass(frozen=True)
class Standpoint:
    """Who probes, and the number of the generation that it was part of last: later ones may be without it."""

    uid: str
    generation: int


class EndpointClient:
    """A connection to the endpoint of a worker that is alive. Raises RuntimeError when that worker dies.

    One owner, who calls `close`, or uses it in a `with` statement.
    """

    def __init__(self, address: str, secret: Secret, timeout_s: float = ANSWER_S) -> None:
        self.store = RemoteStore(address, secret, min(timeout_s, LINK_S), timeout_s)

    def __enter__(self) -> "EndpointClient":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.store.close()

    def uid(self) -> str:
        return self.store.get("uid").decode()

    def is_new(self) -> bool:
        """Whether the worker was part of no generation yet."""
        return not self.store.check(["generation"])

    def is_elsewhere(self, seen_from: Standpoint) -> bool:
        """Whether the worker, which is not new, is in a later generation, without the one who asks."""
        if int(self.store.get("generation")) <= seen_from.generation:
            return False
        return seen_from.uid not in json.loads(self.store.get("members"))

    def terms(self) -> dict[str, Any] | None:
        """What newcomers must know; None if the worker is not a member itself."""
        return dict(json.loads(self.store.get("terms"))) if self.store.check(["terms"]) else None

    def send_claim(self, claim: Claim) -> int:
        """Sends a claim; gives the number under which the decision will stand."""
        number = self.store.add("calls", 1) - 1
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


def probe(
    member: Member, secret: Secret, seen_from: Standpoint | None = None, *, any_uid: bool = False, tries: int = PROBES
) -> Liveness:
    """Whether a worker is alive: its kernel refuses the connection as soon as its process has ended."""
    for _ in range(tries):
        health = _probe(member.address)
        if health is not Liveness.UNREACHABLE:
            break
    if any_uid or health is not Liveness.ALIVE:
        return health
    return _liveness_of(member, secret, seen_from)


def probe_all(
    members: Collection[Member],
    secret: Secret,
    seen_from: Standpoint | None = None,
    *,
    any_uid: bool = False,
    tries: int = PROBES,
) -> dict[str, Liveness]:
    """Whether each worker is alive, by uid. Takes no longer for a host full of workers than for one of them."""
    if not members:
        return {}
    ask = partial(probe, secret=secret, seen_from=seen_from, any_uid=any_uid, tries=tries)
    with ThreadPoolExecutor(max_workers=MOST_AT_ONCE) as pool:
        return dict(zip((member.uid for member in members), pool.map(ask, members), strict=True))


def _probe(address: str) -> Liveness:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), PROBE_S).close()
    except ConnectionRefusedError:
        return Liveness.DEAD
    except OSError as error:
        return Liveness.DEAD if error.errno == errno.ECONNRESET else Liveness.UNREACHABLE
    return Liveness.ALIVE


def _liveness_of(member: Member, secret: Secret, seen_from: Standpoint | None) -> Liveness:
    """DEAD too if the port has gone over to another process. One that is too busy to say counts as the one it was."""
    try:
        with EndpointClient(member.address, secret, PROBE_S) as client:
            if client.uid() != member.uid:
                return Liveness.DEAD
            if client.is_new():
                return Liveness.NEW
            is_elsewhere = seen_from is not None and client.is_elsewhere(seen_from)
            return Liveness.ELSEWHERE if is_elsewhere else Liveness.ALIVE
    except NotOfThisRun:
        return Liveness.DEAD
    except (RuntimeError, OSError):
        return Liveness.DEAD if _probe(member.address) is Liveness.DEAD else Liveness.ALIVE
