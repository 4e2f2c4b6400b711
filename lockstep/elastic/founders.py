"""How a worker comes into a run: with the others at its start, or later, through a member's endpoint."""

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from lockstep.elastic.address import address_of_this_host
from lockstep.elastic.client import EndpointClient, probe, probe_all
from lockstep.elastic.endpoint import Endpoint
from lockstep.elastic.membership import Liveness, Member
from lockstep.elastic.roster.roster import Sighting
from lockstep.elastic.store import NotOfThisRun, Secret
from lockstep.errors import BadEnvironment, PeerGone
from lockstep.launch.channels.status import StatusReader
from lockstep.settings.environments.place import LOOPBACK, LaunchPlace

PATIENCE_S = 60.0
"""How long a newcomer looks for a member before it gives up."""

Addresses = Callable[[], Iterable[str]]


def open_endpoint(place: LaunchPlace, *, fresh: bool = False, port: int = 0) -> Endpoint:
    """This worker's endpoint, where the workers of the run can reach it."""
    slot, secret = place.world.rank if place.slot is None else place.slot, Secret(place.secret)
    if place.world.on_one_host:
        return Endpoint(slot, LOOPBACK, secret=secret, fresh=fresh)
    return Endpoint(slot, address_of_this_host(place), secret=secret, everywhere=True, port=port, fresh=fresh)


def gather_founders(place: LaunchPlace, endpoint: Endpoint, store: Store | None) -> tuple[Member, ...]:
    """Collective. All workers of the first generation, in order of their slots, which is that of their ranks."""
    if store is None:
        return (endpoint.member,)
    try:
        store.set(f"lockstep/founder/{place.world.rank}", json.dumps(vars(endpoint.member)))
        found = [store.get(f"lockstep/founder/{rank}") for rank in range(place.world.size)]
    except DistError as error:
        raise PeerGone(0, f"the store that it keeps does not answer ({str(error).splitlines()[0]})") from error
    return tuple(Member(**json.loads(text)) for text in found)


@dataclass(frozen=True)
class MemberDirectory:
    """Where a newcomer finds members: `addresses` gives those of endpoints at which they may be."""

    slot: int
    secret: Secret
    addresses: Addresses
    clock: Callable[[], float] = time.monotonic

    def terms(self) -> dict[str, Any]:
        """What newcomers must know, from a living member. Waits for one for a while."""
        until_s = self.clock() + PATIENCE_S
        while True:
            for address in self.addresses():
                found = _ask(address, self.secret)
                if found is not None:
                    return found
            if self.clock() > until_s:
                raise BadEnvironment(f"worker {self.slot} found no member of the run to join")
            time.sleep(0.05)  # nobody can be waited for as long as nobody is known

    def members(self) -> tuple[Member, ...]:
        return tuple(Member(**member) for member in self.terms()["members"])


def known_to_launcher(place: LaunchPlace, page: StatusReader | None) -> Addresses:
    """The endpoints of members on the launcher's page; those that it gave this worker, if none stands there."""

    def addresses() -> Iterable[str]:
        rows = [] if page is None else page.rows().values()
        members = [row for row in rows if row.is_member and not row.is_ending and _lives(row.pid)]
        return [f"{LOOPBACK}:{row.endpoint_port}" for row in members] or place.endpoints

    return addresses


def look_at(addresses: Iterable[str], secret: Secret) -> Sighting:
    """Who answers at these addresses, as a worker of this run."""
    members = [Member(address, 0, address) for address in addresses]
    health = probe_all(members, secret, any_uid=True)
    alive = [member.address for member in members if health[member.uid] is Liveness.ALIVE]
    unreachable = {uid: "does not answer" for uid, found in health.items() if found is Liveness.UNREACHABLE}
    unreachable |= {address: why for address in alive if (why := _refusal(address, secret))}
    return Sighting(tuple(address for address in alive if address not in unreachable), unreachable)


def _refusal(address: str, secret: Secret) -> str:
    """Why a worker of this run cannot talk to who listens there; one that is too busy to talk is no stranger."""
    try:
        EndpointClient(address, secret, 2.0).close()
    except NotOfThisRun:
        return "does not know this run's secret"
    except DistError:
        return ""
    return ""


def _ask(address: str, secret: Secret) -> dict[str, Any] | None:
    if probe(Member("", 0, address), secret, any_uid=True) is not Liveness.ALIVE:
        return None
    try:
        with EndpointClient(address, secret, 5.0) as client:
            return client.terms()
    except DistError:
        return None


def _lives(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
