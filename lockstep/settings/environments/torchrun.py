"""Workers started by torchrun, or by anything else that sets RANK, WORLD_SIZE and MASTER_*."""

from collections.abc import Mapping

from lockstep.errors import BadEnvironment
from lockstep.settings.environments.place import LaunchPlace, check_world
from lockstep.settings.environments.variables import optional, port, text, whole
from lockstep.world import World


def place(environ: Mapping[str, str]) -> LaunchPlace | None:
    if "RANK" not in environ:
        return None
    return LaunchPlace(
        launcher="torchrun" if "TORCHELASTIC_RUN_ID" in environ else "RANK and WORLD_SIZE",
        world=check_world(_world(environ), "RANK", "WORLD_SIZE"),
        address=text(environ, "MASTER_ADDR"),
        port=port(environ),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _world(environ: Mapping[str, str]) -> World:
    rank, size = whole(environ, "RANK"), whole(environ, "WORLD_SIZE", at_least=1)
    local_rank, local_size = (
        optional(environ, "LOCAL_RANK"),
        optional(environ, "LOCAL_WORLD_SIZE", at_least=1),
    )
    if local_rank is None and local_size is None and (size == 1 or _is_loopback(text(environ, "MASTER_ADDR"))):
        local_rank, local_size = rank, size
    if local_rank is None or local_size is None:
        missing = "LOCAL_RANK" if local_rank is None else "LOCAL_WORLD_SIZE"
        raise BadEnvironment(
            f"{missing} is not set, so it is unknown which workers share a host: set LOCAL_RANK and "
            "LOCAL_WORLD_SIZE (0 and 1 when each host has one worker)"
        )
    return World(rank, size, local_rank, local_size)


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")
