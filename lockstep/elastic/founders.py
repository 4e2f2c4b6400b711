"""How a worker comes into a run: with the others at its start, or later, through a member's endpoint."""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from lockstep.elastic.client import EndpointClient, probe
from lockstep.elastic.endpoint import Endpoint
from lockstep.elastic.membership import Liveness, Member
from lockstep.errors import BadEnvironment, PeerGone
from lockstep.launch.status import StatusReader
from lockstep.settings.environments.place import LOOPBACK, LaunchPlace

PATIENCE_S = 60.0
"""How long a newcomer looks for a member before it gives up."""


def open_endpoint(place: LaunchPlace) -> Endpoint:
    """This worker's endpoint, where the workers of the run can reach it."""
    slot, fresh = place.world.rank if place.slot is None else place.slot, bool(place.doors)
    if place.world.on_one_host:
        return Endpoint(slot, LOOPBACK, fresh=fresh)
    return Endpoint(slot, _own_address(place), everywhere=True, fresh=fresh)


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
    """Where a newcomer finds members: at the endpoints that the launcher gave it, and those on the launcher's page."""

    place: LaunchPlace
    page: StatusReader | None
    clock: Callable[[], float] = time.monotonic

    def terms(self) -> dict[str, Any]:
        """What newcomers must know, from a living member. Waits for one for a while."""
        until_s = self.clock() + PATIENCE_S
        while True:
            for port in self._ports():
                found = _ask(f"{LOOPBACK}:{port}")
                if found is not None:
                    return found
            if self.clock() > until_s:
                raise BadEnvironment(f"worker {self.place.slot} found no member of the run to join")
            time.sleep(0.05)  # nobody can be waited for as long as nobody is known

    def members(self) -> tuple[Member, ...]:
        return tuple(Member(**member) for member in self.terms()["members"])

    def _ports(self) -> list[int]:
        listed = [port for _, port in self.place.doors]
        rows = [] if self.page is None else self.page.rows().values()
        written = [row.door_port for row in rows if row.is_member and not row.is_ending and _lives(row.pid)]
        return written or listed


def _ask(address: str) -> dict[str, Any] | None:
    if probe(Member("", 0, address), any_uid=True) is not Liveness.ALIVE:
        return None
    try:
        return EndpointClient(address, 5.0).terms()
    except DistError:
        return None


def _lives(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def _own_address(place: LaunchPlace) -> str:
    """The address under which the others reach this host: worker 0's is known to all, others look where they call."""
    if place.world.rank == 0 and not place.agent_store:
        return place.address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((place.address, place.port))  # sends nothing
        address: str = probe.getsockname()[0]
        return address
