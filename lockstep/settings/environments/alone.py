"""A process that no launcher started: `python train.py`."""

from collections.abc import Mapping

from lockstep.errors import BadEnvironment
from lockstep.settings.environments.place import LOOPBACK, LaunchPlace
from lockstep.settings.environments.variables import optional
from lockstep.world import World


def place(environ: Mapping[str, str]) -> LaunchPlace:
    """A world of one worker, unless a launcher's variable says that there should be more."""
    if (optional(environ, "WORLD_SIZE") or 1) > 1:
        raise BadEnvironment(
            f"WORLD_SIZE={environ['WORLD_SIZE']} is set but RANK is not, so it is unknown which worker this "
            "is: set RANK, or unset WORLD_SIZE to train alone"
        )
    return LaunchPlace("alone", World(0, 1), LOOPBACK, 0)
