"""The small store that every worker keeps: where others reach it to join, and to form the next generation.

# Note [Endpoints of the dead]
# A refused connection is how a worker is known to be dead, so nobody else may keep its endpoint open: a process
# that the worker forks (a DataLoader's) closes its copies of all sockets at the endpoint's port.

# Note [Claims by number]
# A worker that sends a claim takes a number, writes the claim under it, and waits for the decision under the same
# number. One that dies in between leaves a number without a claim: it is looked at again, and nobody waits for it. Of
# two claims of one worker the higher number is the later one, whichever is written first.
"""

import json
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError  # type: ignore[attr-defined]

from lockstep.elastic.membership.view import Attempt, Claim, Decision, Member, claim_from_json
from lockstep.elastic.store import LocalStore, Secret, StoreServer
from lockstep.elastic.store.values import KeyValues
from lockstep.settings.environments.place import LOOPBACK

LINGER_S = 3.0

UNWRITTEN_S = 0.05
"""How long a number that somebody took may stay without a claim before it is looked for others too."""


class Endpoint:
    """This worker's own store, at `member.address`. One owner, who calls `close`."""

    def __init__(
        self,
        slot: int,
        host: str = LOOPBACK,
        *,
        secret: Secret,
        everywhere: bool = False,
        port: int = 0,
        fresh: bool = False,
    ) -> None:
        """Listens on loopback alone, unless workers come from `everywhere`; at any free port, unless `port` is given.

        `fresh`: see `Member`.
        """
        values = KeyValues()
        listener = socket.create_server(("" if everywhere else host, port), backlog=128)
        self.secret = secret
        self._server = StoreServer(listener, values, secret)
        self.port = self._server.port
        self.store = LocalStore(values)
        self.member = Member(secrets.token_hex(8), slot, f"{host}:{self.port}", fresh=fresh)
        self.store.set("uid", self.member.uid)
        self._seen = 0
        self._unwritten: set[int] = set()
        self._numbers: dict[str, int] = {}
        self._latest: dict[str, int] = {}
        self._answered: list[int] = []

    def become_newcomer(self) -> None:
        """This worker has not founded the run: it joins it."""
        self.member = replace(self.member, fresh=True)

    def publish(self, terms: dict[str, Any], formed: Attempt) -> None:
        """What newcomers must know before they can ask to be admitted, and which generation this worker is part of."""
        self.store.set("terms", json.dumps(terms))
        self.store.set("members", json.dumps(formed.uids))
        self.store.set("generation", str(formed.id.generation))  # last: who reads it finds its members, or later ones

    def has_claim(self) -> bool:
        """Whether a claim has come, or is about to, that was not read yet. 15 us."""
        return bool(self._unwritten) or self.store.add("calls", 0) > self._seen

    def claims(self) -> list[Claim]:
        """The claims that have come since the last look. See Note [Claims by number]."""
        total = self.store.add("calls", 0)
        self._unwritten |= set(range(self._seen, total))
        self._seen = total
        written = [number for number in sorted(self._unwritten) if self.store.check([f"call/{number}"])]
        return [claim for number in written if (claim := self._read(number)) is not None]

    def await_claim(self, limit_s: float) -> None:
        """Returns when a claim is written that was not read yet, or after `limit_s`. See Note [Claims by number]."""
        until_s = time.monotonic() + limit_s
        for number in [*sorted(self._unwritten), self._seen]:
            with suppress(DistStoreError):
                left_s = until_s - time.monotonic() if number == self._seen else min(limit_s, UNWRITTEN_S)
                self.store.wait([f"call/{number}"], timedelta(seconds=max(0.001, left_s)))
                return

    def send_decision(self, uid: str, decision: Decision) -> None:
        """Answers the latest claim that was read of a worker."""
        number = self._numbers.pop(uid, None)
        if number is not None:
            self.store.set(f"answer/{number}", decision.to_json())
            self._answered.append(number)

    def linger(self) -> None:
        """Returns when all who were answered have read it, or after LINGER_S: this worker is about to end."""
        with suppress(DistStoreError):
            self.store.wait([f"heard/{number}" for number in self._answered], timedelta(seconds=LINGER_S))

    def close(self) -> None:
        """Nobody is let in any more: a probe is refused."""
        self._server.close()
        self.store.close()

    def _read(self, number: int) -> Claim | None:
        """None for a claim that was written after a later one of the same worker."""
        claim = claim_from_json(self.store.get(f"call/{number}").decode())
        self.store.delete_key(f"call/{number}")
        self._unwritten.discard(number)
        uid = claim.member.uid
        if number < self._latest.get(uid, 0):
            return None
        self._numbers[uid] = self._latest[uid] = number
        return claim
