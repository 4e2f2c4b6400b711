"""Where this process stands: which launcher started it, which worker it is, and where the others meet."""

from dataclasses import dataclass, field

from lockstep.errors import BadEnvironment
from lockstep.world import World

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class LaunchPlace:
    """One worker's place, and the address at which all workers of the run meet.

    `listen_fd` is a socket that already listens at `address:port`, handed down by the launcher to worker 0.
    `agent_store` says that the launcher itself hosts the store there. Port 0: there is nobody to meet.
    `slot` is the number of this worker for people and launchers, where it is not its rank. `endpoints` are the
    addresses of living members, given by a launcher to a worker that comes later: it asks there to be admitted, and
    founds nothing. Where no launcher knows them, `roster` names where they are found: see elastic/roster. `secret` is
    what only the workers of this run know, and `own_address` where others reach this host, if the user has said so.
    """

    launcher: str
    world: World
    address: str
    port: int
    listen_fd: int | None = None
    agent_store: bool = False
    slot: int | None = None
    endpoints: tuple[str, ...] = ()
    roster: str = ""
    own_address: str = ""
    secret: bytes = field(default=b"", repr=False)


def check_world(world: World, rank_name: str, size_name: str) -> World:
    """The same world, known to be free of contradictions; the names are the variables to blame."""
    if not 0 <= world.rank < world.size:
        raise BadEnvironment(
            f"{rank_name}={world.rank} contradicts {size_name}={world.size}: "
            f"with {world.size} workers it is between 0 and {world.size - 1}"
        )
    if not 0 <= world.local_rank < world.local_size <= world.size:
        raise BadEnvironment(
            f"local rank {world.local_rank} of {world.local_size} workers on this host contradicts "
            f"{rank_name}={world.rank} and {size_name}={world.size}: look at the launcher's local variables"
        )
    return world
