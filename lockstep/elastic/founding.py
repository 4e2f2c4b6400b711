"""How a worker comes into a run: with the others at its start, or later, through a member's door."""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from lockstep.elastic.client import Guest, knock
from lockstep.elastic.endpoint import Door
from lockstep.elastic.membership import Health, Member
from lockstep.errors import BadEnvironment, PeerGone
from lockstep.launch.status import StatusReader
from lockstep.settings.environments.place import LOOPBACK, LaunchPlace

PATIENCE_S = 60.0
"""How long a newcomer looks for a member before it gives up."""


def open_door(place: LaunchPlace) -> Door:
    """This worker's door, where the workers of the run can reach it."""
    slot, fresh = place.world.rank if place.slot is None else place.slot, bool(place.doors)
    if place.world.on_one_host:
        return Door(slot, LOOPBACK, fresh=fresh)
    return Door(slot, _own_address(place), everywhere=True, fresh=fresh)


def meet_founders(place: LaunchPlace, door: Door, store: Store | None) -> tuple[Member, ...]:
    """Collective. All workers of the first generation, in order of their slots, which is that of their ranks."""
    if store is None:
        return (door.member,)
    try:
        store.set(f"lockstep/founder/{place.world.rank}", json.dumps(vars(door.member)))
        told = [store.get(f"lockstep/founder/{rank}") for rank in range(place.world.size)]
    except DistError as error:
        raise PeerGone(0, f"the store that it keeps does not answer ({str(error).splitlines()[0]})") from error
    return tuple(Member(**json.loads(text)) for text in told)


@dataclass(frozen=True)
class Directory:
    """Where a newcomer finds members: at the doors it was told of, and those on the launcher's page."""

    place: LaunchPlace
    page: StatusReader | None
    clock: Callable[[], float] = time.monotonic

    def charter(self) -> dict[str, Any]:
        """What a living member tells newcomers. Waits for one for a while."""
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
        return tuple(Member(**member) for member in self.charter()["members"])

    def _ports(self) -> list[int]:
        listed = [port for _, port in self.place.doors]
        rows = [] if self.page is None else self.page.rows().values()
        written = [row.door_port for row in rows if row.is_member and not row.is_ending and _lives(row.pid)]
        return written or listed


def _ask(door: str) -> dict[str, Any] | None:
    if knock(Member("", 0, door), any_uid=True) is not Health.ALIVE:
        return None
    try:
        return Guest(door, 5.0).charter()
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
