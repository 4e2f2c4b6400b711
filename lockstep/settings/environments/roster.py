"""A worker that knows of no others: a roster says whether there are any. What starts it gives it a number."""

from collections.abc import Mapping

from lockstep.errors import BadEnvironment
from lockstep.settings.environments.lockstep_run import SLOT
from lockstep.settings.environments.place import LOOPBACK, LaunchPlace
from lockstep.settings.environments.variables import optional
from lockstep.world import World

ROSTER = "LOCKSTEP_ROSTER"


def place(environ: Mapping[str, str]) -> LaunchPlace | None:
    """A world of one worker on one of several hosts, until it has found others."""
    if not environ.get(ROSTER, "").strip():
        return None
    slot = optional(environ, SLOT)
    if slot is None:
        raise BadEnvironment(
            f"{ROSTER} is set but {SLOT} is not: give every worker a number of its own, from 0; one that takes the "
            "place of another has the other's"
        )
    return LaunchPlace("a roster", World(spans_hosts=True), LOOPBACK, 0, slot=slot)
